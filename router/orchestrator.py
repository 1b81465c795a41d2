"""The life of a request, from admission to its one terminal event, on injected effects only.

    recorded QUEUED ─▶ wait for a route ─▶ recorded PLACED ─▶ one attempt ─▶ FINISHED | FAILED | CANCELLED
                            ▲                                      │
                            └──── refused: attempt + 1 ◀───────────┘

A request's life is a task of its own: it does not wait for the client to read, and an abort does not wait for either.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve.core.clock import Clock
from pdserve.core.errors import CapacityError, DeadlineError, PdserveError, RequestError, UnavailableError
from pdserve.core.sampling_proto import sampling_to_proto
from pdserve.router.admission import Admitted, check_queue
from pdserve.router.attempt import ABORT_TIMEOUT_S, Attempt, AttemptIds, Cancelled, Completed
from pdserve.router.config import RouterConfig
from pdserve.router.inbox import Cancel, Inbox
from pdserve.router.output_stream import OutputStream, Terminal
from pdserve.router.policy import Ask, Policy, Route
from pdserve.router.progress import Progress
from pdserve.router.record import RequestRecord, RequestState, duplicate_error, pack_prompt
from pdserve.router.recorder import Recorder
from pdserve.router.request_store import RequestStore
from pdserve.router.trace import RequestTrace
from pdserve.router.worker_set import WorkerSet
from pdserve.router.worker_table import Limits
from pdserve.v1 import common_pb2, inference_pb2, worker_pb2

MAX_DEADLINE_MS = 2**32 - 1
_FINISH_WORDS = {common_pb2.FINISH_REASON_STOP: "stop", common_pb2.FINISH_REASON_LENGTH: "length"}

_log = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class OpenRequest:
    """A request that lives on this router.

    Attributes:
        admitted: What is computed.
        arrival_s: When it arrived.
        deadline_s: When it must be over, on this router's clock; None: no deadline.
        trace: Hears of its life.
        progress: Released output.
        recorder: Writes its record.
        stream: What its client reads.
        inbox: What it waits for.
        accepted: Set once its record is stored, or with the refusal.
        cancel_asked: The first cancellation.
    """

    admitted: Admitted
    arrival_s: float
    deadline_s: float | None
    trace: RequestTrace
    progress: Progress
    recorder: Recorder
    stream: OutputStream
    inbox: Inbox = field(default_factory=Inbox)
    accepted: asyncio.Future[None]
    cancel_asked: Cancel | None = None

    def cancel(self, reason: str, error: PdserveError | None = None) -> None:
        """Ends it: its workers are told, then the stream ends with `error`, or with Finished(CANCELLED)."""
        if self.cancel_asked is None:
            self.cancel_asked = Cancel(reason, error)
            self.inbox.put(self.cancel_asked)


class Orchestrator:
    """Runs the requests of one router.

    Args:
        config: Limits and time-outs.
        router_id: Name of this router.
        clock: Time.
        store: Request records.
        workers: Whom requests are sent to.
        policy: Chooses among them.
        rng: Makes ids and seeds, and draws among equal workers; unguessable in production.

    Attributes:
        num_queued: Requests that wait for a route or for the first worker.
    """

    def __init__(
        self,
        config: RouterConfig,
        router_id: str,
        clock: Clock,
        store: RequestStore,
        workers: WorkerSet,
        policy: Policy,
        rng: random.Random,
    ) -> None:
        self._config = config
        self._router_id = router_id
        self._clock = clock
        self._store = store
        self._workers = workers
        self._policy = policy
        self._rng = rng
        self._open: dict[str, OpenRequest] = {}
        self._lives: set[asyncio.Task[None]] = set()
        self._draining = False
        self.num_queued = 0
        self._num_early = 0  # not open yet: they wait for the first worker

    @property
    def num_open(self) -> int:
        """Requests that live here."""
        return len(self._open)

    def new_id(self) -> str:
        """An unguessable id."""
        return f"{self._rng.getrandbits(128):032x}"

    def new_seed(self) -> int:
        """A seed for a request that has none."""
        return self._rng.getrandbits(63)

    def can_serve(self) -> bool:
        """True when a request of one token would be routed now."""
        return not self._draining and self._policy.can_route(Ask(prompt_tokens=1), self._workers.table.pool())

    def find(self, request_id: str) -> OpenRequest | None:
        """The request, if it lives here."""
        return self._open.get(request_id)

    def check_open(self) -> None:
        """Refuses early, before any work is done for a request.

        Raises:
            UnavailableError: The router drains.
            CapacityError: Too many requests are open.
        """
        if self._draining:
            raise UnavailableError("this router is shutting down; use another one", reason="DRAINING")
        check_queue(len(self._open) + self._num_early, self._config.max_queue)

    async def limits(self) -> Limits:
        """What the workers accept; waits, bounded, for the first worker.

        Raises:
            UnavailableError: No worker is there.
        """
        limits: list[Limits] = []

        def known() -> bool:
            found = self._workers.table.limits()
            limits.extend([found] if found else [])
            return found is not None

        await self._wait_for_workers(known)
        return limits[0]

    async def open(
        self, admitted: Admitted, *, arrival_s: float, deadline_s: float | None, trace: RequestTrace
    ) -> OpenRequest:
        """Starts a request's life and returns once its record is stored.

        Args:
            admitted: What to compute.
            arrival_s: When it arrived, on the router's clock.
            deadline_s: When it must be over, on the same clock.
            trace: Hears of its life.

        Raises:
            DuplicateRequestError: Its id is known.
            UnavailableError: The router drains, or the store does not answer.
            CapacityError: Too many requests are open.
        """
        self.check_open()
        if known := self._open.get(admitted.request_id):
            same = known.admitted.request_digest == admitted.request_digest
            raise duplicate_error(admitted.request_id, same, RequestState.DECODING)
        stream, recorder = OutputStream(), Recorder(self._store, admitted.request_id)
        request = OpenRequest(
            admitted=admitted,
            arrival_s=arrival_s,
            deadline_s=deadline_s,
            trace=trace,
            stream=stream,
            recorder=recorder,
            progress=Progress(self._clock, arrival_s, stream, recorder, trace),
            accepted=asyncio.get_running_loop().create_future(),
        )
        self._open[admitted.request_id] = request
        life = asyncio.create_task(self._life(request), name=f"request-{admitted.request_id}")
        self._lives.add(life)
        life.add_done_callback(lambda task: self._buried(task, request))
        try:
            await asyncio.shield(request.accepted)
        except asyncio.CancelledError:
            request.cancel("CLIENT_DISCONNECTED")
            raise
        return request

    def begin_drain(self) -> None:
        """Refuses new requests from now on."""
        self._draining = True

    async def drain(self, grace_s: float) -> None:
        """Lets running requests end for `grace_s` seconds, then ends them with UNAVAILABLE."""
        self.begin_drain()
        if not self._lives:
            return
        try:
            await self._clock.wait_for(asyncio.wait(list(self._lives)), grace_s)
        except TimeoutError:
            for request in list(self._open.values()):
                error = UnavailableError("this router was shut down; send the request to another", reason="DRAINING")
                request.cancel("ROUTER_DRAINING", error)
            if self._lives:
                await asyncio.wait(list(self._lives), timeout=2 * ABORT_TIMEOUT_S)

    # ---- one life

    async def _life(self, request: OpenRequest) -> None:
        try:
            await request.recorder.create(self._record(request))
        except PdserveError as e:
            self._open.pop(request.admitted.request_id, None)
            request.accepted.set_exception(e)
            request.accepted.exception()  # the caller may be gone
            return
        request.accepted.set_result(None)
        timer = None
        if request.deadline_s is not None:
            timer = asyncio.create_task(self._deadline(request, request.deadline_s))
        try:
            outcome = await self._serve(request)
            terminal = self._finished(request, outcome) if isinstance(outcome, Completed) else self._cancelled(request)
        except PdserveError as e:
            terminal = self._failed(request, e)
        finally:
            if timer is not None:
                timer.cancel()
        self._open.pop(request.admitted.request_id, None)
        request.stream.finish(terminal)

    async def _serve(self, request: OpenRequest) -> Completed | Cancelled:
        refused: dict[str, float] = {}
        attempt, reservation_id = 1, self.new_id()
        while True:
            route = await self._route(request, attempt, refused)
            if route is None:
                assert request.cancel_asked is not None
                return Cancelled(request.cancel_asked)
            request.recorder.placed(attempt, route)
            ids = AttemptIds(
                attempt=attempt,
                owner_epoch=request.recorder.owner_epoch,
                reservation_id=reservation_id,
                transfer_id=self.new_id(),
                deadline_ms=self._left_ms(request),
                traceparent=request.trace.traceparent,
            )
            clients = {w: self._workers.client(w) for w in route.worker_ids}
            outcome = await Attempt(
                request.admitted, ids, route, clients, self._workers.table, request.inbox, request.progress
            ).run()
            if isinstance(outcome, Completed | Cancelled):
                return outcome
            refused[outcome.worker_id] = self._clock.now() + outcome.retry_after_s
            attempt += 1

    async def _route(self, request: OpenRequest, attempt: int, refused: dict[str, float]) -> Route | None:
        """Waits for a route, woken by events; None when the request was cancelled."""
        queued_s = self._clock.now()
        self.num_queued += 1
        self._workers.subscribe(request.inbox)
        try:
            while request.cancel_asked is None:
                now = self._clock.now()
                avoid = frozenset(w for w, until_s in refused.items() if until_s > now)
                tokens = len(request.admitted.prompt_token_ids)
                ask = Ask(prompt_tokens=tokens, avoid=avoid)
                route = self._policy.choose(ask, self._workers.table.pool(), self._rng.randrange)
                if route is not None and route.decode.worker_id not in avoid:
                    request.progress.queue_s += now - queued_s
                    request.trace.placed(route, attempt, now - queued_s)
                    return route
                wake_s = self._give_up_s(request, queued_s, route)
                if now >= wake_s:
                    raise self._no_route(request, route)
                if route is not None:
                    wake_s = min(wake_s, refused[route.decode.worker_id])
                try:
                    await self._clock.wait_for(request.inbox.get(), wake_s - now)
                except TimeoutError:
                    continue
            return None
        finally:
            self.num_queued -= 1
            self._workers.unsubscribe(request.inbox)

    def _give_up_s(self, request: OpenRequest, queued_s: float, route: Route | None) -> float:
        give_up_s = request.arrival_s + self._config.queue_timeout_s
        return give_up_s if route is not None else min(give_up_s, queued_s + self._config.no_worker_timeout_s)

    def _no_route(self, request: OpenRequest, route: Route | None) -> PdserveError:
        if route is not None:
            return CapacityError(
                f"no decode worker had room within {self._config.queue_timeout_s:g} s; retry later or add workers",
                reason="NO_CAPACITY",
                retry_after_s=1.0,
            )
        if self.can_serve():
            return RequestError(
                f"the prompt of {len(request.admitted.prompt_token_ids)} tokens needs more KV pages than any worker "
                "has; shorten it or start workers with more pages",
                reason="PROMPT_TOO_LONG",
            )
        return self._no_worker()

    def _no_worker(self) -> UnavailableError:
        return UnavailableError(
            f"no worker can take the request: {self._workers.table.missing()}; start the missing workers "
            "('pdserve status' lists them) and retry",
            reason="NO_WORKER",
            retry_after_s=1.0,
        )

    async def _wait_for_workers(self, condition: Callable[[], bool]) -> None:
        if condition():
            return
        self.check_open()
        self._num_early += 1
        self.num_queued += 1
        inbox = Inbox()
        end_s = self._clock.now() + self._config.no_worker_timeout_s
        self._workers.subscribe(inbox)
        try:
            while not condition():
                await self._clock.wait_for(inbox.get(), max(0.0, end_s - self._clock.now()))
        except TimeoutError:
            raise self._no_worker() from None
        finally:
            self._workers.unsubscribe(inbox)
            self._num_early -= 1
            self.num_queued -= 1

    async def _deadline(self, request: OpenRequest, deadline_s: float) -> None:
        await self._clock.sleep(max(0.0, deadline_s - self._clock.now()))
        request.cancel("DEADLINE_EXCEEDED", DeadlineError("the request's deadline passed; allow more time"))

    def _left_ms(self, request: OpenRequest) -> int:
        if request.deadline_s is None:
            return 0
        return min(MAX_DEADLINE_MS, max(1, int((request.deadline_s - self._clock.now()) * 1000)))

    # ---- ends

    def _finished(self, request: OpenRequest, outcome: Completed) -> Terminal:
        said: worker_pb2.SequenceFinished = outcome.finished
        word = _FINISH_WORDS.get(said.finish_reason)
        if word is None:  # the worker ended it by itself: its deadline timer, or its shutdown
            return self._failed(request, DeadlineError("the worker ended the request: its deadline passed"))
        usage = self._usage(request, said.usage.cached_tokens)
        finished = self._terminal(request, said.finish_reason, said.stop_reason, usage)
        request.recorder.finished(word, request.progress.num_tokens)
        request.trace.ended(word, None, finished.timings, usage)
        return finished

    def _cancelled(self, request: OpenRequest) -> Terminal:
        assert request.cancel_asked is not None
        error = request.cancel_asked.error
        usage = self._usage(request, 0)
        finished = self._terminal(request, common_pb2.FINISH_REASON_CANCELLED, "", usage)
        if isinstance(error, PdserveError) and not isinstance(error, DeadlineError):
            return self._failed(request, error)
        request.recorder.cancelled(request.progress.num_tokens)
        request.trace.ended("cancelled", error, finished.timings, usage)
        return finished if error is None else error

    def _failed(self, request: OpenRequest, error: PdserveError) -> Terminal:
        request.recorder.failed(error, request.progress.num_tokens)
        request.trace.ended("failed", error, request.progress.timings(), self._usage(request, 0))
        return error

    def _terminal(
        self, request: OpenRequest, reason: common_pb2.FinishReason, stop_reason: str, usage: common_pb2.Usage
    ) -> inference_pb2.Finished:
        return inference_pb2.Finished(
            finish_reason=reason,
            stop_reason=stop_reason,
            usage=usage,
            timings=request.progress.timings(),
            attempt=request.recorder.attempt,
        )

    def _usage(self, request: OpenRequest, cached_tokens: int) -> common_pb2.Usage:
        return common_pb2.Usage(
            prompt_tokens=len(request.admitted.prompt_token_ids),
            completion_tokens=request.progress.num_tokens,
            cached_tokens=cached_tokens,
        )

    def _buried(self, life: asyncio.Task[None], request: OpenRequest) -> None:
        """A life that ended by a fault of ours still ends its stream."""
        self._lives.discard(life)
        fault = None if life.cancelled() else life.exception()
        if fault is None and not life.cancelled():
            return
        _log.error("life of request %s ended by %r", request.admitted.request_id, fault, exc_info=fault)
        self._open.pop(request.admitted.request_id, None)
        error = PdserveError("internal error of the router; its log has the details")
        if request.accepted.done():
            request.recorder.failed(error, request.progress.num_tokens)
            request.stream.finish(error)
        else:
            request.accepted.set_exception(error)

    def _record(self, request: OpenRequest) -> RequestRecord:
        admitted = request.admitted
        return RequestRecord(
            request_id=admitted.request_id,
            owner=self._router_id,
            model=admitted.model,
            request_digest=admitted.request_digest,
            tenant=admitted.tenant,
            deadline_ms=self._left_ms(request),
            sampling=sampling_to_proto(admitted.sampling).SerializeToString(),
            prompt=pack_prompt(admitted.prompt_token_ids),
        )
