"""The bench's laboratory: engines over one loaded model, a runner that keeps a record of its steps, and a driver.

Every experiment compares engines that differ in one option and share the rest, the runner above all.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from pdserve.bench.load import Outcome
from pdserve.bench.report import Row
from pdserve.bench.workload import Item
from pdserve.core.errors import EngineError
from pdserve.core.request import Request
from pdserve.core.sampling import SamplingParams
from pdserve.engine.build import build_core, make_core, make_swap_space
from pdserve.engine.config import EngineConfig
from pdserve.engine.engine_core import EngineCore
from pdserve.engine.kv_cache import PlainPool
from pdserve.engine.profile import StepMeter
from pdserve.engine.step import Add, Runner, RunnerOutput, SchedulerOutput, SequenceFailed, TokensSampled


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What every experiment is given.

    Attributes:
        engine: The engine's options.
        seed: Of everything random.
        repeats: Interleaved runs; medians are reported.
        say: Tells a person what is going on.
    """

    engine: EngineConfig
    seed: int
    repeats: int
    say: Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """What an experiment found.

    Attributes:
        title: Heading of the table.
        rows: The values.
        notes: Lines below the table.
        extra: Further members of the JSON document.
    """

    title: str
    rows: Sequence[Row]
    notes: Sequence[str] = ()
    extra: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Step:
    """One computed step.

    Attributes:
        seconds: In the runner.
        num_decodes: Sequences past their prompt, padding included.
        num_chunk_tokens: Prompt tokens.
        num_useful: Sequences whose work somebody wanted: all but padding.
        num_held_tokens: Tokens whose KV exists after it, of the sequences that it computed.
        num_pages: Pages in use during it.
    """

    seconds: float
    num_decodes: int
    num_chunk_tokens: int
    num_useful: int
    num_held_tokens: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class Served:
    """One run of a workload.

    Attributes:
        outcomes: One per request, in order.
        steps: In order.
        seconds: From the first arrival to the last end.
    """

    outcomes: tuple[Outcome, ...]
    steps: tuple[Step, ...]
    seconds: float


class Recorder:
    """A runner that keeps a record of its steps.

    Args:
        runner: The one that computes.

    Attributes:
        steps: Every sequence counts as useful if nothing is sampled from it; all pages are 0. `serve` adds the rest.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.steps: list[Step] = []

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """See `Runner`."""
        began = time.perf_counter()
        result = self._runner.execute(output)
        seconds = time.perf_counter() - began
        chunks = [len(s.token_ids) for s in output.sequences if s.start < s.num_prompt]
        self.steps.append(
            Step(
                seconds,
                len(output.sequences) - len(chunks),
                sum(chunks),
                sum(s.sampling is None for s in output.sequences),
                sum(s.start + len(s.token_ids) for s in output.sequences),
                0,
            )
        )
        return result


class Lab:
    """Engines over one loaded model.

    Args:
        config: Options that all engines share.

    Attributes:
        vocab_size: Token ids are below it.
        max_model_len: Prompt and output tokens together, at most.
        page_size: Tokens per page.
        costs: Of preemption; None when the options leave no choice.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._built = build_core(config, PlainPool)
        self.vocab_size, self.max_model_len = self._built.vocab_size, self._built.max_model_len
        self.page_size, self.costs = self._built.layout.page_size, self._built.preemption_costs

    @property
    def context_unit(self) -> float:
        """As measured at start; inf when the token budget was given."""
        return math.inf if self._built.profile is None else self._built.profile.context_unit

    def engine(self, context_unit: float = math.inf, **changes: object) -> tuple[EngineCore, Recorder]:
        """A new engine with its own pages' bookkeeping; use one at a time, for they share the memory.

        Args:
            context_unit: What context takes of the token budget; see `SchedulerLimits`.
            **changes: Options that differ; `num_pages` and `swap_space_bytes` are at most what the lab has.
        """
        config = replace(self._config, **changes)  # type: ignore[arg-type]
        budget = config.max_num_batched_tokens or self._built.token_budget
        recorder = Recorder(self._built.core.runner)
        num_pages = min(config.num_pages or self._built.num_pages, self._built.num_pages)
        swap = make_swap_space(config, self._built.layout, self.costs)
        core = make_core(config, recorder, num_pages, budget, self.max_model_len, swap=swap, context_unit=context_unit)
        return core, recorder

    def step_s(self, num_tokens: int, num_decodes: int, context: int) -> float:
        """Seconds of one step: decodes with `context` tokens behind each, and the rest of the tokens in one chunk."""
        built = self._built
        meter = StepMeter(built.core.runner, built.layout.page_size, built.num_pages, context)
        return meter.measure(num_tokens, num_decodes)

    def warm_up(self) -> None:
        """Computes a few tokens: a model's first steps are slower than the others."""
        core, recorder = self.engine()
        serve(core, recorder, [Item(0.0, tuple(range(3, 19)), 3)], WallTime())


class Timeline(Protocol):
    """Whose time it is."""

    def now(self) -> float:
        """Seconds."""
        ...

    def wait_until(self, at_s: float) -> None:
        """Lets time pass; nothing can be computed before."""
        ...

    def computed(self, num_tokens: int) -> None:
        """A step has ended."""
        ...


class WallTime:
    """Real time."""

    def now(self) -> float:
        """See `Timeline`."""
        return time.perf_counter()

    def wait_until(self, at_s: float) -> None:
        """See `Timeline`."""
        time.sleep(max(0.0, at_s - self.now()))

    def computed(self, num_tokens: int) -> None:
        """See `Timeline`."""


class VirtualTime:
    """Steps take `step_s` and `token_s` per token, whatever they really take."""

    def __init__(self, step_s: float, token_s: float) -> None:
        self._now, self._step_s, self._token_s = 0.0, step_s, token_s

    def now(self) -> float:
        """See `Timeline`."""
        return self._now

    def wait_until(self, at_s: float) -> None:
        """See `Timeline`."""
        self._now = max(self._now, at_s)

    def computed(self, num_tokens: int) -> None:
        """See `Timeline`."""
        self._now += self._step_s + self._token_s * num_tokens


def bench_request(key: str, prompt: Sequence[int], max_tokens: int, arrival_s: float) -> Request:
    """A greedy request that generates exactly `max_tokens`."""
    sampling = SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens, ignore_eos=True)
    return Request(
        key=key, prompt_token_ids=tuple(prompt), sampling=sampling, eos_token_ids=frozenset(), arrival_s=arrival_s
    )


def serve(core: EngineCore, recorder: Recorder, items: Sequence[Item], timeline: Timeline) -> Served:
    """Sends each item at its time and steps the engine until all have ended.

    Raises:
        EngineError: A request failed, or the engine stood still.
    """
    start = timeline.now()
    pending = deque(sorted(enumerate(items), key=lambda pair: pair[1].arrival_s))
    outputs: list[list[float]] = [[] for _ in items]
    ends: dict[int, float] = {}
    steps: list[Step] = []
    while len(ends) < len(items):
        now = timeline.now()
        commands = []
        while pending and start + pending[0][1].arrival_s <= now:
            at, item = pending.popleft()
            arrival_s = start + item.arrival_s
            commands.append(Add(bench_request(str(at), item.prompt_token_ids, item.max_tokens, arrival_s)))
        core.begin_step(commands)
        early, late = core.schedule(now), core.compute()
        if late.num_tokens:
            timeline.computed(late.num_tokens)
        now, num_sampled = timeline.now(), 0
        for event in early.events + late.events:
            if isinstance(event, SequenceFailed):
                raise EngineError(f"a request of the bench failed: {event.message}", reason=event.reason)
            if isinstance(event, TokensSampled):
                num_sampled += 1
                outputs[int(event.key)].append(now)
                if event.finish_reason is not None:
                    ends[int(event.key)] = now
        if late.num_tokens:
            step, load = recorder.steps[-1], early.load
            useful, used = step.num_useful + num_sampled, load.num_pages - load.num_free_pages
            steps.append(replace(step, num_useful=useful, num_pages=used))
        elif len(ends) < len(items):
            _wait(core, timeline, start + pending[0][1].arrival_s if pending else None)
    core.begin_step(())
    core.schedule(timeline.now())
    core.check()
    outcomes = [
        Outcome(item, start + item.arrival_s, tuple(outputs[i]), ends[i], len(outputs[i]), None)
        for i, item in enumerate(items)
    ]
    return Served(tuple(outcomes), tuple(steps), max(ends.values()) - start)


def _wait(core: EngineCore, timeline: Timeline, arrival_s: float | None) -> None:
    times = [at for at in (arrival_s, core.next_wakeup()) if at is not None]
    if not times:
        raise EngineError("the engine stands still although requests are open", reason="STALLED")
    timeline.wait_until(min(times))
