"""Deterministic simulation: a whole deployment in one process on virtual time, with the faults that a seed draws.

The router (API, admission, policy, worker table, orchestrator, sessions), the workers' services, engines, hand-off and
control streams are the real code; clock, network, page transport, request store and discovery are simulated. The same
scenario gives the same events, message for message: `Report.digest` is over all of them.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, cast

from prometheus_client import CollectorRegistry

from pdserve.bench.sim_network import Network
from pdserve.bench.sim_worker import SimWorker
from pdserve.bench.virtual_time import VirtualClock, run_virtual
from pdserve.bench.workload import Item, arrival_times, random_items
from pdserve.core.errors import PdserveError
from pdserve.core.registry import WorkerRecord
from pdserve.core.request import Role
from pdserve.core.telemetry import RouterMetrics
from pdserve.core.tokenizer import Tokenizer
from pdserve.core.tracing import Tracing
from pdserve.engine.batching import BATCHINGS
from pdserve.engine.config import EngineConfig
from pdserve.engine.fake import FAKE_VOCAB_SIZE, expected_tokens
from pdserve.kvtransfer.fake import FakePageSource, PageFate
from pdserve.kvtransfer.transport import SourcePageRef
from pdserve.router.attempt import ABORT_TIMEOUT_S
from pdserve.router.config import RouterConfig
from pdserve.router.connector import Connector
from pdserve.router.orchestrator import Orchestrator
from pdserve.router.policy import least_loaded
from pdserve.router.record import PHASES, TERMINAL_PHASE
from pdserve.router.service import InferenceService
from pdserve.router.store_fake import FakeStore
from pdserve.router.worker_set import WorkerSet
from pdserve.v1 import common_pb2, inference_pb2

MODEL = "fake"
LIMIT_S = 600.0
"""Virtual seconds within which everything must be over; far beyond every time-out of the system."""
GRPC_GRACE_S = 2 * ABORT_TIMEOUT_S
"""gRPC cuts a call at its deadline; here so much later, so that the router has to keep the deadline itself."""
Look = Callable[[Mapping[str, SimWorker]], None]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What happens. Times are virtual seconds; fractions are of requests, or of pages pulled.

    Attributes:
        seed: Of everything drawn.
        num_prefill, num_decode, num_mixed: Workers.
        num_requests: Requests, at `request_rate` per second.
        prompt_tokens, output_tokens: Means; both are uniform within ± 90 %.
        page_size, num_pages, max_num_seqs, max_num_batched_tokens: Of every engine.
        several: Fraction with n of 2 to 4.
        cancelled: Fraction that the client cancels or leaves, at a random moment.
        deadline_s: Deadline of half of the requests.
        kills, crashes, drains, stalls: Workers killed; engines failing; workers drained; workers cut off for a while.
            All but the last come back under the same name.
        lost, corrupt, stalled: Fractions of pages.
        page_s: Mean time of a page.
        mixed_batching: `--batching` of MIXED workers.
        max_open: Requests open at once, the others wait in their clients; None: all.
        queue_timeout_s: `--queue-timeout-s` of the router.
    """

    seed: int
    num_prefill: int = 2
    num_decode: int = 2
    num_mixed: int = 0
    num_requests: int = 150
    request_rate: float = 60.0
    prompt_tokens: int = 40
    output_tokens: int = 12
    page_size: int = 4
    num_pages: int = 96
    max_num_seqs: int = 12
    max_num_batched_tokens: int = 48
    several: float = 0.0
    cancelled: float = 0.2
    deadline_s: float = 20.0
    kills: int = 1
    crashes: int = 1
    drains: int = 1
    stalls: int = 1
    lost: float = 0.002
    corrupt: float = 0.002
    stalled: float = 0.001
    page_s: float = 0.001
    mixed_batching: str = "continuous"
    max_open: int | None = None
    queue_timeout_s: float = 15.0

    @classmethod
    def drawn(cls, seed: int, num_requests: int) -> Scenario:
        """A scenario of any kind: sizes, rates and faults are drawn too."""
        rng = random.Random(f"drawn {seed}")
        pages, mixed = rng.choice([24, 48, 96, 400]), rng.randrange(3)
        return cls(
            seed=seed,
            num_requests=num_requests,
            num_prefill=rng.randint(0 if mixed else 1, 3),
            num_decode=rng.randint(1, 3),
            num_mixed=mixed,
            request_rate=rng.choice([20.0, 80.0, 400.0]),
            prompt_tokens=rng.choice([4, 40]),
            output_tokens=rng.choice([4, 16]),
            page_size=rng.choice([1, 4, 16]) if pages == 400 else 4,
            num_pages=pages,
            max_num_seqs=rng.choice([2, 12, 64]),
            max_num_batched_tokens=rng.choice([64, 256]),
            several=rng.choice([0.0, 0.0, 0.5]),
            cancelled=rng.choice([0.0, 0.2, 0.8]),
            deadline_s=rng.choice([1.0, 20.0]),
            kills=rng.randrange(3),
            crashes=rng.randrange(2),
            drains=rng.randrange(3),
            stalls=rng.randrange(3),
            lost=rng.choice([0.0, 0.01]),
            corrupt=rng.choice([0.0, 0.01]),
            stalled=rng.choice([0.0, 0.002]),
            page_s=rng.choice([0.0001, 0.002, 0.02]),
            mixed_batching=rng.choice(BATCHINGS),
        )


@dataclass
class Outcome:
    """What one client saw.

    Attributes:
        choices: Tokens of each choice, in order.
        end: "stop", "length", "cancelled", the reason of an error, or "left"; None: nothing yet.
        took_s: Arrival to end.
        expected: What a right engine gives, for every choice.
        deadline_s: The request's; None: it had none.
    """

    expected: list[int]
    deadline_s: float | None
    choices: list[list[int]]
    end: str | None = None
    took_s: float = math.inf


@dataclass
class Report:
    """What a simulation showed.

    Attributes:
        outcomes: By request id.
        faults: What was done, counted.
        problems: Broken invariants, in words; must be empty.
        digest: Over every message and every client's events.
        virtual_s: How long it took in there.
    """

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    digest: str = ""
    virtual_s: float = 0.0

    @property
    def ends(self) -> Counter[str]:
        """How requests ended, counted."""
        return Counter(str(o.end) for o in self.outcomes.values())


class _Discovery:
    """`Discovery` in memory; a dead worker stays listed until it is replaced."""

    def __init__(self) -> None:
        self.records: dict[str, WorkerRecord] = {}
        self._changed = asyncio.Event()

    def put(self, record: WorkerRecord) -> None:
        self.records[record.worker_id] = record
        self._changed.set()

    async def watch(self) -> AsyncIterator[tuple[WorkerRecord, ...]]:
        """See `Discovery`."""
        while True:
            self._changed.clear()
            yield tuple(self.records.values())
            await self._changed.wait()


class _Context:
    """What the API asks of its gRPC context."""

    def __init__(self, deadline_s: float | None) -> None:
        self._deadline_s = deadline_s

    def time_remaining(self) -> float | None:
        return self._deadline_s

    def invocation_metadata(self) -> tuple[()]:
        return ()


class Simulation:
    """One scenario; `run` once, on a virtual loop.

    Args:
        scenario: What happens.
        look: Sees all workers by name whenever a message is on its way, at one instant of virtual time.
    """

    def __init__(self, scenario: Scenario, look: Look | None = None) -> None:
        self._s, self._look_on = scenario, look
        self._turns = asyncio.Semaphore(scenario.max_open or scenario.num_requests)
        self._rng = random.Random(f"scenario {scenario.seed}")
        self._hash = hashlib.blake2b()
        self.report = Report()
        self._clock = VirtualClock()
        self._network = Network(self._draws("network"), 0.0002, lambda link, data: self._saw(link, data))
        self._page_rng = self._draws("pages")
        self._sources: dict[str, FakePageSource] = {}
        self._workers: dict[str, SimWorker] = {}
        self._num_processes = 0
        self._discovery = _Discovery()
        self._store, self._set = FakeStore(), WorkerSet(MODEL)
        config = RouterConfig(queue_timeout_s=scenario.queue_timeout_s)
        self._orchestrator = Orchestrator(
            config, "router", self._clock, self._store, self._set, least_loaded(), self._draws("ids")
        )
        self._api = InferenceService(
            MODEL,
            self._orchestrator,
            self._store,
            self._set,
            lambda limits: Tokenizer.fake(limits.vocab_size),
            Tracing("router", "router", None, self._clock),
            RouterMetrics(CollectorRegistry()),
            self._clock,
        )
        self._connector = Connector(
            self._set,
            self._discovery,
            "router",
            self._clock,
            heartbeat_s=config.heartbeat_s,
            worker_timeout_s=config.worker_timeout_s,
            open_channel=self._network.channels(self._network.join("router")),
        )

    async def run(self) -> Report:
        """Runs it to the end and looks at what is left."""
        s = self._s
        for role, count in ((Role.PREFILL, s.num_prefill), (Role.DECODE, s.num_decode), (Role.MIXED, s.num_mixed)):
            for i in range(count):
                await self._start(role, f"{role.value}-{i}")
        connector = asyncio.create_task(self._connector.run())
        arrivals = arrival_times(s.num_requests, s.request_rate, 1.0, s.seed)
        items = random_items(arrivals, s.prompt_tokens, s.output_tokens, 0.9, FAKE_VOCAB_SIZE, s.seed)
        clients = [asyncio.create_task(self._client(f"r{i}", item)) for i, item in enumerate(items)]
        faults = [asyncio.create_task(f) for f in self._faults(arrivals[-1])]
        _, late = await asyncio.wait([*clients, *faults], timeout=LIMIT_S)
        for task in (*clients, *faults):
            if task in late:
                self.report.problems.append(f"not over after {LIMIT_S:g} s: {task.get_coro()}")
            elif (error := task.exception()) is not None:
                raise error
        await self._look()
        self.report.virtual_s = self._clock.now()
        connector.cancel()
        await asyncio.gather(connector, return_exceptions=True)
        for worker in self._workers.values():
            await worker.die()
        self.report.digest = self._hash.hexdigest()
        return self.report

    def _draws(self, what: str) -> random.Random:
        return random.Random(f"{what} {self._s.seed}")

    def _saw(self, what: str, data: bytes) -> None:
        self._hash.update(f"{self._clock.now():.9f} {what} {len(data)} ".encode() + data)
        if self._look_on is not None:
            self._look_on(self._workers)

    # ---- workers and what befalls them

    async def _start(self, role: Role, name: str) -> None:
        s = self._s
        self._num_processes += 1
        engine = EngineConfig(
            runner="fake",
            model=MODEL,
            page_size=s.page_size,
            num_pages=s.num_pages,
            max_num_seqs=s.max_num_seqs,
            max_num_batched_tokens=s.max_num_batched_tokens,
            batching=s.mixed_batching if role is Role.MIXED else "continuous",
        )
        incarnation, rng = f"{self._num_processes:04x}", self._draws(f"engine {self._num_processes}")
        worker = SimWorker(role, name, incarnation, engine, self._network, self._sources, self._fate, rng)
        await worker.start()
        self._workers[name] = worker
        self._discovery.put(worker.record)

    def _fate(self, transfer_id: str, page: SourcePageRef) -> PageFate:
        s, rng = self._s, self._page_rng
        fate = PageFate(
            rng.expovariate(1 / s.page_s) if rng.random() >= s.stalled else math.inf,
            rng.random() < s.lost,
            rng.random() < s.corrupt,
        )
        self.report.faults["lost"] += fate.lost
        self.report.faults["corrupt"] += fate.corrupt
        self.report.faults["stalled"] += fate.delay_s == math.inf
        return fate

    def _faults(self, span_s: float) -> list[Any]:
        s, names = self._s, sorted(self._workers)
        kinds = ["kill"] * s.kills + ["crash"] * s.crashes + ["drain"] * s.drains + ["stall"] * s.stalls
        return [self._befall(self._rng.uniform(0, span_s), kind, self._rng.choice(names)) for kind in kinds]

    async def _befall(self, at_s: float, kind: str, name: str) -> None:
        down_s = self._rng.uniform(0.05, 6.0)
        await self._clock.sleep(at_s)
        worker = self._workers[name]
        if not worker.process.alive or worker.sessions.draining:
            return
        self.report.faults[kind] += 1
        self._saw(kind, name.encode())
        if kind == "stall":
            self._network.stall(name, down_s)
            return
        if kind == "kill":
            await worker.die()
        elif kind == "crash":
            worker.engine.crash()
            await worker.failed
            await worker.stop(0.0)
        else:
            await worker.stop(down_s)
        await self._clock.sleep(down_s)
        await self._start(worker.role, name)

    # ---- clients

    async def _client(self, request_id: str, item: Item) -> None:
        s, rng, draws = self._s, self._draws(request_id), self._draws(f"n of {request_id}")
        n = draws.randint(2, 4) if draws.random() < s.several else 1
        expected = expected_tokens(item.prompt_token_ids, item.max_tokens)
        sampling = common_pb2.SamplingParams(n=n, max_tokens=item.max_tokens, seed=1, ignore_eos=True)
        request = inference_pb2.GenerateRequest(request_id=request_id, sampling=sampling)
        request.tokens.token_ids.extend(item.prompt_token_ids)
        deadline_s = s.deadline_s * (0.05 + rng.random()) if rng.random() < 0.5 else None
        outcome = self.report.outcomes[request_id] = Outcome(expected, deadline_s, [[] for _ in range(n)])
        cancel, leave_after_s = rng.random() < s.cancelled, rng.expovariate(4)
        await self._clock.sleep(item.arrival_s)
        async with self._turns:
            await self._ask(request_id, request, outcome, leave_after_s if cancel else None, rng)
        outcome.took_s = self._clock.now() - item.arrival_s
        self._saw(request_id, f"{outcome.end} {outcome.choices}".encode())

    async def _ask(
        self,
        request_id: str,
        request: inference_pb2.GenerateRequest,
        outcome: Outcome,
        leave_after_s: float | None,
        rng: random.Random,
    ) -> None:
        reading = asyncio.create_task(self._read(request_id, request, _Context(outcome.deadline_s), outcome))
        if leave_after_s is not None:
            await asyncio.wait([reading], timeout=leave_after_s)
            if not reading.done() and rng.random() < 0.5:
                reading.cancel()
            else:
                asked = inference_pb2.CancelRequest(request_id=request_id)
                await self._api.Cancel(asked, cast(Any, _Context(None)))
        try:
            await reading
        except asyncio.CancelledError:
            outcome.end = "left"

    async def _read(self, name: str, request: inference_pb2.GenerateRequest, context: _Context, out: Outcome) -> None:
        grpc_s = None if out.deadline_s is None else out.deadline_s + GRPC_GRACE_S
        try:
            async with (
                asyncio.timeout(grpc_s),
                aclosing(self._api.Generate(request, cast(Any, context))) as responses,  # type: ignore[type-var]
            ):
                async for response in responses:
                    self._heard(name, response, out)
        except PdserveError as e:
            if out.end is not None:
                self.report.problems.append(f"{name}: an error after the end: {e.reason}")
            out.end = e.reason
        except TimeoutError:
            if self._orchestrator.find(name) is not None:
                self.report.problems.append(f"{name}: the router let its deadline of {out.deadline_s} s pass")
            out.end = "DEADLINE_EXCEEDED"

    def _heard(self, name: str, response: inference_pb2.GenerateResponse, out: Outcome) -> None:
        if out.end is not None:
            self.report.problems.append(f"{name}: news after the end: {response}")
        if response.HasField("delta"):
            tokens = out.choices[response.delta.choice]
            if response.delta.index != len(tokens):
                self.report.problems.append(f"{name}: index {response.delta.index} at {len(tokens)}")
            tokens += response.delta.token_ids
        if response.HasField("finished"):
            reason = common_pb2.FinishReason.Name(response.finished.finish_reason)
            out.end = reason.removeprefix("FINISH_REASON_").lower()

    # ---- what must hold

    async def _look(self) -> None:
        problems = self.report.problems
        for name, o in self.report.outcomes.items():
            for tokens in o.choices:
                if tokens != o.expected[: len(tokens)]:
                    problems.append(f"{name}: wrong token: {tokens}, not {o.expected}")
                if o.end in ("stop", "length") and tokens != o.expected:
                    problems.append(f"{name}: ended {o.end} after {len(tokens)} of {len(o.expected)} tokens")
            if o.end in (None, "INTERNAL", "BROKEN_STREAM"):
                problems.append(f"{name}: ended {o.end}")
        for end, fault in (("CORRUPT_PAGE", "corrupt"), ("BAD_WATERMARK", ""), ("PAGES_OUT_OF_ORDER", "")):
            if self.report.ends[end] > self.report.faults[fault]:
                problems.append(f"{self.report.ends[end]} ended {end} for {self.report.faults[fault]} faults")
        end_s = self._clock.now() + LIMIT_S
        while (left := list(self._left())) and self._clock.now() < end_s:
            await self._clock.sleep(0.1)
        problems += [f"left over: {text}" for text in left]
        for worker in self._workers.values():
            try:
                await self._clock.wait_for(worker.service.drain(), 1.0)
            except TimeoutError:
                problems.append(f"left over on {worker.worker_id}: streams that nobody ends")

    def _left(self) -> Iterator[str]:
        """What is still there of any request."""
        for name, worker in self._workers.items():
            if text := worker.leftovers():
                yield text
            live = self._set.table.live(name)
            if live is not None and live.inflight:
                yield f"the router counts {live.inflight} on {name}"
        if self._orchestrator.num_open or self._orchestrator.num_queued:
            yield f"the router has {self._orchestrator.num_open} open requests"
        for record in self._store.records.values():
            if PHASES[record.state] != TERMINAL_PHASE:
                yield f"the record of {record.request_id} says {record.state}"


class _Errors(logging.Handler):
    """Keeps what is logged as an error: nothing that a scenario does is one."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        self.lines.append(f"logged by {record.name}: {record.getMessage()} {record.exc_info or ''}")


def simulate(scenario: Scenario, look: Look | None = None) -> Report:
    """Runs a scenario on virtual time; arguments as of `Simulation`."""

    async def main() -> Report:
        return await Simulation(scenario, look).run()

    errors = _Errors()
    logging.getLogger().addHandler(errors)
    try:
        report = run_virtual(main())
    finally:
        logging.getLogger().removeHandler(errors)
    report.problems += errors.lines
    return report
