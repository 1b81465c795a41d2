"""The protocol that every page mover implements, on both sides.

Life of the source side: `PageSource.publish` as pages become final -> readers pull -> `withdraw` (fence).
Life of the sink side: `connect` -> `pull` ranges as watermarks arrive -> done, or `cancel` (fence, then free).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from pdserve.core.errors import TransferError


@dataclass(frozen=True, slots=True)
class SourcePageRef:
    """A page on the prefill side as the control stream announced it.

    Attributes:
        page_id: Index in the source pool.
        generation: Reuse number at the time of publishing.
        checksum: xxh3-64 of the page's bytes, or 0 when integrity is "none".
    """

    page_id: int
    generation: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport promises.

    Attributes:
        quiescent_cancel: After `cancel` returns, nothing writes into destination pages any more.
        zero_copy: No staging buffer on either side.
        device_memory: Pools may live in device memory.
    """

    quiescent_cancel: bool
    zero_copy: bool
    device_memory: bool


class PageSource(Protocol):
    """Prefill's side: serves published pages of its pool to authenticated readers, checks every ask."""

    @property
    def address(self) -> str:
        """Where readers reach it: tcp host:port, shm "@" and the name of an abstract unix socket."""
        ...

    def new_reader(self) -> bytes:
        """Makes the 16-byte token with which one control stream's peer may read; revoked by `drop_reader`."""
        ...

    def drop_reader(self, token: bytes) -> None:
        """Revokes a token and ends its connections."""
        ...

    def publish(self, transfer_id: str, token: bytes, pages: Sequence[SourcePageRef]) -> None:
        """Lets the token's peer read these pages of the transfer from now on."""
        ...

    async def withdraw(self, transfer_id: str) -> None:
        """Ends a transfer; afterwards its pages may be written. Idempotent.

        Returns when no read of its pages is in flight, or when every read that still is will find that it failed.
        """
        ...

    def close(self) -> None:
        """Ends all connections and waits for its threads. Idempotent."""
        ...


class PageSink(Protocol):
    """Decode's side: pulls pages into its own pool. Only this process writes its pool."""

    capabilities: Capabilities

    async def pull(
        self,
        address: str,
        token: bytes,
        transfer_id: str,
        sources: Sequence[SourcePageRef],
        destinations: Sequence[int],
    ) -> int:
        """Copies source pages into destination pages and verifies each.

        Args:
            address: Data plane of the source.
            token: The reader token from the control stream.
            transfer_id: The transfer.
            sources: Pages to read.
            destinations: Destination page ids, one per source; all FILLING and owned by this transfer.

        Returns:
            Bytes that went over the wire, headers included.

        Raises:
            TransferError: Peer gone, stale, corrupt, too slow or too late; reason says which.
            asyncio.CancelledError: Cancelled by the caller; nothing writes to the destinations any more.
        """
        ...

    async def close(self) -> None:
        """Ends all connections; outstanding pulls fail."""
        ...


Overdue = Callable[[str, str, TransferError], None]
"""Told of a pull that failed though it cannot return yet: its transfer, its source's data address, why."""


@runtime_checkable
class QuarantiningSink(PageSink, Protocol):
    """A sink whose cancel is not quiescent: a failed pull goes on, and holds its pages, until nothing writes."""

    @property
    def num_quarantined(self) -> int:
        """Pages of failed pulls into which something may still write; callable from any thread."""
        ...

    def on_overdue(self, callback: Overdue) -> None:
        """Sets who is told, on the pull's loop."""
        ...
