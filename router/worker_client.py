"""One Session stream to one worker process.

Life: connecting -> Hello sent, Welcome checked against the registry's record -> open -> ended once, for whatever
reason; then every attempt on it gets `Died` and every abort that waits is answered. A new incarnation is a new object.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple, Protocol

import grpc

from pdserve.core.clock import Clock
from pdserve.core.errors import PdserveError, TransferError, UnavailableError
from pdserve.core.grpc_server import error_from_rpc
from pdserve.core.layout import KVLayout
from pdserve.core.request import Role
from pdserve.router.inbox import AttemptEvent, Died, Inbox, Output, Reservation
from pdserve.router.worker_table import Listed, WorkerFacts, WorkerLoad
from pdserve.v1 import common_pb2, worker_pb2, worker_pb2_grpc

PROTOCOL_VERSION = 1
CONNECT_TIMEOUT_S = 3.0

Call = grpc.aio.StreamStreamCall[worker_pb2.SessionRequest, worker_pb2.SessionResponse]

_log = logging.getLogger(__name__)
_ROLES = {common_pb2.ROLE_PREFILL: Role.PREFILL, common_pb2.ROLE_DECODE: Role.DECODE, common_pb2.ROLE_MIXED: Role.MIXED}


class _Key(NamedTuple):
    """Names an attempt; the epoch tells it from one of an earlier request under the same id."""

    request_id: str
    owner_epoch: int
    attempt: int


def _key(fence: common_pb2.Fence) -> _Key:
    return _Key(fence.request_id, fence.owner_epoch, fence.attempt)


class WorkerClient(Protocol):
    """A worker that attempts can be sent to."""

    def submit(self, message: worker_pb2.Submit, inbox: Inbox) -> None:
        """Sends an attempt; its events go to `inbox` until `forget`. On an ended session that is one `Died`."""
        ...

    async def abort(self, fence: common_pb2.Fence, reason: str, timeout_s: float) -> bool:
        """Ends an attempt and waits for Aborted; nothing of it reaches its inbox afterwards.

        Returns:
            False when the worker did not answer in time or its session ended (then it aborts by itself).
        """
        ...

    def forget(self, fence: common_pb2.Fence) -> None:
        """The attempt has ended on this worker; later messages of it are dropped."""
        ...

    def hold_lease(self, transfer_id: str) -> None:
        """Renews a lease with every heartbeat until `drop_lease`."""
        ...

    def drop_lease(self, transfer_id: str) -> None:
        """Renews it no more."""
        ...


class SessionOwner(Protocol):
    """Who hears of a session's life."""

    def session_open(self, client: GrpcWorkerClient, facts: WorkerFacts) -> None:
        """Welcome was right; attempts may be sent."""
        ...

    def worker_loaded(self, worker_id: str, load: WorkerLoad) -> None:
        """The worker reported its load."""
        ...

    def worker_draining(self, worker_id: str, draining: bool) -> None:
        """The worker said whether it drains."""
        ...


class GrpcWorkerClient:
    """`WorkerClient` over gRPC; `run` is its whole life.

    Args:
        listed: Whom to connect to.
        router_id: Name of this router.
        clock: Time.
        owner: Hears of the session's life.
        heartbeat_s: Time between signs of life.
        timeout_s: A worker silent for this long is taken for dead.
        open_channel: Makes a gRPC channel to host:port.
        count_late: Called for each message for an unknown or ended attempt, which is dropped.
        refusal: Says why the TLS of a gRPC server at host:port refuses this process, or None; asked in a thread when a
            worker ended a session before its Welcome without a reason. None: not asked.

    Attributes:
        was_open: True once Welcome was right.
        why_not_open: In few words, where it could not be opened.
    """

    def __init__(
        self,
        listed: Listed,
        router_id: str,
        clock: Clock,
        owner: SessionOwner,
        *,
        heartbeat_s: float,
        timeout_s: float,
        open_channel: Callable[[str], grpc.aio.Channel],
        count_late: Callable[[], None] = lambda: None,
        refusal: Callable[[str], str | None] | None = None,
    ) -> None:
        self.listed = listed
        self.worker_id = listed.worker_id
        self.was_open = False
        self.why_not_open = ""
        self._router_id = router_id
        self._clock = clock
        self._owner = owner
        self._heartbeat_s = heartbeat_s
        self._max_silent_ticks = max(1, round(timeout_s / heartbeat_s))
        self._open_channel = open_channel
        self._count_late = count_late
        self._refusal = refusal
        self._attempts: dict[_Key, Inbox] = {}
        self._aborts: dict[_Key, asyncio.Future[bool]] = {}
        self._leases: set[str] = set()
        self._outgoing: asyncio.Queue[worker_pb2.SessionRequest | None] = asyncio.Queue()  # None: nothing follows
        self._silent_ticks = 0
        self._draining = False
        self._leaving = False
        self._error: PdserveError | None = None

    # ---- WorkerClient

    def submit(self, message: worker_pb2.Submit, inbox: Inbox) -> None:
        """See `WorkerClient`."""
        fence = message.fence
        error = self._error or (_advised(self._died("is about to end")) if self._leaving else None)
        if error is not None:
            inbox.put(Died(self.worker_id, fence.attempt, error))
            return
        self._attempts[_key(fence)] = inbox
        self._outgoing.put_nowait(worker_pb2.SessionRequest(submit=message))

    async def abort(self, fence: common_pb2.Fence, reason: str, timeout_s: float) -> bool:
        """See `WorkerClient`."""
        key = _key(fence)
        self._attempts.pop(key, None)
        if self._error is not None or self._leaving:
            return False
        answer = self._aborts.get(key)
        if answer is None:
            answer = self._aborts[key] = asyncio.get_running_loop().create_future()
            abort = worker_pb2.Abort(fence=fence, reason=reason)
            self._outgoing.put_nowait(worker_pb2.SessionRequest(abort=abort))
        try:
            return await self._clock.wait_for(asyncio.shield(answer), timeout_s)
        except TimeoutError:
            _log.warning("worker %s did not answer Abort of %s within %g s", self.worker_id, key, timeout_s)
            return False
        finally:
            self._aborts.pop(key, None)

    def forget(self, fence: common_pb2.Fence) -> None:
        """See `WorkerClient`."""
        self._attempts.pop(_key(fence), None)

    def hold_lease(self, transfer_id: str) -> None:
        """See `WorkerClient`."""
        if self._error is None:
            self._leases.add(transfer_id)

    def drop_lease(self, transfer_id: str) -> None:
        """See `WorkerClient`."""
        self._leases.discard(transfer_id)

    # ---- the stream

    async def run(self) -> PdserveError:
        """Connects, serves the session and returns why it ended or was not opened."""
        error: PdserveError = UnavailableError("this router stops; send the request to another", reason="ROUTER_STOPS")
        try:
            error = await self._session()
        finally:
            self._end(error)
        return error

    async def _session(self) -> PdserveError:
        async with self._open_channel(self.listed.address) as channel:
            hello = worker_pb2.Hello(router_id=self._router_id, protocol_version=PROTOCOL_VERSION)
            self._outgoing.put_nowait(worker_pb2.SessionRequest(hello=hello))
            call: Call = worker_pb2_grpc.WorkerStub(channel).Session(self._requests())  # type: ignore[no-untyped-call]
            ticker: asyncio.Task[None] | None = None
            try:
                first = await self._clock.wait_for(call.read(), CONNECT_TIMEOUT_S)
                if not isinstance(first, worker_pb2.SessionResponse):
                    return self._cannot_connect("it ended the session at once", "NO_SESSION")
                facts = self._check_welcome(first)
                self.was_open = True
                self._owner.session_open(self, facts)
                ticker = asyncio.create_task(self._tick(call), name=f"heartbeat-{self.worker_id}")
                while isinstance(message := await call.read(), worker_pb2.SessionResponse):  # else EOF
                    self._silent_ticks = 0
                    self._dispatch(message)
                return self._died("ended its session")
            except TimeoutError:
                return self._cannot_connect(f"it did not answer within {CONNECT_TIMEOUT_S:g} s", "NO_SESSION")
            except grpc.aio.AioRpcError as e:
                return await self._why_broken(error_from_rpc(e))
            except asyncio.CancelledError:
                me = asyncio.current_task()
                asked = me is not None and me.cancelling() > 0  # else the ticker ended the call
                if ticker is not None and ticker.done() and not asked:
                    return self._died(f"was silent for {self._max_silent_ticks * self._heartbeat_s:g} s")
                raise
            except PdserveError as e:
                return e
            finally:
                if ticker is not None:
                    ticker.cancel()
                call.cancel()

    async def _requests(self) -> AsyncIterator[worker_pb2.SessionRequest]:
        while (message := await self._outgoing.get()) is not None:
            yield message

    async def _tick(self, call: Call) -> None:
        """Signs of life; ends the call of a silent worker. Ticks are counted, so that a stalled loop blames nobody."""
        while self._silent_ticks < self._max_silent_ticks:
            if not self._leaving:
                self._outgoing.put_nowait(worker_pb2.SessionRequest(heartbeat=worker_pb2.RouterHeartbeat()))
                if self._leases:
                    renew = worker_pb2.RenewLeases(transfer_ids=sorted(self._leases))
                    self._outgoing.put_nowait(worker_pb2.SessionRequest(renew_leases=renew))
            await self._clock.sleep(self._heartbeat_s)
            self._silent_ticks += 1
        call.cancel()

    def _check_welcome(self, message: worker_pb2.SessionResponse) -> WorkerFacts:
        if not message.HasField("welcome"):
            raise self._bad_worker("did not begin with Welcome")
        w, listed = message.welcome, self.listed
        if w.protocol_version != PROTOCOL_VERSION:
            raise self._bad_worker(f"speaks protocol {w.protocol_version}, this router speaks {PROTOCOL_VERSION}")
        said = (w.worker_id, w.incarnation, _ROLES.get(w.role))
        if said != (listed.worker_id, listed.incarnation, listed.role):
            raise self._bad_worker(f"says it is {said}, the registry says otherwise (an old record?)")
        if not (w.max_model_len > 1 and w.vocab_size > 0 and w.num_pages > 0):
            raise self._bad_worker("sent a Welcome without sizes")
        try:
            layout = KVLayout.from_json(w.layout)
        except TransferError as e:
            raise self._cannot_connect(e.message, "BAD_WORKER") from e
        return WorkerFacts(
            worker_id=w.worker_id,
            role=listed.role,
            incarnation=w.incarnation,
            address=listed.address,
            model=w.model,
            identity_digest=w.identity_digest,
            layout=layout,
            max_model_len=w.max_model_len,
            vocab_size=w.vocab_size,
            num_pages=w.num_pages,
            max_num_seqs=w.max_num_seqs,
            kv_converts=frozenset(w.kv_converts),
            transports=tuple(w.transports),
            host_id=w.host_id,
            kv_staging_bytes=w.kv_staging_bytes,
        )

    def _dispatch(self, message: worker_pb2.SessionResponse) -> None:
        kind = message.WhichOneof("message")
        if kind == "step_outputs":
            steps = message.step_outputs
            if steps.HasField("load"):
                self._owner.worker_loaded(self.worker_id, _load(steps.load))
            for output in steps.outputs:
                self._deliver(output.fence, Output(self.worker_id, output.fence.attempt, output))
        elif kind == "reservation":
            result = message.reservation
            self._deliver(result.fence, Reservation(self.worker_id, result.fence.attempt, result))
        elif kind == "aborted":
            answer = self._aborts.get(_key(message.aborted.fence))
            if answer is not None and not answer.done():
                answer.set_result(True)
        elif kind == "heartbeat":
            self._owner.worker_loaded(self.worker_id, _load(message.heartbeat.load))
            self._draining = message.heartbeat.draining
            self._owner.worker_draining(self.worker_id, self._draining)
            if message.heartbeat.leaving and not self._leaving:
                self._leaving = True
                self._outgoing.put_nowait(None)
        else:
            _log.warning("worker %s sent %s, which is not expected here", self.worker_id, kind)

    def _deliver(self, fence: common_pb2.Fence, event: AttemptEvent) -> None:
        inbox = self._attempts.get(_key(fence))
        if inbox is None:
            self._count_late()
        else:
            inbox.put(event)

    def _end(self, error: PdserveError) -> None:
        self._error = error = _advised(error)
        for key, inbox in self._attempts.items():
            inbox.put(Died(self.worker_id, key.attempt, error))
        for answer in self._aborts.values():
            if not answer.done():
                answer.set_result(False)
        self._attempts.clear()
        self._leases.clear()

    def _died(self, how: str) -> UnavailableError:
        return UnavailableError(f"{self._who} {how}", reason="DRAINING" if self._draining else "WORKER_DIED")

    async def _why_broken(self, rpc: PdserveError) -> UnavailableError:
        if self.was_open:
            return self._died(f"is gone ({rpc.reason}: {rpc.message})")
        ask = self._refusal if rpc.reason == UnavailableError.reason else None
        if ask is not None and (why := await asyncio.to_thread(ask, self.listed.address)) is not None:
            return self._cannot_connect(f"TLS_REFUSED: {why}", "TLS_REFUSED")
        hint = "; it has no TLS, or a certificate of another authority, or one without the name (--tls-peer-name)"
        why = f"{rpc.reason}: {rpc.message}{hint if rpc.reason == 'TLS_FAILED' else ''}"
        return self._cannot_connect(why, rpc.reason)

    def _bad_worker(self, what: str) -> UnavailableError:
        return self._cannot_connect(f"it {what}", "BAD_WORKER")

    def _cannot_connect(self, why: str, reason: str) -> UnavailableError:
        self.why_not_open = why
        return UnavailableError(f"cannot connect to {self._who}: {why}", reason=reason)

    @property
    def _who(self) -> str:
        return f"{self.listed.role} worker {self.listed.worker_id} at {self.listed.address}"


def _advised(error: PdserveError) -> PdserveError:
    """The end of a session as the client of a request on it is told; the log needs no advice."""
    if error.reason not in ("DRAINING", "WORKER_DIED"):
        return error
    advice = "send the request again (the worker's log says why it ended)"
    return UnavailableError(f"{error.message}; {advice}", reason=error.reason)


def _load(load: worker_pb2.Load) -> WorkerLoad:
    return WorkerLoad(load.num_running, load.num_waiting, load.num_free_pages, load.num_pending_prefill_tokens)
