"""A sink of pages whose source says nothing: its pulls are late, and cannot be stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from pdserve.core.errors import TransferError
from pdserve.kvtransfer.transport import Capabilities, Overdue, PageSink, SourcePageRef


class SilentSink:
    """Pulls are told as late at once, and go on until `release` whoever cancels them.

    Args:
        inner: Takes the pulls from every address but `silent`; None: all are silent.

    Attributes:
        release: Ends what is late.
        silent: The address that is, where there is an `inner`.
        num_quarantined: See `PageSink`.
    """

    capabilities = Capabilities(quiescent_cancel=False, zero_copy=True, device_memory=False)
    late: Overdue

    def __init__(self, inner: PageSink | None = None) -> None:
        self._inner, self.silent, self.num_quarantined = inner, "", 0
        self.release = asyncio.Event()

    async def pull(
        self,
        address: str,
        token: bytes,
        transfer_id: str,
        sources: Sequence[SourcePageRef],
        destinations: Sequence[int],
    ) -> int:
        """See `PageSink`; fails with `PULL_IDLE` when it is late."""
        if self._inner is not None and address != self.silent:
            return await self._inner.pull(address, token, transfer_id, sources, destinations)
        error = TransferError("the source is silent", reason="PULL_IDLE")
        self.num_quarantined = len(destinations)
        self.late(transfer_id, address, error)
        while not self.release.is_set():
            with suppress(asyncio.CancelledError):
                await self.release.wait()
        self.num_quarantined = 0
        raise error

    def on_overdue(self, callback: Overdue) -> None:
        """See `PageSink`."""
        self.late = callback

    async def close(self) -> None:
        """Closes `inner`, or lets go of what is late."""
        if self._inner is None:
            self.release.set()
        else:
            await self._inner.close()
