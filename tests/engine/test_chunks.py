"""How a step's tokens are dealt out: prompts beside many decodes, short prompts beside long ones."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.errors import ConfigError
from pdserve.engine.chunks import LEAST_TOKENS, SCORED_COST, SCORED_TOKENS, Chunks, SchedulerLimits
from pdserve.engine.config import EngineConfig
from pdserve.engine.page_pool import PagePool
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import RunnerOutput, SampledToken
from tests.engine.engines import request


def scheduler(
    *,
    num_seqs: int = 8,
    budget: int = 8,
    long_tokens: int | None = None,
    max_num_long: int = 1,
    context_unit: float = math.inf,
) -> Scheduler:
    limits = SchedulerLimits(
        page_size=4,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=256,
        least_tokens=4,
        long_tokens=long_tokens,
        max_num_long=max_num_long,
        context_unit=context_unit,
    )
    return Scheduler(limits, PagePool(200))


def advance(s: Scheduler) -> dict[str, int]:
    """One step; who computed how many tokens."""
    output = s.schedule(0.0)
    assert output is not None
    s.update(output, RunnerOutput(tuple(SampledToken(7) if i.sampling else None for i in output.sequences)))
    s.check()
    return {i.key: len(i.token_ids) for i in output.sequences}


def test_a_prompt_gets_on_by_a_page_per_step_beside_any_number_of_decodes() -> None:
    s = scheduler(num_seqs=6, budget=4)
    decodes = [f"d{i}" for i in range(5)]
    for i, key in enumerate(decodes):
        s.add(request(key, [1], 60, arrival_s=i))
    while len(advance(s)) < len(decodes):
        pass
    s.add(request("prompt", range(10), 2, arrival_s=9))
    assert [advance(s)["prompt"] for _ in range(3)] == [4, 4, 2]


def test_short_prompts_get_tokens_beside_a_long_one_which_takes_all_when_it_is_alone() -> None:
    s = scheduler(budget=8, long_tokens=5)
    s.add(request("long", range(40), 2, arrival_s=0))
    assert advance(s) == {"long": 8}
    s.add(request("short", range(5), 2, arrival_s=1))
    assert advance(s) == {"long": 5, "short": 3}
    assert advance(s) == {"long": 6, "short": 2}
    assert advance(s) == {"short": 1, "long": 7}


def test_only_so_many_long_prompts_are_computed_at_once() -> None:
    s = scheduler(budget=8, long_tokens=5)
    for i, (key, num) in enumerate((("long", 12), ("next", 12), ("short", 3))):
        s.add(request(key, range(num), 9, arrival_s=i))
    assert advance(s) == {"long": 5, "short": 3}
    assert advance(s) == {"short": 1, "long": 7}
    assert advance(s) == {"short": 1, "long": 1, "next": 6}

    both = scheduler(budget=12, long_tokens=5, max_num_long=2)
    for i, (key, num) in enumerate((("long", 12), ("next", 12), ("short", 3))):
        both.add(request(key, range(num), 9, arrival_s=i))
    assert advance(both) == {"long": 5, "next": 5, "short": 2}


def test_a_long_prompt_is_passed_by_short_ones_only_while_another_long_one_is_computed() -> None:
    """Short ones come in every step, more than the budget can take; still both long ones are computed."""
    s = scheduler(num_seqs=4, budget=8, long_tokens=4)
    for i in range(2):
        s.add(request(f"long{i}", range(30), 1, arrival_s=i))
    left = {"long0": 30, "long1": 30}
    for step in range(60):
        s.add(request(f"short{step}", range(4), 1, arrival_s=2 + step))
        for key, num in advance(s).items():
            if key in left:
                left[key] -= num
    assert left == {"long0": 0, "long1": 0}


def test_prompts_that_are_scored_take_few_tokens_of_a_step_together() -> None:
    s = scheduler(budget=SCORED_TOKENS + 136, long_tokens=100, max_num_long=3)
    for i, key in enumerate(("a", "b")):
        s.add(request(key, range(110), 2, arrival_s=i, prompt_logprobs=0))
    s.add(request("plain", range(150), 2, arrival_s=2))
    assert advance(s) == {"a": SCORED_TOKENS, "b": 1, "plain": 102}  # who starts gets a token in any case


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"max_long_partial_prefills": 2}, ["--max-long-partial-prefills", "--long-prefill-token-threshold"]),
        (
            {"long_prefill_token_threshold": 128, "max_long_partial_prefills": 2, "max_num_batched_tokens": 256},
            ["--long-prefill-token-threshold", "256"],
        ),
        ({"priority_aging_s": 5.0}, ["--priority-aging-s", "--scheduling-policy priority"]),
        ({"sjf_aging_rate": 5.0, "scheduling_policy": "fair"}, ["--sjf-aging-rate", "--scheduling-policy sjf"]),
    ],
)
def test_bad_combinations_are_refused_by_name(options: dict[str, object], names: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        EngineConfig(**options)  # type: ignore[arg-type]
    assert all(name in refusal.value.message for name in names)


def test_a_measured_budget_too_small_for_the_threshold_is_refused() -> None:
    config = EngineConfig(long_prefill_token_threshold=128)
    config.check_token_budget(129)
    with pytest.raises(ConfigError, match="--long-prefill-token-threshold"):
        config.check_token_budget(128)


def test_nothing_is_dealt_to_a_sequence_that_has_all_it_wants() -> None:
    seq = Sequence(request("a", range(4)), (0.0,), 256, False, False)
    seq.num_computed = seq.goal
    with pytest.raises(AssertionError, match="wants 0 tokens"):
        Chunks(SchedulerLimits(page_size=4, max_num_seqs=1, max_num_batched_tokens=8, max_model_len=256), 0).deal(
            seq, 1
        )


def test_a_scored_token_takes_two_of_the_budget() -> None:
    s = scheduler(budget=12)
    s.add(request("scored", range(40), 2, arrival_s=0, prompt_logprobs=0))
    assert advance(s) == {"scored": 6}
    s.add(request("plain", range(8), 2, arrival_s=1))
    assert [advance(s) for _ in range(2)] == [{"scored": 6}, {"scored": 6}]  # older: it goes first
    assert SCORED_COST == 2
    narrow = scheduler(num_seqs=1, budget=1)
    narrow.add(request("scored", range(3), 2, prompt_logprobs=0))
    assert advance(narrow) == {"scored": 1}


def test_beside_decodes_a_token_takes_more_of_the_budget_the_more_are_before_it() -> None:
    s = scheduler(budget=13, context_unit=12)
    s.add(request("decode", [1], 60, arrival_s=0))
    advance(s)
    s.add(request("prompt", range(60), 2, arrival_s=1))
    assert [advance(s)["prompt"] for _ in range(5)] == [12, 6, 4, 4, 3]  # 12 // 1, 12 // 2, 12 // 2.5 and so on
    s.abort("decode")
    assert [advance(s) for _ in range(2)] == [{"prompt": 13}] * 2  # nobody waits for the step


def test_however_long_the_context_a_prompt_gets_on() -> None:
    s = scheduler(budget=8, context_unit=0.01, long_tokens=4)
    s.add(request("decode", [1], 100, arrival_s=0))
    advance(s)
    s.add(request("prompt", range(20), 1, arrival_s=1))
    dealt = [advance(s)["prompt"] for _ in range(14)]
    assert dealt == [7] + [1] * 13


@given(
    budget=st.integers(1, 40),
    unit=st.one_of(st.just(math.inf), st.floats(0.1, 100)),
    prompts=st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=6),
    long_tokens=st.one_of(st.none(), st.integers(1, 20)),
)
def test_every_prompt_is_computed_and_no_step_takes_much_more_than_its_budget(
    budget: int, unit: float, prompts: list[tuple[int, bool]], long_tokens: int | None
) -> None:
    s = scheduler(budget=budget, context_unit=unit, long_tokens=long_tokens)
    s.add(request("decode", [1], 250, arrival_s=0))
    advance(s)
    for i, (num, scored) in enumerate(prompts):
        s.add(request(f"p{i}", range(num), 1, arrival_s=1 + i, prompt_logprobs=0 if scored else None))
    left, sizes = {}, {f"p{i}": num for i, (num, _) in enumerate(prompts)}
    for _ in range(sum(sizes.values())):
        dealt = advance(s)
        dealt.pop("decode")
        costs = {key: 1 + (sizes[key] - left[key]) / unit for key in dealt if left.get(key, 0) > 1}  # else: as a decode
        total = sum(cost * dealt[key] for key, cost in costs.items())
        assert total <= max(budget - 1, min(4, budget)) + max(costs.values(), default=0)
        for key, num in dealt.items():
            left[key] = left.get(key, sizes[key]) - num
        if left.keys() == sizes.keys() and not any(left.values()):
            break
    assert not any(left.values())


@pytest.mark.parametrize("page_size", [1, 16, 512])
def test_decodes_that_fill_the_budget_leave_prompts_the_least_whatever_the_page_size(page_size: int) -> None:
    limits = SchedulerLimits(page_size=page_size, max_num_seqs=64, max_num_batched_tokens=64, max_model_len=1024)
    assert Chunks(limits, 64).left == LEAST_TOKENS
    assert Chunks(limits, 40).left == 24
    small = SchedulerLimits(page_size=page_size, max_num_seqs=8, max_num_batched_tokens=8, max_model_len=1024)
    assert Chunks(small, 8).left == 8
