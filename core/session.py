"""The worker's side of `Worker.Session`: one multiplexed stream per router, the same for every role.

Life of a session: Hello checked -> Welcome -> messages both ways -> ended once, for whatever reason, and then
`SessionHandler.session_ended` is called exactly once. Nothing that the router sends reaches the handler before its
fence was checked. Fences of a request are ordered by (owner_epoch, attempt): a higher epoch is newer whatever its
attempt, since it is a new owner, or a new request under an id whose record is gone.

    fence of the message                       Submit                      Abort
    owner_epoch below the highest seen         refused STALE_ATTEMPT       Aborted(known=false)
    highest epoch, attempt at or below the
      highest submitted or aborted in it       refused STALE_ATTEMPT       to the handler
    above the highest seen                     to the handler              to the handler
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, NoReturn, Protocol

import grpc

from pdserve.core.clock import Clock
from pdserve.core.errors import (
    CancelledError,
    CapacityError,
    PdserveError,
    RequestError,
    UnavailableError,
    UnimplementedError,
)
from pdserve.core.grpc_server import error_detail
from pdserve.core.telemetry import WorkerMetrics
from pdserve.v1 import common_pb2, worker_pb2, worker_pb2_grpc

PROTOCOL_VERSION = 1
SERVICE_NAME = "pdserve.v1.Worker"
_SILENT_TICKS = 6

_log = logging.getLogger(__name__)


def refusal(fence: common_pb2.Fence, error: PdserveError) -> worker_pb2.SessionResponse:
    """The message that ends an attempt with an error outside of a step (step number 0, no load)."""
    output = worker_pb2.SequenceOutput(fence=fence, failed=error_detail(error))
    return worker_pb2.SessionResponse(step_outputs=worker_pb2.StepOutputs(outputs=[output]))


class SessionHandler(Protocol):
    """What a worker does with its routers' messages. Called on the event loop; must not block.

    A `PdserveError` raised by `submit` is answered as that attempt's failure; anything else ends the session.
    """

    def welcome(self) -> worker_pb2.Welcome:
        """First message to a router; `protocol_version` is filled in by the caller."""
        ...

    def submit(self, session: RouterSession, message: worker_pb2.Submit) -> None:
        """Starts an attempt. Its fence is newer than any before; what still lives here under older fences of the
        request must be ended by the handler (its session may be another one)."""
        ...

    def abort(self, session: RouterSession, message: worker_pb2.Abort) -> None:
        """Ends an attempt and all older ones; answer with Aborted once no page is held or written. May be unknown."""
        ...

    def renew(self, session: RouterSession, transfer_ids: Sequence[str]) -> None:
        """Keeps leases alive; unknown ids are ignored."""
        ...

    def session_ended(self, session: RouterSession) -> None:
        """The session is over: abort every sequence that it owned. Nothing sent to it arrives any more."""
        ...

    def load(self) -> worker_pb2.Load:
        """Load now."""
        ...


# ---- fencing -------------------------------------------------------------------------------------------------------


def fence_order(fence: common_pb2.Fence) -> tuple[int, int]:
    """Sort key of the fences of one request: the newer one is greater."""
    return fence.owner_epoch, fence.attempt


class FenceTable:
    """Highest fence seen per request, with bounded memory (least recently used goes first).

    Args:
        max_requests: Requests remembered; must exceed what can be on the way at once by far.
    """

    def __init__(self, max_requests: int = 1 << 16) -> None:
        self._max_requests = max_requests
        self._highest: OrderedDict[str, tuple[int, int]] = OrderedDict()  # submitted or aborted, as `fence_order`

    def __len__(self) -> int:
        return len(self._highest)

    def submit(self, fence: common_pb2.Fence) -> bool:
        """True: newer than everything before, and remembered. False: stale, or that attempt was here before."""
        order, highest = fence_order(fence), self._get(fence.request_id)
        if order <= highest:
            return False
        self._set(fence.request_id, order)
        return True

    def abort(self, fence: common_pb2.Fence) -> bool:
        """True: from the owner, and no Submit up to this attempt is let through later. False: an older owner's."""
        order, highest = fence_order(fence), self._get(fence.request_id)
        if order[0] < highest[0]:
            return False
        self._set(fence.request_id, max(order, highest))
        return True

    def _get(self, request_id: str) -> tuple[int, int]:
        if request_id not in self._highest:
            return 0, 0
        self._highest.move_to_end(request_id)
        return self._highest[request_id]

    def _set(self, request_id: str, order: tuple[int, int]) -> None:
        self._highest[request_id] = order
        if len(self._highest) > self._max_requests:
            self._highest.popitem(last=False)


# ---- one session ---------------------------------------------------------------------------------------------------


class RouterSession:
    """One router's stream as the handler sees it.

    Attributes:
        router_id: Name of the router.
        sent: Messages queued for the router, counted by kind; "refusal" are step outputs outside of a step.
        received: Messages from the router, counted by kind.
    """

    def __init__(self, router_id: str, max_queued_bytes: int, metrics: WorkerMetrics | None = None) -> None:
        self.router_id = router_id
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self._max_queued_bytes = max_queued_bytes
        self._metrics = metrics
        self._queue: deque[tuple[worker_pb2.SessionResponse, int]] = deque()
        self._queued_bytes = 0
        self._heartbeats_queued = 0
        self._silent_ticks = 0
        self._leaving = False
        self._finishing = False
        self._wake = asyncio.Event()
        self._over: asyncio.Future[PdserveError | None] = asyncio.get_running_loop().create_future()

    @property
    def closed(self) -> bool:
        """True: what is sent goes nowhere."""
        return self._over.done()

    def send(self, response: worker_pb2.SessionResponse) -> None:
        """Queues a message; never blocks. Dropped when the session is over.

        A router that does not read until the queue's byte limit is reached is cut off.
        """
        if self.closed:
            return
        kind = _kind_sent(response)
        size = response.ByteSize()
        self.sent[kind] += 1
        if self._metrics is not None:
            self._metrics.session_messages.labels("sent", kind).inc()
        self._heartbeats_queued += kind == "heartbeat"
        self._queue.append((response, size))
        self._queued_bytes += size
        self._wake.set()
        if self._queued_bytes > self._max_queued_bytes:
            message = f"router {self.router_id} does not read: {self._queued_bytes} bytes were waiting for it"
            self.end(CapacityError(message, reason="ROUTER_TOO_SLOW"))

    def send_heartbeat(self, heartbeat: worker_pb2.WorkerHeartbeat) -> None:
        """Queues a heartbeat unless one is still waiting to be read."""
        if self._heartbeats_queued == 0:
            self.send(worker_pb2.SessionResponse(heartbeat=heartbeat))

    def end(self, error: PdserveError | None) -> None:
        """Ends the session; `error` is what the router is told. Only the first call counts."""
        if not self.closed:
            self._over.set_result(error)
            self._queue.clear()
            self._queued_bytes = 0

    async def wait_ended(self) -> PdserveError | None:
        """Waits for `end`."""
        return await asyncio.shield(self._over)

    @property
    def error(self) -> PdserveError | None:
        """Why it ended; None while it lives or when nothing was wrong."""
        return self._over.result() if self._over.done() else None

    def _leave(self, goodbye: worker_pb2.WorkerHeartbeat) -> None:
        self._leaving = True
        self.send(worker_pb2.SessionResponse(heartbeat=goodbye))

    def _finish(self) -> None:
        self._finishing = True
        self._wake.set()

    async def _next(self) -> worker_pb2.SessionResponse | None:
        while not self._queue:
            if self._finishing:
                return None
            self._wake.clear()
            await self._wake.wait()
        response, size = self._queue.popleft()
        self._queued_bytes -= size
        self._heartbeats_queued -= response.HasField("heartbeat")
        return response


def _kind_sent(response: worker_pb2.SessionResponse) -> str:
    kind = response.WhichOneof("message") or "none"
    return "refusal" if kind == "step_outputs" and response.step_outputs.step == 0 else kind


# ---- the servicer --------------------------------------------------------------------------------------------------


class SessionServer(worker_pb2_grpc.WorkerServicer):
    """The Worker service of a worker, given what the worker does.

    Args:
        handler: Role-specific behaviour.
        clock: For heartbeats and time-outs.
        router_timeout_s: A router silent for this long is taken for dead.
        heartbeat_s: Time between two heartbeats of the worker, seconds.
        max_queued_bytes: A router that leaves more unread is cut off.
        max_fences: Requests whose fence is remembered.
        metrics: Where messages are counted; None: nowhere.
    """

    def __init__(
        self,
        handler: SessionHandler,
        clock: Clock,
        *,
        router_timeout_s: float = 3.0,
        heartbeat_s: float = 1.0,
        max_queued_bytes: int = 32 << 20,
        max_fences: int = 1 << 16,
        metrics: WorkerMetrics | None = None,
    ) -> None:
        self._handler = handler
        self._clock = clock
        self._router_timeout_s = router_timeout_s
        self._heartbeat_s = heartbeat_s
        self._max_queued_bytes = max_queued_bytes
        self._metrics = metrics
        self._fences = FenceTable(max_fences)
        self._sessions: dict[str, RouterSession] = {}
        self._num_stale: Counter[str] = Counter()
        self._draining = self._paused = False

    @property
    def sessions(self) -> tuple[RouterSession, ...]:
        """Live sessions, one per router."""
        return tuple(self._sessions.values())

    @property
    def num_stale(self) -> Counter[str]:
        """Messages refused by their fence, by kind ("submit", "abort")."""
        return self._num_stale

    @property
    def draining(self) -> bool:
        """True: new attempts are refused with DRAINING."""
        return self._draining or self._paused

    def drain(self) -> None:
        """Refuses new attempts from now on and tells every router at once."""
        self._draining = True
        self._tell_draining()

    def pause(self, paused: bool) -> None:
        """Refuses new attempts for now, as if draining, or takes them again; tells every router when that changes."""
        if paused != self._paused:
            self._paused = paused
            self._tell_draining()

    def _tell_draining(self) -> None:
        for session in self.sessions:
            session.send(worker_pb2.SessionResponse(heartbeat=self._heartbeat()))

    async def close(self, timeout_s: float) -> None:
        """Says goodbye; ends a session once its router closed its side and was told all, or after `timeout_s`."""
        self._draining = True
        sessions = self.sessions
        for session in sessions:
            session._leave(self._heartbeat(leaving=True))
        ends = asyncio.gather(*(session.wait_ended() for session in sessions))
        try:
            await self._clock.wait_for(ends, timeout_s)
        except TimeoutError:
            for session in sessions:
                session.end(_stopped())

    async def Session(
        self,
        request_iterator: AsyncIterator[worker_pb2.SessionRequest],
        context: grpc.aio.ServicerContext[worker_pb2.SessionRequest, worker_pb2.SessionResponse],
    ) -> None:
        """See worker.proto."""
        # On its own and first: if it went with a first write that is cancelled in flight, gRPC would send it again with
        # the status, fail, and leave the router without an end.
        await context.send_initial_metadata(())
        messages = aiter(request_iterator)
        session = RouterSession(await self._hello(messages), self._max_queued_bytes, self._metrics)
        self._open(session)
        try:
            error = await self._serve(session, messages, context)
        finally:
            session.end(None)
            self._close(session)
        if error is not None:
            _log.warning("session of router %s ended: %s (%s)", session.router_id, error.message, error.reason)
            raise error

    # -- opening and closing

    async def _hello(self, messages: AsyncIterator[worker_pb2.SessionRequest]) -> str:
        try:
            message = await self._clock.wait_for(anext(messages), self._router_timeout_s)
        except (StopAsyncIteration, TimeoutError):
            raise RequestError("the first message of a session must be Hello", reason="NO_HELLO") from None
        hello = message.hello
        if not message.HasField("hello") or not hello.router_id:
            raise RequestError("the first message of a session must be Hello with a router_id", reason="NO_HELLO")
        if hello.protocol_version != PROTOCOL_VERSION:
            raise RequestError(
                f"router {hello.router_id} speaks protocol version {hello.protocol_version}, this worker "
                f"{PROTOCOL_VERSION}; run the same release on both",
                reason="PROTOCOL_VERSION",
                status="FAILED_PRECONDITION",
            )
        return hello.router_id

    def _open(self, session: RouterSession) -> None:
        if (old := self._sessions.get(session.router_id)) is not None:
            message = f"router {old.router_id} opened a newer session"
            old.end(UnavailableError(message, reason="SESSION_REPLACED"))
            self._close(old)
        self._sessions[session.router_id] = session
        welcome = worker_pb2.Welcome()
        welcome.CopyFrom(self._handler.welcome())
        welcome.protocol_version = PROTOCOL_VERSION
        session.send(worker_pb2.SessionResponse(welcome=welcome))
        self._count_sessions()
        _log.info("session of router %s opened", session.router_id)

    def _close(self, session: RouterSession) -> None:
        if self._sessions.get(session.router_id) is not session:
            return  # replaced before; the handler was told then
        del self._sessions[session.router_id]
        self._count_sessions()
        self._handler.session_ended(session)

    def _count_sessions(self) -> None:
        if self._metrics is not None:
            self._metrics.sessions.set(len(self._sessions))

    # -- serving

    async def _serve(
        self,
        session: RouterSession,
        messages: AsyncIterator[worker_pb2.SessionRequest],
        context: grpc.aio.ServicerContext[worker_pb2.SessionRequest, worker_pb2.SessionResponse],
    ) -> PdserveError | None:
        loops: list[Coroutine[Any, Any, None]] = [
            self._read(session, messages),
            self._write(session, context),
            self._send_heartbeats(session),
            self._watch_silence(session),
        ]
        tasks = [asyncio.create_task(loop) for loop in loops]
        ended = asyncio.ensure_future(session.wait_ended())
        try:
            await asyncio.wait([*tasks, ended], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()  # raises what went wrong
        finally:
            for waiting in (*tasks, ended):
                waiting.cancel()
            await asyncio.gather(*tasks, ended, return_exceptions=True)
        error = session.error
        if error is not None and self._metrics is not None:
            self._metrics.sessions_cut.labels(error.reason).inc()
        return error

    async def _read(self, session: RouterSession, messages: AsyncIterator[worker_pb2.SessionRequest]) -> None:
        async for message in messages:
            if session.closed:
                return
            session._silent_ticks = 0
            kind = message.WhichOneof("message") or "none"
            session.received[kind] += 1
            if self._metrics is not None:
                self._metrics.session_messages.labels("received", kind).inc()
            self._dispatch(session, kind, message)
        if session._leaving:
            session._finish()
            await session.wait_ended()  # by `_write`, once all is out

    async def _write(
        self,
        session: RouterSession,
        context: grpc.aio.ServicerContext[worker_pb2.SessionRequest, worker_pb2.SessionResponse],
    ) -> None:
        while (response := await session._next()) is not None:
            await context.write(response)
        session.end(_stopped())

    async def _send_heartbeats(self, session: RouterSession) -> NoReturn:
        while True:
            await self._clock.sleep(self._heartbeat_s)
            session.send_heartbeat(self._heartbeat())

    def _heartbeat(self, leaving: bool = False) -> worker_pb2.WorkerHeartbeat:
        return worker_pb2.WorkerHeartbeat(load=self._handler.load(), draining=self.draining, leaving=leaving)

    async def _watch_silence(self, session: RouterSession) -> None:
        # Counted in ticks, not in time: when this process itself stood still, that is one tick, and the messages that
        # came meanwhile are read before the next one.
        while session._silent_ticks < _SILENT_TICKS:
            await self._clock.sleep(self._router_timeout_s / _SILENT_TICKS)
            session._silent_ticks += 1
        message = f"router {session.router_id} was silent for {self._router_timeout_s:g} s"
        session.end(UnavailableError(message, reason="ROUTER_SILENT"))

    # -- messages

    def _dispatch(self, session: RouterSession, kind: str, message: worker_pb2.SessionRequest) -> None:
        match kind:
            case "submit":
                self._submit(session, message.submit)
            case "abort":
                self._abort(session, message.abort)
            case "renew_leases":
                self._handler.renew(session, message.renew_leases.transfer_ids)
            case "heartbeat":
                pass
            case "attach":
                error = UnimplementedError("this version cannot take over a running sequence")
                session.send(refusal(message.attach.fence, error))
            case "rebind":
                error = UnimplementedError("this version cannot give a lease to another decode worker")
                session.send(refusal(message.rebind.fence, error))
            case _:
                raise RequestError(f"unexpected message in a session: {kind}", reason="UNEXPECTED_MESSAGE")

    def _submit(self, session: RouterSession, message: worker_pb2.Submit) -> None:
        fence = message.fence
        try:
            if not fence.request_id or fence.attempt < 1:
                raise RequestError("Submit without request_id or attempt", reason="BAD_FENCE")
            if self.draining:
                raise UnavailableError("the worker is draining; choose another one", reason="DRAINING")
            if not self._fences.submit(fence):
                self._count_stale("submit")
                raise CancelledError(
                    f"attempt {fence.attempt} of owner epoch {fence.owner_epoch} is stale here", reason="STALE_ATTEMPT"
                )
            self._handler.submit(session, message)
        except PdserveError as e:
            session.send(refusal(fence, e))

    def _abort(self, session: RouterSession, message: worker_pb2.Abort) -> None:
        if self._fences.abort(message.fence):
            self._handler.abort(session, message)
        else:
            self._count_stale("abort")
            session.send(worker_pb2.SessionResponse(aborted=worker_pb2.Aborted(fence=message.fence, known=False)))

    def _count_stale(self, kind: str) -> None:
        self._num_stale[kind] += 1
        if self._metrics is not None:
            self._metrics.stale_messages.labels(kind).inc()


def _stopped() -> UnavailableError:
    return UnavailableError("the worker stopped", reason="WORKER_STOPPED")
