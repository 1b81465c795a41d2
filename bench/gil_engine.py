"""The engine of `pdserve bench gil`: the real core over the fake runner, with fixed extra computing in each step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import numpy as np

from pdserve.core.request import Request
from pdserve.core.sampling import SamplingParams
from pdserve.engine.chunks import SchedulerLimits
from pdserve.engine.engine_core import EngineCore
from pdserve.engine.fake import FakeRunner, fake_layout
from pdserve.engine.kv_cache import PlainPool
from pdserve.engine.page_pool import PagePool
from pdserve.engine.step import Add, Runner, RunnerOutput, SchedulerOutput

PROMPT_TOKENS = 16
PAGE_SIZE = 16
_MATRIX = 256
_CALIBRATION_S = 0.05


@dataclass(frozen=True, slots=True)
class Case:
    """What is run.

    Attributes:
        num_streams: Sequences.
        num_steps: Decode steps.
        step_ms: Extra computing per step, milliseconds on an idle core.
        python_share: Share of it in plain Python, in [0, 1].
        tokenizer_dir: Model directory whose tokenizer is used; None: the fake one.
    """

    num_streams: int
    num_steps: int
    step_ms: float = 0.0
    python_share: float = 0.0
    tokenizer_dir: str | None = None

    @property
    def label(self) -> str:
        """Name in the report."""
        return f"{self.step_ms:g} ms, {self.python_share:.0%} Python" if self.step_ms else "0 ms"


class BusyRunner:
    """A runner that computes a fixed amount more per step than the one it wraps.

    Args:
        inner: The runner.
        step_s: Seconds of extra computing on an idle core.
        python_share: Share of it in plain Python.
    """

    def __init__(self, inner: Runner, step_s: float, python_share: float) -> None:
        self._inner = inner
        self._matrix = np.ones((_MATRIX, _MATRIX), dtype=np.float32)
        self._products = round(step_s * (1 - python_share) * _rate(self._multiply))
        self._loops = round(step_s * python_share * _rate(_count))

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """See `Runner`."""
        self._multiply(self._products)
        _count(self._loops)
        return self._inner.execute(output)

    def _multiply(self, times: int) -> None:
        out = np.empty_like(self._matrix)
        for _ in range(times):
            np.matmul(self._matrix, self._matrix, out=out)


def build_core(case: Case) -> EngineCore:
    """The engine of a case; nothing has been added yet."""
    layout = fake_layout(PAGE_SIZE)
    num_pages = case.num_streams * layout.num_pages(PROMPT_TOKENS + case.num_steps + 1)
    runner: Runner = FakeRunner(PlainPool(layout, num_pages).buffer, layout)
    if case.step_ms:
        runner = BusyRunner(runner, case.step_ms / 1000, case.python_share)
    limits = SchedulerLimits(
        page_size=PAGE_SIZE,
        max_num_seqs=case.num_streams,
        max_num_batched_tokens=case.num_streams * PROMPT_TOKENS,  # all prompts in one step, then decodes only
        max_model_len=PROMPT_TOKENS + case.num_steps + 1,
    )
    return EngineCore(limits, PagePool(num_pages), runner)


def commands(case: Case) -> list[Add]:
    """The requests of a case; keys are "0", "1", ... ."""
    params = sampling(case)
    return [
        Add(
            Request(
                key=str(i),
                prompt_token_ids=tuple((i + j) % 256 for j in range(PROMPT_TOKENS)),
                sampling=params,
                eos_token_ids=frozenset(),
                arrival_s=0.0,
            )
        )
        for i in range(case.num_streams)
    ]


def sampling(case: Case) -> SamplingParams:
    """Parameters of every request: one token with the prompt's step, one per decode step."""
    return SamplingParams(temperature=0.0, seed=0, max_tokens=case.num_steps + 1, ignore_eos=True)


def engine_main(connection: Connection, case: Case) -> None:
    """The engine process: waits for the word to go, then sends one pickled StepEvents per step, then None."""
    core = build_core(case)
    connection.send(None)  # ready
    connection.recv()
    core.begin_step(commands(case))
    while True:
        began = time.monotonic()
        events = core.step(began)
        if events.num_tokens == 0 and not events.events:
            break
        connection.send(replace(events, duration_s=time.monotonic() - began))
        core.begin_step(())
    connection.send(None)
    connection.close()


def _rate(work: Callable[[int], None]) -> float:
    """Units of work per second on an idle core: the best of three tries."""
    return max(_timed(work) for _ in range(3))


def _timed(work: Callable[[int], None]) -> float:
    size = 1
    while True:
        began = time.perf_counter()
        work(size)
        if (took := time.perf_counter() - began) > _CALIBRATION_S:
            return size / took
        size *= 2


def _count(times: int) -> None:
    total = 0
    for i in range(times):
        total += i
