"""Preemption on a real model: the tokens are those of a run that nothing disturbs; and how the choice is built."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.core.errors import ConfigError
from pdserve.core.sampling import SamplingParams
from pdserve.engine.build import build_core
from pdserve.engine.config import EngineConfig
from pdserve.engine.kv_cache import PlainPool
from pdserve.engine.preemption_costs import measure_preemption
from pdserve.engine.swap import SwapSpace
from tests.engine_model.models import FAMILIES, engine_run, make_model, save_model, served

PROMPTS = [[7 * i + j for j in range(5 + i)] for i in range(4)]


@pytest.mark.parametrize(
    ("family", "mode"),
    [("llama", "swap"), ("llama", "recompute"), ("gemma2: window, softcap", "swap")],
)
def test_tokens_are_those_of_an_undisturbed_run(family: str, mode: str) -> None:
    loaded = served(make_model(*FAMILIES[family]))
    layout = loaded.layout(4)
    sampling = [
        SamplingParams(temperature=t, seed=i, max_tokens=24, top_k=k)
        for i, (t, k) in enumerate([(0.0, 0), (0.9, 0), (0.0, 0), (1.1, 50)])
    ]
    undisturbed = engine_run(loaded, PROMPTS, sampling, num_pages=64)
    swap = SwapSpace(64, 4, layout.page_bytes, lambda num_tokens: mode == "swap")
    tight = engine_run(loaded, PROMPTS, sampling, num_pages=13, swap=swap)
    assert [tokens for tokens, _ in tight] == [tokens for tokens, _ in undisturbed]
    totals = swap.totals()
    assert (totals.num_swaps > 0) == (mode == "swap") == (totals.num_recomputes == 0)
    assert totals.swapped_out_bytes == totals.swapped_in_bytes


class ScriptedMeter:
    """Takes the time that it is told."""

    def __init__(self, max_tokens: int, token_s: float, pair_s: float, page_s: float) -> None:
        self.max_tokens, self._token_s, self._pair_s, self._page_s = max_tokens, token_s, pair_s, page_s
        self.copied: list[int] = []

    def step(self, num_tokens: int, context: int = 0) -> float:
        assert num_tokens + context <= self.max_tokens
        return 0.01 + num_tokens * self._token_s + num_tokens * context * self._pair_s

    def copies(self, num_pages: int) -> float:
        self.copied.append(num_pages)
        return 5.0 if len(self.copied) == 1 else 0.1 + self._page_s * num_pages


def test_costs_are_measured_beyond_the_first_use_of_memory_and_with_context() -> None:
    meter = ScriptedMeter(1000, token_s=0.001, pair_s=1e-6, page_s=0.01)
    costs = measure_preemption(meter, token_budget=64, page_size=16, max_pages=40)
    assert [n for n, _ in costs.step_points] == [8, 16, 32, 64]
    assert costs.context_s == pytest.approx(1e-6)
    assert costs.page_copy_s == pytest.approx(0.01)
    assert costs.swap_fixed_s == pytest.approx(0.2)
    assert costs.recompute_s(128) == pytest.approx(2 * 0.074 + 64 * 64 * 1e-6)
    assert max(meter.copied) <= 40


class DisturbedMeter(ScriptedMeter):
    """Neighbours make the first measurement of each kind take six times as long."""

    def __init__(self, max_tokens: int, token_s: float, pair_s: float, page_s: float) -> None:
        super().__init__(max_tokens, token_s, pair_s, page_s)
        self.steps: list[tuple[int, int]] = []
        self.spent_s = 0.0

    def step(self, num_tokens: int, context: int = 0) -> float:
        seconds = super().step(num_tokens, context) * (1 if (num_tokens, context) in self.steps else 6)
        self.steps.append((num_tokens, context))
        self.spent_s += seconds
        return seconds


def test_costs_are_those_of_an_undisturbed_machine() -> None:
    costs = measure_preemption(DisturbedMeter(1000, 0.001, 1e-6, 0.01), token_budget=64, page_size=16, max_pages=40)
    assert dict(costs.step_points) == pytest.approx({n: 0.01 + 0.001 * n for n in (8, 16, 32, 64)})
    assert costs.context_s == pytest.approx(1e-6)


def test_measuring_ends_in_bounded_time_on_a_slow_machine() -> None:
    meter = DisturbedMeter(1000, token_s=0.05, pair_s=0.0, page_s=0.01)
    costs = measure_preemption(meter, token_budget=64, page_size=16, max_pages=40)
    assert dict(costs.step_points) == pytest.approx({8: 0.41})
    assert meter.spent_s < 25


def test_one_page_and_no_room_for_context_are_enough_to_measure() -> None:
    costs = measure_preemption(ScriptedMeter(1, 0.5, 0.0, 0.25), token_budget=8, page_size=4, max_pages=1)
    assert (costs.step_points, costs.context_s) == (((1, 0.51),), 0.0)
    assert (costs.page_copy_s, costs.swap_fixed_s) == (0.35, 0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preemption_mode": "swap"}, "--preemption-mode is 'swap' and --swap-space-bytes is 0"),
        (
            {"preemption_mode": "recompute", "swap_space_bytes": 4096},
            "--swap-space-bytes is 4096 and",
        ),
        ({"preemption_mode": "drop"}, "--preemption-mode is 'drop'; it must be one of auto, recompute, swap"),
        ({"swap_space_bytes": -1}, "--swap-space-bytes is -1; it must be at least 0"),
    ],
)
def test_bad_combinations_are_refused_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)  # type: ignore[arg-type]


def test_a_prefill_worker_swaps_nothing() -> None:
    config = EngineConfig(preemption_mode="swap", swap_space_bytes=4096)
    with pytest.raises(ConfigError, match="--swap-space-bytes is 4096; a prefill worker swaps nothing"):
        config.check_prefill()
    config.for_prefill().check_prefill()


def test_swap_space_is_whole_pages_and_auto_measures(tmp_path: Path) -> None:
    save_model("llama", tmp_path)

    def built(**options: object):  # type: ignore[no-untyped-def]
        config = EngineConfig(model=str(tmp_path), page_size=4, max_num_batched_tokens=64, **options)  # type: ignore[arg-type]
        return build_core(config, PlainPool)

    auto = built(swap_space_bytes=100_000)
    assert auto.core.load().preemptions.num_host_pages == 100_000 // auto.layout.page_bytes
    costs = auto.preemption_costs
    assert costs is not None and costs.token_budget == 64 and costs.page_copy_s >= 0 and len(costs.step_points) > 1
    assert auto.profile is None  # the token budget was given
    assert built(swap_space_bytes=100_000, preemption_mode="swap").preemption_costs is None
    assert built().core.load().preemptions.num_host_pages == 0
    with pytest.raises(ConfigError, match="--swap-space-bytes is 100; one page of this model takes"):
        built(swap_space_bytes=100)
