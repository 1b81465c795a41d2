"""GatheredTransfer: one prompt's KV from several sources, as `gather` decides. Seen from outside it is one transfer.

Its parts are `IncomingTransfer`s into the same pages, on the control streams of their sources; each pulls, verifies,
renews its lease and quarantines as a transfer from one source does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from pdserve.core.errors import TransferError
from pdserve.core.layout import KVLayout
from pdserve.kvtransfer import gather
from pdserve.kvtransfer.convert import HeadShard
from pdserve.kvtransfer.gather import Gather
from pdserve.kvtransfer.handoff import TransferState
from pdserve.kvtransfer.incoming import IncomingTransfer, log_failure
from pdserve.kvtransfer.timeline import TransferResult, merged


class GatheredTransfer:
    """One transfer from several sources; made by `TransferClient.gather`. Everything runs on the event loop.

    Args:
        transfer_id: The transfer, of the same name at every source.
        ours: Layout of our pages.
        num_parts: Sources.
        request_id: For logs.
        over: Called once when nothing writes into the destinations any more.

    Attributes:
        parts: One per source, in their order; set once by who makes them.
    """

    def __init__(
        self, transfer_id: str, ours: KVLayout, num_parts: int, request_id: str, over: Callable[[], None]
    ) -> None:
        self.transfer_id = transfer_id
        self.parts: Sequence[IncomingTransfer] = ()
        self._gather, self._request_id, self._over = Gather.of(ours, num_parts), request_id, over
        self._events, self._feeding = deque[gather.GatherEvent](), False
        self._done = asyncio.get_running_loop().create_future()
        self._decided = asyncio.get_running_loop().create_future()

    @property
    def state(self) -> TransferState:
        """Where it is."""
        return self._gather.state

    @property
    def num_late(self) -> int:
        """Messages and events dropped because they came too late or twice."""
        return self._gather.num_late + sum(part.num_late for part in self.parts)

    def part(self, index: int) -> GatheredPart:
        """Whom the part of one source tells what becomes of it."""
        return GatheredPart(self, index)

    async def failure(self) -> TransferError | None:
        """As `IncomingTransfer.failure`."""
        await asyncio.shield(self._decided)
        return self._error()

    async def result(self) -> TransferResult:
        """Waits for the end; safe to cancel, and to call again.

        Raises:
            TransferError: It did not complete; `reason` says why. No source writes into the destinations any more.
        """
        await asyncio.shield(self._done)
        if (error := self._error()) is not None:
            raise error
        return merged([part.outcome() for part in self.parts])

    async def abort(self, reason: str = "ABORTED") -> None:
        """Ends it and returns when no source writes into the destinations any more. Idempotent, in every state."""
        self.feed(gather.Ended(TransferState.ABORTED, reason))
        await asyncio.shield(self._done)

    def on_overdue(self, address: str, error: TransferError) -> None:
        """As `IncomingTransfer.on_overdue`: the part of that source fails, and with it the whole."""
        for part in self.parts:
            part.on_overdue(address, error)

    def feed(self, event: gather.GatherEvent) -> None:
        """Something happened; what comes of it may be fed meanwhile, and waits."""
        self._events.append(event)
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._events:
                self._gather, actions = gather.on_gather(self._gather, self._events.popleft())
                for action in actions:
                    self._carry_out(action)
        finally:
            self._feeding = False

    def _carry_out(self, action: gather.GatherAction) -> None:
        match action:
            case gather.Begin():
                for part in self.parts:
                    part.open()
            case gather.EndPart():
                self.parts[action.part].end(action.reason)
            case gather.Decide():
                self._decided.set_result(None)
                g, source = self._gather, f"{len(self.parts)} sources"
                log_failure(self.transfer_id, self._request_id, source, g.state, g.reason, g.message)
            case gather.Resolve():
                self._over()
                self._done.set_result(None)

    def _error(self) -> TransferError | None:
        g = self._gather
        if g.state is TransferState.COMPLETE:
            return None
        return TransferError(
            f"KV transfer {self.transfer_id} from {len(g.parts)} sources ended {g.state}: {g.message or g.reason}",
            reason=g.reason,
        )


class GatheredPart:
    """Whom a part tells; see `GatheredTransfer.part`."""

    def __init__(self, whole: GatheredTransfer, index: int) -> None:
        self._whole, self._index = whole, index

    def joined(self, shard: HeadShard) -> None:
        """The source's welcome is there and fits."""
        self._whole.feed(gather.Joined(self._index, shard))

    def decided(self) -> None:
        """How the part ends is known; it may still be written."""
        if (error := self._part.error()) is not None:
            self._whole.feed(gather.Failed(self._index, error.reason, error.message))

    def over(self) -> None:
        """Nothing of it writes any more."""
        if self._part.error() is not None:
            self._whole.feed(gather.Over(self._index))
        else:
            self._whole.feed(gather.Arrived(self._index, self._part.facts()))

    @property
    def _part(self) -> IncomingTransfer:
        return self._whole.parts[self._index]
