"""A worker in memory that does what a test or the simulator tells it."""

from __future__ import annotations

from pdserve.core.errors import UnavailableError
from pdserve.router.inbox import Died, Inbox, Output, Reservation
from pdserve.v1 import common_pb2, worker_pb2


class FakeWorkerClient:
    """`WorkerClient` whose answers are method calls.

    Attributes:
        submits: Attempts that came and were not aborted or forgotten, by (request id, attempt).
        aborted: Attempts that were aborted, in order, with the reason.
        leases: Leases that are being renewed.
        answers_aborts: False: aborts time out at once.
    """

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.submits: dict[tuple[str, int], worker_pb2.Submit] = {}
        self.aborted: list[tuple[str, int, str]] = []
        self.leases: set[str] = set()
        self.answers_aborts = True
        self._inboxes: dict[tuple[str, int], Inbox] = {}
        self._error: UnavailableError | None = None

    def submit(self, message: worker_pb2.Submit, inbox: Inbox) -> None:
        """See `WorkerClient`."""
        key = (message.fence.request_id, message.fence.attempt)
        if self._error is not None:
            inbox.put(Died(self.worker_id, message.fence.attempt, self._error))
            return
        self.submits[key], self._inboxes[key] = message, inbox

    async def abort(self, fence: common_pb2.Fence, reason: str, timeout_s: float) -> bool:
        """See `WorkerClient`."""
        self.aborted.append((fence.request_id, fence.attempt, reason))
        self.forget(fence)
        return self.answers_aborts and self._error is None

    def forget(self, fence: common_pb2.Fence) -> None:
        """See `WorkerClient`."""
        self.submits.pop((fence.request_id, fence.attempt), None)
        self._inboxes.pop((fence.request_id, fence.attempt), None)

    def hold_lease(self, transfer_id: str) -> None:
        """See `WorkerClient`."""
        self.leases.add(transfer_id)

    def drop_lease(self, transfer_id: str) -> None:
        """See `WorkerClient`."""
        self.leases.discard(transfer_id)

    # ---- what the worker does

    def reserve(self, request_id: str, attempt: int = 1, *, reserved: bool = True, retry_after_ms: int = 0) -> None:
        """Answers a Submit."""
        result = worker_pb2.ReservationResult(reserved=reserved, retry_after_ms=retry_after_ms)
        self._inboxes[request_id, attempt].put(Reservation(self.worker_id, attempt, result))

    def output(self, request_id: str, output: worker_pb2.SequenceOutput, attempt: int = 1) -> None:
        """Sends news of a sequence."""
        self._inboxes[request_id, attempt].put(Output(self.worker_id, attempt, output))

    def die(self, reason: str = "WORKER_DIED") -> None:
        """Ends the session."""
        self._error = UnavailableError(f"worker {self.worker_id} is gone; send the request again", reason=reason)
        for (_, attempt), inbox in self._inboxes.items():
            inbox.put(Died(self.worker_id, attempt, self._error))
