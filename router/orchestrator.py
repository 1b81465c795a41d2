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
from collections.abc import Iterator
from contextlib import contextmanager

from pdserve.core.clock import Clock
from pdserve.core.errors import DeadlineError, PdserveError, UnavailableError
from pdserve.core.sampling_proto import sampling_to_proto
from pdserve.router.admission import Admitted, check_queue
from pdserve.router.attempt import ABORT_TIMEOUT_S, Attempt, AttemptIds, Cancelled, Completed
from pdserve.router.config import RouterConfig
from pdserve.router.open_request import OpenRequest
from pdserve.router.output_stream import OutputStream
from pdserve.router.policy import Policy
from pdserve.router.progress import Progress
from pdserve.router.record import RequestRecord, duplicate_error, pack_prompt
from pdserve.router.recorder import Recorder
from pdserve.router.request_store import RequestStore
from pdserve.router.route_queue import RouteQueue
from pdserve.router.trace import RequestTrace
from pdserve.router.worker_set import WorkerSet
from pdserve.router.worker_table import Limits

_log = logging.getLogger(__name__)


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
        self._queue = RouteQueue(config, clock, workers, policy, rng.randrange)
        self._rng = rng
        self._num_calls = 0
        self._open: dict[str, OpenRequest] = {}
        self._lives: set[asyncio.Task[None]] = set()
        self._quiet = asyncio.Event()  # no life and no call
        self._quiet.set()
        self._draining = False

    @property
    def num_open(self) -> int:
        """Requests that live here."""
        return len(self._open)

    @property
    def num_queued(self) -> int:
        """Requests that wait for a route or for the first worker."""
        return self._queue.num_waiting

    def new_id(self) -> str:
        """An unguessable id."""
        return f"{self._rng.getrandbits(128):032x}"

    def new_seed(self) -> int:
        """A seed for a request that has none."""
        return self._rng.getrandbits(63)

    def can_serve(self) -> bool:
        """True when a request of one token would be routed now."""
        return not self._draining and self._queue.can_route()

    def find(self, request_id: str) -> OpenRequest | None:
        """The request, if it lives here."""
        return self._open.get(request_id)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Held by a call of a client from its arrival until its client took the last message or left.

        Calls count towards `max_queue` as open requests do: what is tokenised, waits for the first worker or is not
        read by its client is bounded too.
        """
        self._num_calls += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._num_calls -= 1
            self._note_quiet()

    def check_open(self) -> None:
        """Refuses early, before any work is done for a request.

        Raises:
            UnavailableError: The router drains.
            CapacityError: Too many requests are open.
        """
        if self._draining:
            raise UnavailableError("this router is shutting down; use another one", reason="DRAINING")
        check_queue(max(len(self._open), self._num_calls - 1), self._config.max_queue)  # the asking call is one

    async def limits(self) -> Limits:
        """What the workers accept; waits, bounded, for the first worker.

        Raises:
            UnavailableError: No worker is there.
        """
        return await self._queue.limits()

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
        try:
            self._check_new(admitted)
        except PdserveError as e:
            trace.refused(e)
            raise
        stream, recorder = OutputStream(), Recorder(self._store, admitted.request_id)
        request = OpenRequest(
            admitted=admitted,
            arrival_s=arrival_s,
            deadline_s=deadline_s,
            trace=trace,
            stream=stream,
            recorder=recorder,
            progress=Progress(self._clock, arrival_s, stream, recorder, trace, admitted.sampling.n),
            accepted=asyncio.get_running_loop().create_future(),
        )
        self._open[admitted.request_id] = request
        life = asyncio.create_task(self._life(request), name=f"request-{admitted.request_id}")
        self._lives.add(life)
        self._quiet.clear()
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
        """Lets requests end and clients read their ends for `grace_s` seconds, then ends them with UNAVAILABLE."""
        self.begin_drain()
        try:
            await self._clock.wait_for(self._quiet.wait(), grace_s)
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
            request.trace.refused(e)
            request.accepted.set_exception(e)
            request.accepted.exception()  # the caller may be gone
            return
        request.accepted.set_result(None)
        timer = None
        if request.deadline_s is not None:
            timer = asyncio.create_task(self._deadline(request, request.deadline_s))
        try:
            outcome = await self._serve(request)
            terminal = request.finished(outcome.finished) if isinstance(outcome, Completed) else request.cancelled()
        except PdserveError as e:
            terminal = request.failed(e)
        finally:
            if timer is not None:
                timer.cancel()
        self._open.pop(request.admitted.request_id, None)
        request.stream.finish(terminal)

    async def _serve(self, request: OpenRequest) -> Completed | Cancelled:
        refused: dict[str, float] = {}
        attempt, reservation_id = 1, self.new_id()
        while True:
            route = await self._queue.route(request, attempt, refused)
            if route is None:
                assert request.cancel_asked is not None
                return Cancelled(request.cancel_asked)
            request.recorder.placed(attempt, route)
            ids = AttemptIds(
                attempt=attempt,
                owner_epoch=request.recorder.owner_epoch,
                reservation_id=reservation_id,
                transfer_id=self.new_id(),
                deadline_ms=request.left_ms(self._clock.now()),
                traceparent=request.trace.traceparent,
            )
            attempted = Attempt(request.admitted, ids, route, self._workers, request.inbox, request.progress)
            outcome = await attempted.run()
            if isinstance(outcome, Completed | Cancelled):
                return outcome
            refused[outcome.worker_id] = self._clock.now() + outcome.retry_after_s
            attempt += 1

    async def _deadline(self, request: OpenRequest, deadline_s: float) -> None:
        await self._clock.sleep(max(0.0, deadline_s - self._clock.now()))
        request.cancel("DEADLINE_EXCEEDED", DeadlineError("the request's deadline passed; allow more time"))

    def _buried(self, life: asyncio.Task[None], request: OpenRequest) -> None:
        """A life that ended by a fault of ours still ends its stream."""
        self._lives.discard(life)
        self._note_quiet()
        fault = None if life.cancelled() else life.exception()
        if fault is None and not life.cancelled():
            return
        _log.error("life of request %s ended by %r", request.admitted.request_id, fault, exc_info=fault)
        self._open.pop(request.admitted.request_id, None)
        error = PdserveError("internal error of the router; its log has the details")
        if request.accepted.done():
            request.stream.finish(error)
            request.failed(error)
        else:
            request.trace.refused(error)
            request.accepted.set_exception(error)
            request.accepted.exception()  # the caller may be gone

    def _note_quiet(self) -> None:
        if not self._lives and not self._num_calls:
            self._quiet.set()

    def _check_new(self, admitted: Admitted) -> None:
        self.check_open()
        if known := self._open.get(admitted.request_id):
            same = known.admitted.request_digest == admitted.request_digest
            raise duplicate_error(admitted.request_id, same, known.recorder.state)

    def _record(self, request: OpenRequest) -> RequestRecord:
        admitted = request.admitted
        return RequestRecord(
            request_id=admitted.request_id,
            owner=self._router_id,
            model=admitted.model,
            request_digest=admitted.request_digest,
            tenant=admitted.tenant,
            priority=admitted.priority,
            deadline_ms=request.left_ms(self._clock.now()),
            sampling=sampling_to_proto(admitted.sampling).SerializeToString(),
            prompt=pack_prompt(admitted.prompt_token_ids),
        )
