"""Stage: pulls pages of another layout into staging memory, then writes them into ours, converted.

    free slots -> a data plane fills and verifies them -> a thread converts them into our pages -> free slots

A data plane writes staging pages only, so it need not know of conversion. A pull takes as many slots as are free within
its share, so that large transfers go through in pieces; a source that stalls holds a quarter of the slots at most.
`pull` keeps the contract of `PageSink.pull`: it returns or raises, also when it is cancelled, only when nothing
writes into our pages any more.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from concurrent.futures import Executor

import numpy as np

from pdserve.core.clock import Clock
from pdserve.core.errors import TransferError
from pdserve.core.layout import KV_DTYPE_BYTES, KVLayout
from pdserve.kvtransfer.cast import STORAGE, Array, cast
from pdserve.kvtransfer.convert import Block, PagePlan
from pdserve.kvtransfer.pool import PageMemory
from pdserve.kvtransfer.tasks import submit, until_over
from pdserve.kvtransfer.transport import PageSink, SourcePageRef

MAX_PER_SOURCE = 2
"""Pulls from one source that run at once, each with one piece on its way."""
PIECES = 8
"""A piece takes at most this part of the slots."""
WAIT_S = 30.0
"""For a staging page; and for earlier pulls of a source, of which no piece arrives meanwhile."""


class Stage:
    """Staging pages for sources of one layout, and the data plane that writes them.

    Args:
        memory: The staging pages, of the source's page size in bytes; nobody else uses them.
        sink: A data plane into `memory`; closed by `close`.
        theirs: Layout of the sources' pages.
        pool: Our pages.
        ours: Their layout.
        clock: Time.
        threads: Where pages are converted.

    Attributes:
        num_users: Control streams and pulls that need it.
    """

    def __init__(
        self,
        memory: PageMemory,
        sink: PageSink,
        theirs: KVLayout,
        pool: PageMemory,
        ours: KVLayout,
        clock: Clock,
        threads: Executor,
    ) -> None:
        assert memory.page_bytes == theirs.page_bytes, (memory.page_bytes, theirs)
        assert pool.page_bytes == ours.page_bytes, (pool.page_bytes, ours)
        self.sink, self.theirs, self.ours = sink, theirs, ours
        self.num_users = 0
        self._memory, self._pool, self._threads = memory, pool, threads
        self._slots = _Slots(memory.num_pages, clock)
        self._clock = clock
        self._sources: weakref.WeakValueDictionary[str, _Source] = weakref.WeakValueDictionary()

    @property
    def num_free_slots(self) -> int:
        """Staging pages that no pull has."""
        return self._slots.num_free

    async def pull(
        self,
        address: str,
        token: bytes,
        transfer_id: str,
        plan: PagePlan,
        position: int,
        pages: Sequence[SourcePageRef],
        destinations: Sequence[int],
        moved: Sequence[Block],
    ) -> int:
        """Brings source pages of one prompt into our pages.

        Args:
            address: Data plane of the source.
            token: The reader token from the control stream.
            transfer_id: The transfer.
            plan: Pages of the prompt on both sides.
            position: Index within the prompt of the first of `pages`, counted in source pages.
            pages: What to read.
            destinations: Page ids of the whole prompt here; those that are written are FILLING and of this transfer.
            moved: `blocks` of the source: where its heads lie.

        Returns:
            Bytes that went over the wire, headers included.

        Raises:
            TransferError: As `PageSink.pull`; DTYPE_OVERFLOW; STAGING_BUSY: nothing was free in time.
            asyncio.CancelledError: Cancelled by the caller; nothing writes to the destinations any more.
        """
        source = self._sources.setdefault(address, _Source(self._clock))
        self.num_users += 1
        try:
            await source.begin()
            try:
                total, at = 0, 0
                while at < len(pages):
                    slots = await self._slots.take(len(pages) - at)
                    try:
                        piece = pages[at : at + len(slots)]
                        total += await self.sink.pull(address, token, transfer_id, piece, slots)
                        await self._convert(plan, position + at, slots, destinations, moved)
                    finally:
                        self._slots.give(slots)
                    at += len(slots)
                    source.num_pieces += 1
                return total
            finally:
                source.end()
        finally:
            self.num_users -= 1

    async def close(self) -> None:
        """Ends the data plane; outstanding pulls fail."""
        await self.sink.close()

    async def _convert(
        self,
        plan: PagePlan,
        first: int,
        slots: Sequence[int],
        destinations: Sequence[int],
        moved: Sequence[Block],
    ) -> None:
        moving = submit(self._threads, self._move, plan, first, slots, destinations, moved)
        await until_over(moving, lambda: None)  # it is short

    # ---- in a thread -------------------------------------------------------------------------------------------------

    def _move(
        self,
        plan: PagePlan,
        first: int,
        slots: Sequence[int],
        destinations: Sequence[int],
        moved: Sequence[Block],
    ) -> None:
        theirs, ours = self.theirs, self.ours
        for run in plan.runs(first, first + len(slots)):
            source = self._memory.page(slots[run.source_page - first])
            target = self._pool.page(destinations[run.destination_page])
            for block in moved:
                num, rows = run.num_tokens * block.dim, block.num_rows
                at = block.source_at + run.source_token * block.dim
                values = _rows(source, theirs.dtype, at, block.source_step, rows, num)
                at = block.destination_at + run.destination_token * block.dim
                _rows(target, ours.dtype, at, block.destination_step, rows, num)[:] = cast(
                    values, theirs.dtype, ours.dtype
                )


class _Source:
    """Turns of the pulls from one source."""

    def __init__(self, clock: Clock) -> None:
        self.num_pieces = 0  # that arrived
        self._clock, self._turns = clock, asyncio.Semaphore(MAX_PER_SOURCE)

    async def begin(self) -> None:
        """Waits for a turn, as long as earlier pulls get on."""
        before = -1
        while before < self.num_pieces:
            before = self.num_pieces
            try:
                await self._clock.wait_for(self._turns.acquire(), WAIT_S)
            except TimeoutError:
                continue
            return
        raise TransferError(
            f"earlier pulls from this source got nothing within {WAIT_S:g} s, and more must wait", reason="STAGING_BUSY"
        )

    def end(self) -> None:
        """The next one may begin."""
        self._turns.release()


class _Slots:
    """Which staging pages are free."""

    def __init__(self, num_slots: int, clock: Clock) -> None:
        self._free = list(range(num_slots))
        self._clock = clock
        self._count = asyncio.Semaphore(num_slots)
        self._share = max(1, num_slots // PIECES)

    @property
    def num_free(self) -> int:
        return len(self._free)

    async def take(self, most: int) -> list[int]:
        """One slot at least, of those that are free at most a piece; first come, first served."""
        try:
            await self._clock.wait_for(self._count.acquire(), WAIT_S)
        except TimeoutError:
            raise TransferError(
                f"no staging page was free within {WAIT_S:g} s; raise --kv-staging-bytes", reason="STAGING_BUSY"
            ) from None
        taken = [self._free.pop()]
        while len(taken) < min(most, self._share) and not self._count.locked():
            await self._count.acquire()  # at once
            taken.append(self._free.pop())
        return taken

    def give(self, slots: Sequence[int]) -> None:
        """Nothing writes or reads them any more."""
        self._free += slots
        for _ in slots:
            self._count.release()


def _rows(page: memoryview, dtype: str, at: int, step: int, num_rows: int, num: int) -> Array:
    """`[num_rows, num]` elements of a page, in place."""
    item = KV_DTYPE_BYTES[dtype]
    storage = STORAGE.get(dtype, np.uint8)  # what is never cast has 8 bits
    return np.ndarray((num_rows, num), storage, page, at * item, (step * item, item))
