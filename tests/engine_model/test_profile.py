from __future__ import annotations

import os

import pytest

from pdserve.core.errors import ConfigError
from pdserve.engine import build
from pdserve.engine.config import DEFAULT_STEP_TARGET_MS, PREFILL_STEP_TARGET_MS, EngineConfig
from pdserve.engine.profile import StepMeter, budget_for, measure_context_unit, profile_steps
from pdserve.engine.step import RunnerOutput, SchedulerOutput


def test_budget_lies_on_the_line_through_the_points() -> None:
    points = [(8, 0.1), (16, 0.2), (32, 0.4)]
    assert budget_for(points, 0.3) == 24
    assert budget_for(points, 0.8) == 64  # beyond the last
    assert budget_for(points, 0.05) == 4  # before the first
    assert budget_for([(8, 0.1)], 0.2) == 16
    assert budget_for([], 0.2) == 1
    assert budget_for([(8, 0.2), (16, 0.1)], 0.3) == 16  # noise


def test_measuring_stops_at_the_target_and_at_the_limit() -> None:
    asked: list[int] = []

    def measure(tokens: int) -> float:
        asked.append(tokens)
        return 0.02 + tokens * 0.005

    profile = profile_steps(measure, target_s=0.25, min_budget=1, max_budget=2048, limit_s=10)
    assert asked == [1, 8, 16, 32, 64]
    assert profile.token_budget == 46
    asked.clear()
    profile_steps(measure, target_s=100, min_budget=1, max_budget=2048, limit_s=0.2)
    assert asked == [1, 8, 16, 32]


def test_budget_is_never_below_a_full_batch_nor_above_the_limit() -> None:
    assert profile_steps(lambda n: n * 1.0, target_s=0.25, min_budget=64, max_budget=2048).token_budget == 64
    assert profile_steps(lambda n: n * 1e-6, target_s=0.25, min_budget=1, max_budget=100).token_budget == 100


def test_with_decodes_the_budget_holds_the_slo_for_all_of_them_and_a_chunk() -> None:
    """A decode costs 4 ms, a prompt token 1 ms, a step 10 ms."""
    measured: list[int] = []

    def measure(tokens: int) -> float:
        measured.append(tokens)
        return 0.010 + 20 * 0.004 + (tokens - 20) * 0.001

    profile = profile_steps(measure, target_s=0.150, min_budget=36, max_budget=2048, num_decodes=20)
    assert measured == [21, 28, 36, 52, 84]
    assert profile.token_budget == 20 + 60
    assert profile.holds(0.150) and not profile.holds(0.090)


def test_a_slow_engine_is_measured_twice_at_least() -> None:
    assert len(profile_steps(lambda n: 1.0 + n, 100.0, 1, 2048, limit_s=0.1).points) == 2


def test_the_cost_of_context_is_what_a_chunk_takes_longer_with_it() -> None:
    """A token costs 2 ms, a pair 1 us: the same after 2,000 tokens."""
    noise = iter((0.003, 0.0, 0.001, 0.0, 0.02, 0.01))

    def measure(context: int) -> float:
        return 0.010 + 8 * 0.002 + 8 * context * 1e-6 + next(noise)

    assert measure_context_unit(measure, 0.002, 8, 500) == pytest.approx(2000)
    assert measure_context_unit(lambda context: 0.1, 0.002, 8, 500) == float("inf")
    assert measure_context_unit(lambda context: 0.1 + context, 0.0, 8, 500) == float("inf")


class Recorder:
    def __init__(self) -> None:
        self.outputs: list[SchedulerOutput] = []

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        self.outputs.append(output)
        return RunnerOutput((None,) * len(output.sequences))


def test_the_meter_runs_decodes_with_their_context_and_one_chunk() -> None:
    recorder = Recorder()
    StepMeter(recorder, page_size=4, num_pages=10, context=6).measure(9, num_decodes=3)
    (output,) = recorder.outputs
    assert [(s.start, len(s.token_ids), len(s.page_table)) for s in output.sequences] == [(6, 1, 2)] * 3 + [(0, 6, 2)]
    assert output.num_tokens == 9
    StepMeter(recorder, page_size=4, num_pages=10).measure_chunk(5, 9)
    (chunk,) = recorder.outputs[-1].sequences
    assert (chunk.start, len(chunk.token_ids), len(chunk.page_table)) == (9, 5, 4)
    assert all(0 <= page < 10 for s in output.sequences for page in s.page_table)


@pytest.mark.parametrize(
    "options",
    [
        {"tpot_slo_ms": 50.0, "step_target_ms": 100.0},
        {"tpot_slo_ms": 50.0, "max_num_batched_tokens": 128},
        {"step_target_ms": 50.0, "max_num_batched_tokens": 128},
        {"tpot_slo_ms": 50.0, "runner": "fake"},
    ],
)
def test_what_sets_the_budget_twice_is_refused_by_name(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as refusal:
        EngineConfig(**options)  # type: ignore[arg-type]
    assert all("--" + name.replace("_", "-") in refusal.value.message for name in options)


def test_a_prefill_worker_takes_larger_steps_unless_it_is_told() -> None:
    assert EngineConfig().of_prefill_worker().step_target_ms == PREFILL_STEP_TARGET_MS > DEFAULT_STEP_TARGET_MS
    assert EngineConfig(step_target_ms=50.0).of_prefill_worker().step_target_ms == 50.0
    assert EngineConfig(max_num_batched_tokens=128).of_prefill_worker().step_target_ms is None


def test_a_prefill_worker_has_no_tpot() -> None:
    with pytest.raises(ConfigError, match="--tpot-slo-ms"):
        EngineConfig(tpot_slo_ms=50.0).of_prefill_worker()


def test_more_threads_than_cores_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    cores = len(os.sched_getaffinity(0))
    build._check_threads(cores)
    assert not caplog.records
    build._check_threads(cores + 1)
    assert f"--threads is {cores + 1} and this process has {cores} cores" in caplog.text
