"""In-process transport with scripted faults on an injected clock, for tests and the simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import xxhash

from pdserve.core.clock import Clock
from pdserve.core.errors import TransferError
from pdserve.kvtransfer.pool import PageMemory
from pdserve.kvtransfer.transport import Capabilities, SourcePageRef


@dataclass(frozen=True, slots=True)
class PageFate:
    """What happens to one page: seconds it takes (inf stalls), and whether it is lost or has a byte flipped."""

    delay_s: float = 0.0
    lost: bool = False
    corrupt: bool = False


class FakePageSource:
    """`PageSource` whose published pages a `FakePageSink` reads."""

    def __init__(self, memory: PageMemory, address: str = "fake:1") -> None:
        self.memory, self.address, self._next_token = memory, address, 0
        self.tokens: set[bytes] = set()
        self.published: dict[str, dict[bytes, set[SourcePageRef]]] = {}

    def new_reader(self) -> bytes:
        self._next_token += 1
        self.tokens.add(token := self._next_token.to_bytes(16, "little"))
        return token

    def drop_reader(self, token: bytes) -> None:
        self.tokens.discard(token)

    def publish(self, transfer_id: str, token: bytes, pages: Sequence[SourcePageRef]) -> None:
        self.published.setdefault(transfer_id, {}).setdefault(token, set()).update(pages)

    async def withdraw(self, transfer_id: str) -> None:  # a page is copied in one go: no read is ever in flight here
        self.published.pop(transfer_id, None)

    def close(self) -> None:
        self.tokens.clear()
        self.published.clear()


class FakePageSink:
    """`PageSink`; `fate(transfer_id, page)` scripts each page."""

    capabilities = Capabilities(quiescent_cancel=True, zero_copy=True, device_memory=False)
    fate: Callable[[str, SourcePageRef], PageFate] = staticmethod(lambda *_: PageFate())

    def __init__(self, memory: PageMemory, sources: Sequence[FakePageSource], clock: Clock) -> None:
        self._memory, self._sources, self._clock = memory, {s.address: s for s in sources}, clock

    async def pull(
        self,
        address: str,
        token: bytes,
        transfer_id: str,
        sources: Sequence[SourcePageRef],
        destinations: Sequence[int],
    ) -> int:
        source = self._sources[address]
        for page, destination in zip(sources, destinations, strict=True):
            fate = self.fate(transfer_id, page)
            await self._clock.sleep(fate.delay_s)
            if fate.lost:
                raise TransferError("scripted loss", reason="PULL_IDLE")
            if token not in source.tokens or page not in source.published.get(transfer_id, {}).get(token, ()):
                raise TransferError("transfer unknown, ended or page stale", reason="ERR_STALE")
            target = self._memory.page(destination)
            target[:] = source.memory.page(page.page_id)
            target[0] ^= fate.corrupt
            if page.checksum and xxhash.xxh3_64_intdigest(target) != page.checksum:
                raise TransferError(f"page {page.page_id} arrived corrupt", reason="CORRUPT_PAGE")
        return len(sources) * self._memory.page_bytes

    async def close(self) -> None: ...
