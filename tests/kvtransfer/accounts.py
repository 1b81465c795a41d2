"""Owners of pages on both sides that keep the books and poison whatever they free.

A page that was freed belongs to somebody else: each owner overwrites it at once, so that a late reader brings bytes
that nobody asked for, and a late writer leaves a mark.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.core.errors import TransferError
from pdserve.engine.page_pool import PagePool, PageState
from pdserve.kvtransfer.control_client import TransferClient, TransferPeer
from pdserve.kvtransfer.handoff import TransferState
from pdserve.kvtransfer.incoming import IncomingTransfer
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.timeline import TransferResult
from pdserve.kvtransfer.transport import PageSink

from .world import PROMPT_DIGEST, Listener, Ref

POISON = b"\x66"


def content(seed: str, page_id: int, generation: int, num_bytes: int) -> bytes:
    """What one use of one page holds; of no two uses the same."""
    return random.Random(f"{seed}/{page_id}/{generation}").randbytes(num_bytes)


class Lender(Listener):
    """Prefill's owner: pages are HELD from `lend` until the transfer has ended.

    Args:
        memory: Bytes of the pool.
        seed: Of what the pages hold; each process has another one.
    """

    def __init__(self, memory: KvPool, seed: str) -> None:
        super().__init__()
        self.memory, self.seed = memory, seed
        self.pool = PagePool(memory.num_pages)
        self.leased: dict[str, list[int]] = {}

    def lend(self, transfer_id: str, num_pages: int) -> list[Ref]:
        """Takes pages for a prompt and fills them."""
        pages = self.leased[transfer_id] = self.pool.allocate(num_pages)
        refs = [Ref(page, self.pool.generation(page)) for page in pages]
        for ref in refs:
            size = self.memory.page_bytes
            self.memory.page(ref.page_id)[:] = content(self.seed, ref.page_id, ref.generation, size)
        return refs

    def on_ended(self, transfer_id: str, state: TransferState, reason: str) -> None:
        """See `TransferListener`: the pages are free."""
        pages = self.leased.pop(transfer_id)
        self.pool.release(pages)
        for page in pages:
            self.memory.page(page)[:] = POISON * self.memory.page_bytes
        super().on_ended(transfer_id, state, reason)

    @property
    def even(self) -> bool:
        """Every page is free."""
        self.pool.check({page: 1 for pages in self.leased.values() for page in pages})
        return self.pool.num_free == self.pool.num_pages


@dataclass
class Loan:
    """One transfer on decode's side.

    Attributes:
        incoming: The transfer.
        pages: Its destinations.
        received: What they held when the transfer was complete.
        ended: Done when the pages are free again.
    """

    incoming: IncomingTransfer
    pages: list[int]
    received: list[bytes] = field(default_factory=list)
    ended: asyncio.Task[TransferResult | TransferError] | None = None

    @property
    def is_over(self) -> bool:
        """The pages are free again."""
        return self.ended is not None and self.ended.done()

    async def end(self, limit_s: float = 15.0) -> TransferResult | TransferError:
        """Waits for the end of the transfer and of its pages."""
        assert self.ended is not None
        return await asyncio.wait_for(asyncio.shield(self.ended), limit_s)

    async def reason(self) -> str:
        """Waits for a failure."""
        end = await self.end()
        assert isinstance(end, TransferError), "it is complete"
        return end.reason


class Borrower:
    """Decode's owner: destinations are FILLING until `result` returned; then they are VALID, looked at, and free."""

    def __init__(self, client: TransferClient, sink: PageSink, memory: KvPool, peer: TransferPeer) -> None:
        self.client, self.sink, self.memory, self.peer = client, sink, memory, peer
        self.pool = PagePool(memory.num_pages)
        self.poisoned: set[int] = set()

    def borrow(self, transfer_id: str, num_pages: int, peer: TransferPeer | None = None) -> Loan:
        """Reserves destinations and opens the transfer."""
        pages = self.pool.allocate(num_pages, PageState.FILLING)
        self.poisoned -= set(pages)
        incoming = self.client.start(
            transfer_id,
            peer or self.peer,
            num_cached_pages=0,
            destinations=pages,
            expected_num_tokens=num_pages * 8,
            expected_digest=PROMPT_DIGEST,
        )
        loan = Loan(incoming, pages)
        loan.ended = asyncio.create_task(self._receive(loan))
        return loan

    async def _receive(self, loan: Loan) -> TransferResult | TransferError:
        try:
            result: TransferResult | TransferError = await loan.incoming.result()
        except TransferError as e:
            self.pool.move(loan.pages, PageState.FILLING, PageState.FREE)
            result = e
        else:
            self.pool.validate(loan.pages)
            loan.received = [bytes(self.memory.page(page)) for page in loan.pages]
            self.pool.release(loan.pages)
        for page in loan.pages:
            self.memory.page(page)[:] = POISON * self.memory.page_bytes
        self.poisoned |= set(loan.pages)
        return result

    @property
    def even(self) -> bool:
        """Every page is free, and nobody has written into a freed one."""
        self.pool.check()
        for page in self.poisoned:
            assert self.memory.page(page) == POISON * self.memory.page_bytes, f"page {page} was written after its end"
        return self.pool.num_free == self.pool.num_pages


def assert_received(loan: Loan, seed: str, refs: Sequence[Ref]) -> None:
    """The destinations hold these uses of these pages and nothing else."""
    assert len(loan.received) == len(refs)
    for received, ref in zip(loan.received, refs, strict=True):
        assert received == content(seed, ref.page_id, ref.generation, len(received)), "a foreign page"
