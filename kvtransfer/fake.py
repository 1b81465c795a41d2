"""In-process transport with scripted faults on an injected clock, for tests and the simulator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdserve.core.clock import Clock
from pdserve.core.errors import TransferError
from pdserve.kvtransfer.pool import PageMemory
from pdserve.kvtransfer.transport import Capabilities, SourcePageRef


@dataclass(frozen=True, slots=True)
class PageFate:
    """What happens to one page on its way: seconds it takes, and whether it is lost or arrives with a byte flipped."""

    delay_s: float = 0.0
    lost: bool = False
    corrupt: bool = False


class FakePageSource:
    """`PageSource` whose published pages a `FakePageSink` reads."""

    def __init__(self, memory: PageMemory, address: str = "fake:1") -> None:
        self.memory, self.address, self._next_token = memory, address, 0
        self.tokens: set[bytes] = set()
        self.published: dict[str, tuple[bytes, set[SourcePageRef]]] = {}

    def new_reader(self) -> bytes:
        """See `PageSource`."""
        self._next_token += 1
        self.tokens.add(token := self._next_token.to_bytes(16, "little"))
        return token

    def drop_reader(self, token: bytes) -> None:
        """See `PageSource`."""
        self.tokens.discard(token)

    def publish(self, transfer_id: str, token: bytes, pages: Sequence[SourcePageRef]) -> None:
        """See `PageSource`."""
        self.published.setdefault(transfer_id, (token, set()))[1].update(pages)

    async def withdraw(self, transfer_id: str) -> None:
        """See `PageSource`. A page is copied in one go, so that no read is ever in flight here."""
        self.published.pop(transfer_id, None)


class FakePageSink:
    """`PageSink`; `fate(transfer_id, page)` scripts each page."""

    capabilities = Capabilities(quiescent_cancel=True, zero_copy=True, device_memory=False)

    def __init__(
        self,
        memory: PageMemory,
        sources: Sequence[FakePageSource],
        clock: Clock,
        fate: Callable[[str, SourcePageRef], PageFate] = lambda transfer_id, page: PageFate(),
    ) -> None:
        self._memory, self._sources, self._clock, self.fate = memory, {s.address: s for s in sources}, clock, fate

    async def pull(
        self,
        address: str,
        token: bytes,
        transfer_id: str,
        sources: Sequence[SourcePageRef],
        destinations: Sequence[int],
    ) -> int:
        """See `PageSink`."""
        source = self._sources[address]
        for page, destination in zip(sources, destinations, strict=True):
            fate = self.fate(transfer_id, page)
            await self._clock.sleep(fate.delay_s)
            if fate.lost:
                raise TransferError("scripted loss", reason="PULL_IDLE")
            owner, pages = source.published.get(transfer_id, (b"", set()))
            if token not in source.tokens or owner != token or page not in pages:
                raise TransferError("transfer unknown, ended or page stale", reason="ERR_STALE")
            self._memory.page(destination)[:] = source.memory.page(page.page_id)
            if fate.corrupt:
                raise TransferError(f"page {page.page_id} arrived corrupt", reason="CORRUPT_PAGE")
        return len(sources) * self._memory.page_bytes

    async def close(self) -> None:
        """See `PageSink`."""
        await asyncio.sleep(0)
