"""ServedStream: prefill's end of one decode worker's control stream: what it opened, and what waits to be sent to it.

| a transfer that it opened | until |
| --- | --- |
| waits: it was not offered yet | it is offered or closed, or has waited too long |
| is open | it has ended |

A decode worker that does not read what it is sent loses its stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import grpc.aio

from pdserve.core.clock import Clock
from pdserve.kvtransfer.transport import PageSource
from pdserve.v1 import kvtransfer_pb2 as pb

log = logging.getLogger(__name__)
MAX_OUTBOX = 4096
MAX_NAMED = 8
ControlContext = grpc.aio.ServicerContext[pb.ControlRequest, pb.ControlResponse]


class ServedStream:
    """See the module. Event loop only.

    Args:
        peer: The decode worker's name.
        transport: Data plane of the pair.
        source: That plane; has a reader more from now on.
        max_waiting: Opens kept for transfers that are not offered yet.

    Attributes:
        token: The reader's.
        open: Transfers that are open, by id.
        overflow: Set once it does not read what it is sent.
    """

    def __init__(self, peer: str, transport: str, source: PageSource, max_waiting: int) -> None:
        self.peer, self.transport, self.source = peer, transport, source
        self.token = source.new_reader()
        self.open: set[str] = set()
        self.overflow = asyncio.Event()
        self._outbox: asyncio.Queue[pb.ControlResponse] = asyncio.Queue(MAX_OUTBOX)
        self._waiting: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._max_waiting = max_waiting

    # ---- opens of transfers that are not offered yet ----------------------------------------------------------------

    def wait_for_offer(self, transfer_id: str, num_cached_pages: int, until_s: float) -> bool:
        """Keeps an open; one that came twice counts once.

        Args:
            transfer_id: The transfer.
            num_cached_pages: As the open says.
            until_s: Monotonic seconds, not less than those of opens kept before.

        Returns:
            False: too many wait.
        """
        if transfer_id not in self._waiting and len(self._waiting) >= self._max_waiting:
            return False
        self._waiting.setdefault(transfer_id, (num_cached_pages, until_s))
        return True

    def take(self, transfer_id: str) -> int | None:
        """`num_cached_pages` of an open that was kept, and is not any more; None: there is none."""
        kept = self._waiting.pop(transfer_id, None)
        return None if kept is None else kept[0]

    def take_overdue(self, now: float) -> list[str]:
        """Transfers whose open has waited too long, and does not wait any more."""
        overdue = []
        while self._waiting and next(iter(self._waiting.values()))[1] <= now:
            overdue.append(self._waiting.popitem(last=False)[0])
        return overdue

    # ---- messages ---------------------------------------------------------------------------------------------------

    def send(self, message: pb.ControlResponse) -> None:
        """Queues a message; where there is no room for it the stream must end."""
        if self._outbox.full():
            self.overflow.set()
        else:
            self._outbox.put_nowait(message)

    async def answer(self, message: pb.ControlResponse) -> None:
        """Queues the answer to a message, once there is room: who floods us waits for its own answers to be read."""
        await self._outbox.put(message)

    async def write(
        self, context: ControlContext, welcome: pb.TransferWelcome, clock: Clock, heartbeat_s: float
    ) -> None:
        """Sends the welcome, then what is queued, and signs of life in between; ends with the stream."""
        await context.write(pb.ControlResponse(welcome=welcome))
        while True:
            try:
                message = await clock.wait_for(self._outbox.get(), heartbeat_s)
            except TimeoutError:
                message = pb.ControlResponse(heartbeat=pb.TransferHeartbeat())
            await context.write(message)

    def log_end(self, lost: Sequence[str], ended: Iterable[object]) -> None:
        """Says how it ended, in plain words: what gRPC says of a peer that has gone differs.

        Args:
            lost: Transfers that failed with it.
            ended: What its tasks returned or raised.
        """
        for error in ended:
            if isinstance(error, Exception) and not isinstance(error, grpc.aio.BaseError):
                log.error("control stream of %s failed by a fault of this process: %r", self.peer, error)
        why = "the decode worker ended it, or cannot be reached"
        if self.overflow.is_set():
            why = f"the decode worker does not read its messages; {MAX_OUTBOX} wait"
        names = ", ".join(lost[:MAX_NAMED]) + (", ..." if len(lost) > MAX_NAMED else "")
        with_it = f"; KV transfers that failed with it ({len(lost)}): {names}" if lost else ""
        level = logging.WARNING if lost or self.overflow.is_set() else logging.INFO
        log.log(level, "control stream of %s ended: %s%s", self.peer, why, with_it)
