from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.sampling import SamplingParams
from pdserve.engine.sampler import filtered_probabilities, position_logprobs, prompt_logprobs
from pdserve.engine.sampler import sample as sample_rows
from pdserve.engine.step import PromptPositions, SampledToken, SamplingFailure, ScheduledSequence

GREEDY = SamplingParams(temperature=0.0)
LOGITS = torch.log(torch.tensor([0.1, 0.4, 0.2, 0.3]))


def sample(logits: torch.Tensor, params: list[SamplingParams], indices: list[int]) -> list:
    """Samples rows of sequences with one prompt token that ask nothing but these parameters."""
    rows = [ScheduledSequence("", 0, [0], [], p, i, [0] * (i + 1), 1) for p, i in zip(params, indices, strict=True)]
    return sample_rows(logits, rows, ())


def kept(params: SamplingParams, logits: torch.Tensor = LOGITS) -> list[int]:
    return torch.nonzero(filtered_probabilities(logits, params)).flatten().tolist()


def test_greedy_takes_the_likeliest_and_the_first_of_equals() -> None:
    rows = torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.0, 1.0]])
    assert [t.token_id for t in sample(rows, [GREEDY, GREEDY], [0, 5])] == rows.argmax(-1).tolist() == [1, 0]


def test_filters() -> None:
    assert kept(SamplingParams(top_k=2)) == [1, 3]
    assert kept(SamplingParams(top_k=9)) == [0, 1, 2, 3]
    assert kept(SamplingParams(top_p=0.39)) == [1]
    assert kept(SamplingParams(top_p=0.65)) == [1, 3]
    assert kept(SamplingParams(top_p=0.75)) == [1, 2, 3]
    assert kept(SamplingParams(min_p=0.6)) == [1, 3]
    # top_p counts what the others left: 0.4 of 0.7 is less than 0.6.
    assert kept(SamplingParams(top_k=2, top_p=0.6)) == [1, 3]
    assert kept(SamplingParams(top_k=2, top_p=0.5)) == [1]


def test_equals_at_the_border_stay_by_id() -> None:
    assert kept(SamplingParams(top_k=2), torch.zeros(5)) == [0, 1]


@settings(max_examples=60)
@given(
    logits=st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40),
    temperature=st.sampled_from([1e-3, 0.5, 1.0, 5.0]),
    top_k=st.integers(0, 8),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**64 - 1),
    index=st.integers(0, 5),
)
def test_what_is_drawn_was_kept_and_does_not_depend_on_the_batch(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int, index: int
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    row = torch.tensor(logits)
    alone = sample(row[None], [params], [index])[0].token_id
    assert filtered_probabilities(row, params)[alone] > 0
    if top_k:
        assert len(kept(params, row)) <= top_k
    other = SamplingParams(temperature=1.0, seed=1)
    batch = torch.stack([row.flip(0), row, row * 2])
    assert sample(batch, [other, params, GREEDY], [3, index, 0])[1].token_id == alone


def test_draws_follow_the_distribution() -> None:
    num = 4000
    params = [SamplingParams(temperature=1.0, seed=s) for s in range(num)]
    counts = Counter(t.token_id for t in sample(LOGITS.expand(num, -1), params, [0] * num))
    for token, probability in enumerate(torch.exp(LOGITS).tolist()):
        spread = math.sqrt(num * probability * (1 - probability))
        assert abs(counts[token] - num * probability) < 5 * spread


def test_temperature_sharpens_and_each_index_has_its_own_noise() -> None:
    num = 200
    cold = [SamplingParams(temperature=0.01, seed=s) for s in range(num)]
    assert {t.token_id for t in sample(LOGITS.expand(num, -1), cold, [0] * num)} == {1}
    warm = [SamplingParams(temperature=1.0, seed=0)] * num
    assert {t.token_id for t in sample(LOGITS.expand(num, -1), warm, list(range(num)))} == {0, 1, 2, 3}


def test_logprobs_are_those_before_temperature_and_filters() -> None:
    params = SamplingParams(temperature=0.2, top_k=1, seed=0, logprobs=2)
    logprobs = sample(LOGITS[None], [params], [0])[0].logprobs
    assert logprobs is not None
    assert [(t.token_id, t.rank) for t in logprobs.top] == [(1, 1), (3, 2)]
    assert [math.exp(t.logprob) for t in logprobs.top] == pytest.approx([0.4, 0.3])
    assert position_logprobs(LOGITS, 0, 0).chosen.rank == 4
    assert position_logprobs(LOGITS, 0, 0).top == ()


def test_equal_logprobs_are_ranked_by_id() -> None:
    logprobs = position_logprobs(torch.zeros(300), 2, 4)
    assert logprobs.chosen.rank == 3
    assert [(t.token_id, t.rank) for t in logprobs.top] == [(0, 1), (1, 2), (2, 3), (3, 4)]


@pytest.mark.parametrize("num_top", [0, 1, 5, 300])
@pytest.mark.parametrize("levels", [3, 40, 10**6])  # many equals, some at the border, none
def test_a_prompts_logprobs_are_those_of_each_position_alone(levels: int, num_top: int) -> None:
    torch.manual_seed(levels)
    logits = torch.randint(levels, (41, 300)) * (8 / levels)
    tokens = torch.randint(300, (43,)).tolist()
    plain = ScheduledSequence("plain", 0, tokens[:3], [], None, 0, tokens[:3], 3)
    rows = [
        plain,
        *(replace(plain, known=tokens[at:], prompt=PromptPositions(1, num, num_top)) for at, num in ((0, 38), (38, 3))),
    ]
    told = prompt_logprobs(logits, rows)
    assert {at: len(positions) for at, positions in told.items()} == {1: 38, 2: 3}
    exact = torch.log_softmax(logits.double(), dim=1).tolist()
    predicted = [*tokens[1:39], *tokens[39:42]]
    for row, token, position in zip(exact, predicted, [*told[1], *told[2]], strict=True):
        best = sorted(range(300), key=lambda i: (-round(row[i], 9), i))
        assert (position.chosen.token_id, position.chosen.rank) == (token, 1 + best.index(token))
        assert [(t.token_id, t.rank) for t in position.top] == [(t, i) for i, t in enumerate(best[:num_top], 1)]
        for t in (position.chosen, *position.top):
            assert t.logprob == pytest.approx(row[t.token_id], abs=1e-5)


@pytest.mark.parametrize("temperature", [1e-320, 1e-300, 1e-9])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.9, top_k=3, min_p=0.1, seed=0)
    assert sample(LOGITS[None] * 1e4, [params], [0])[0].token_id == 1


def by_full_sort(logits: torch.Tensor, params: SamplingParams) -> set[int]:
    """What min_p, top_k and top_p keep, by their definitions."""
    probs = torch.softmax(logits.double() / params.temperature, dim=0).tolist()
    best_first = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    border = params.min_p * max(probs)
    best_first = [i for i in best_first if probs[i] >= border][: params.top_k or None]
    total, before, kept = math.fsum(probs[i] for i in best_first), 0.0, set()
    for i in best_first:
        if before < params.top_p * total:
            kept.add(i)
        before += probs[i]
    return kept


@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])  # a nucleus of nearly all tokens, of many, of few
@pytest.mark.parametrize(
    "filters", [{"top_k": 50}, {"top_p": 0.9}, {"top_k": 3000, "top_p": 0.9}, {"min_p": 0.05, "top_p": 0.7}]
)
def test_filters_keep_what_a_full_sort_of_a_large_vocabulary_keeps(spread: float, filters: dict[str, float]) -> None:
    logits = torch.randn(20_000, generator=torch.Generator().manual_seed(0)) * spread
    logits = torch.round(logits * 64) / 64  # many equals
    params = SamplingParams(temperature=0.7, **filters)  # type: ignore[arg-type]
    assert not set(kept(params, logits)) ^ by_full_sort(logits, params)


@pytest.mark.parametrize("row", [[0.0, math.nan], [0.0, math.inf], [-math.inf, -math.inf]])
def test_a_row_without_a_finite_maximum_fails_alone(row: list[float]) -> None:
    good, bad = sample(torch.tensor([[0.0, 1.0], row]), [GREEDY, GREEDY], [0, 0])
    assert good == SampledToken(1)
    assert isinstance(bad, SamplingFailure) and bad.reason == "BAD_LOGITS" and bad.kv_suspect


def test_a_token_with_logit_minus_infinity_is_never_drawn() -> None:
    params = [SamplingParams(temperature=5.0, seed=s) for s in range(50)]
    assert {t.token_id for t in sample(torch.tensor([[0.0, -math.inf]]).expand(50, -1), params, [0] * 50)} == {0}
