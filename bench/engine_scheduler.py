"""Experiment: what a step costs the scheduler alone, and 100,000 sequences through it without a leak."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from pdserve.bench.engine_lab import Findings, Setting, bench_request
from pdserve.bench.report import Row
from pdserve.core.config import check, option
from pdserve.core.errors import ConfigError
from pdserve.engine.chunks import SchedulerLimits
from pdserve.engine.fake import FakeRunner, fake_layout
from pdserve.engine.page_pool import PagePool
from pdserve.engine.prefix_cache import PrefixCache
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.step import RunnerOutput, SampledToken

DEFAULTS: dict[str, object] = {"repeats": 5}
QUICK: dict[str, object] = {"repeats": 1, "num_steps": 3, "num_running": "4,8", "num_sequences": 200}
_PAGE_SIZE = 16
_PROMPT_TOKENS = 64
_MAX_RUNNING = 256


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """Sizes of the scheduler's measurement."""

    num_running: str = option("128,256,1024", "that run at once, one measurement each, with commas", unit="sequences")
    num_steps: int = option(100, "decode steps per measurement", unit="steps", minimum=1)
    num_sequences: int = option(100_000, "sequences that go through, start to end", unit="sequences", minimum=1)

    def __post_init__(self) -> None:
        check(self)
        self.sizes()

    def sizes(self) -> list[int]:
        """`num_running` as numbers."""
        try:
            sizes = [int(n) for n in self.num_running.split(",")]
        except ValueError:
            sizes = []
        if not sizes or min(sizes) < 1:
            raise ConfigError(f"--num-running is {self.num_running!r}; write numbers with commas, e.g. 128,256,1024")
        return sizes


OPTIONS = SchedulerOptions


@dataclass(frozen=True, slots=True)
class Passed:
    """What came of many sequences.

    Attributes:
        seconds: Of the scheduler, without the runner.
        num_tokens: Computed.
        num_left: Sequences and pages still held at the end.
    """

    seconds: float
    num_tokens: int
    num_left: int


def run(options: SchedulerOptions, setting: Setting) -> Findings:
    """Measures."""
    sizes = options.sizes()
    costs: dict[int, list[tuple[float, float]]] = {n: [] for n in sizes}
    for at in range(setting.repeats):
        setting.say(f"run {at + 1} of {setting.repeats}")
        for n in sizes:
            costs[n].append(step_cost(n, options.num_steps))
    rows = []
    for n in sizes:
        schedule, update = (statistics.median(c[i] for c in costs[n]) for i in (0, 1))
        rows.append(Row(f"{n:,} running: schedule, per sequence", schedule, "µs"))
        rows.append(Row(f"{n:,} running: update, events and load, per sequence", update, "µs"))
        rows.append(Row(f"{n:,} running: both, per sequence", schedule + update, "µs", "<= 5"))
    setting.say(f"{options.num_sequences:,} sequences")
    passed = pass_through(options.num_sequences)
    rows.append(Row(f"{options.num_sequences:,} sequences, in the scheduler", passed.seconds, "s"))
    rows.append(Row("per token of theirs", 1e6 * passed.seconds / passed.num_tokens, "µs"))
    rows.append(Row("sequences and pages left over at the end", passed.num_left, "", "0"))
    note = (
        "CPU time of the thread; each running sequence decodes one token per step, pages go to the prefix cache; "
        "medians over steps and runs"
    )
    return Findings(title="scheduler: CPU time of a step without the model", rows=rows, notes=[note])


def step_cost(num_running: int, num_steps: int) -> tuple[float, float]:
    """Median CPU time of `schedule`, and of `update`, `take_events` and `load`: microseconds per running sequence."""
    num_pages = num_running * _pages(_PROMPT_TOKENS + num_steps + 2)
    scheduler = _scheduler(num_running, num_pages, token_budget=num_running * _PROMPT_TOKENS)
    for i in range(num_running):
        scheduler.add(bench_request(str(i), range(i, i + _PROMPT_TOKENS), num_steps + 2, float(i)))
    token, times = SampledToken(7), list[tuple[int, int]]()
    while len(times) < num_steps:
        began = time.thread_time_ns()
        output = scheduler.schedule(0.0)
        scheduled = time.thread_time_ns()
        assert output is not None
        result = RunnerOutput(tuple(token if s.sampling else None for s in output.sequences))
        computed = time.thread_time_ns()
        scheduler.update(output, result)
        scheduler.take_events()
        scheduler.load()
        if output.num_tokens == num_running:
            times.append((scheduled - began, time.thread_time_ns() - computed))
    schedule, update = (statistics.median(t[i] for t in times) / num_running / 1000 for i in (0, 1))
    return schedule, update


def pass_through(num_sequences: int) -> Passed:
    """Adds many sequences at once and steps until nothing is left; some are aborted while they wait or run."""
    num_pages = _MAX_RUNNING * _pages(48)
    layout = fake_layout(_PAGE_SIZE)
    runner = FakeRunner(memoryview(bytearray(num_pages * layout.page_bytes)), layout)
    scheduler = _scheduler(_MAX_RUNNING, num_pages, token_budget=2048)
    seconds, num_tokens, next_abort = 0.0, 0, 0
    began = time.thread_time()
    for i in range(num_sequences):
        scheduler.add(bench_request(str(i), range(i % 100, i % 100 + 8 + i % 24), 1 + i % 11, float(i)))
    while (output := scheduler.schedule(0.0)) is not None:
        seconds += time.thread_time() - began
        result = runner.execute(output)
        began = time.thread_time()
        scheduler.update(output, result)
        scheduler.take_events()
        scheduler.load()
        num_tokens += output.num_tokens
        for _ in range(len(output.sequences) // 32):
            scheduler.abort(str(next_abort))  # it may have ended, run, or be far from its turn
            next_abort = (next_abort + 97) % num_sequences
    seconds += time.thread_time() - began
    scheduler.check()
    load = scheduler.load()
    return Passed(seconds, num_tokens, load.num_running + load.num_waiting + load.num_pages - load.num_free_pages)


def _scheduler(max_num_seqs: int, num_pages: int, token_budget: int) -> Scheduler:
    limits = SchedulerLimits(
        page_size=_PAGE_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=token_budget,
        max_model_len=1 << 20,
    )
    pool = PagePool(num_pages)
    return Scheduler(limits, pool, cache=PrefixCache(pool, _PAGE_SIZE))


def _pages(num_tokens: int) -> int:
    return -(-num_tokens // _PAGE_SIZE) + 1
