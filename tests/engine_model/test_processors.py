"""Penalties and constraints on logits, against their definitions, and through an engine that preempts and retries."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.errors import RequestError
from pdserve.core.sampling import SamplingParams
from pdserve.engine.processors import standard_processors
from pdserve.engine.sampler import sample
from pdserve.engine.step import SampledToken, SamplingFailure, ScheduledSequence
from tests.engine_model.models import FAMILIES, VOCAB_SIZE, engine_run, make_model, served

EOS = frozenset({0, 3})
VOCAB = 12
WORDS = {
    "ab": [4, 5],
    " ab": [6],
    "c": [7],
    " c": [7],
    "xyz": [8, 9, 10],
    " xyz": [11, 8, 9, 10],
    "none": [],
    " none": [],
}


def row(known: Sequence[int], num_prompt: int, **params: object) -> ScheduledSequence:
    sampling = SamplingParams(**{"temperature": 0.0, **params})  # type: ignore[arg-type]
    return ScheduledSequence("", 0, [0], [0], sampling, len(known) - num_prompt, list(known), num_prompt)


def edited(logits: torch.Tensor, item: ScheduledSequence) -> torch.Tensor:
    """The logits after all processors that the row asks for."""
    assert item.sampling is not None
    logits = logits.clone()
    for processor in standard_processors(EOS, WORDS.__getitem__, torch.device("cpu")):
        if processor.wants(item.sampling):
            assert processor.edit(logits, item) is None
    return logits


def forbidden(item: ScheduledSequence) -> set[int]:
    return set(torch.nonzero(edited(torch.zeros(VOCAB), item) == -math.inf).flatten().tolist())


def by_definition(logits: list[float], item: ScheduledSequence) -> list[float]:
    """Bias, repetition, frequency, presence: one token at a time."""
    params, output, result = item.sampling, list(item.known[item.num_prompt :]), []
    assert params is not None
    for token, logit in enumerate(logits):
        logit += (params.logit_bias or {}).get(token, 0.0)
        if token in item.known:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.frequency_penalty * output.count(token)
        result.append(logit - params.presence_penalty * (token in output))
    return result


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=8)
numbers = st.floats(-30, 30, width=32)


@settings(max_examples=40, deadline=None)
@given(
    logits=st.lists(numbers, min_size=VOCAB, max_size=VOCAB),
    prompt=tokens.filter(bool),
    output=tokens,
    bias=st.dictionaries(st.integers(0, VOCAB - 1), numbers),
    repetition=st.floats(0.1, 5),
    frequency=st.floats(-2, 2),
    presence=st.floats(-2, 2),
)
def test_penalties_and_bias_are_their_definitions(
    logits: list[float],
    prompt: list[int],
    output: list[int],
    bias: dict[int, float],
    repetition: float,
    frequency: float,
    presence: float,
) -> None:
    item = row(
        prompt + output,
        len(prompt),
        logit_bias=bias,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
    )
    expected = torch.tensor(by_definition(logits, item))
    torch.testing.assert_close(edited(torch.tensor(logits), item), expected, rtol=1e-5, atol=1e-4)


def test_a_tiny_repetition_penalty_leaves_a_token_to_choose() -> None:
    assert sample(
        torch.tensor([[1.0, 9.0, 2.0]]),
        [row([1], 1, repetition_penalty=1e-39)],
        standard_processors(EOS, WORDS.__getitem__, torch.device("cpu")),
    ) == [SampledToken(1)]


def test_what_constraints_forbid() -> None:
    assert forbidden(row([1], 1, allowed_token_ids=[2, 5])) == set(range(VOCAB)) - {2, 5}
    assert forbidden(row([1, 2], 1, min_tokens=2, stop_token_ids=[9])) == {0, 3, 9}
    assert forbidden(row([1, 2, 2], 1, min_tokens=2, stop_token_ids=[9])) == set()
    assert forbidden(row([1, 2], 1, min_tokens=2, ignore_eos=True)) == {0, 3}
    assert forbidden(row([1], 1, allowed_token_ids=[0, 5], min_tokens=1)) == set(range(VOCAB)) - {5}


def test_bad_words_are_not_completed_with_or_without_a_space() -> None:
    words = ["ab", "xyz", "c"]
    assert forbidden(row([1], 1, bad_words=words)) == {6, 7}
    assert forbidden(row([1, 4], 1, bad_words=words)) == {5, 6, 7}
    assert forbidden(row([1, 8, 9], 1, bad_words=words)) == {6, 7, 10}
    assert forbidden(row([1, 9, 8], 1, bad_words=words)) == {6, 7}
    # What the prompt began is not the output's word.
    assert forbidden(row([1, 4], 2, bad_words=words)) == {6, 7}
    assert forbidden(row([8, 9], 1, bad_words=words)) == {6, 7}


def test_a_word_that_the_vocabulary_cannot_spell_fails_its_request_alone() -> None:
    rows = [row([1], 1, bad_words=["none"]), row([1], 1, bad_words=["c"])]
    bad, good = sample(torch.zeros(2, VOCAB), rows, standard_processors(EOS, WORDS.__getitem__, torch.device("cpu")))
    assert isinstance(bad, SamplingFailure) and bad.status == "INVALID_ARGUMENT" and "bad_words" in bad.message
    assert isinstance(good, SampledToken)


def test_nothing_left_to_choose_fails_that_row_alone() -> None:
    rows = [row([1], 1, allowed_token_ids=[0, 3], min_tokens=1), row([1], 1, min_tokens=1)]
    bad, good = sample(torch.zeros(2, VOCAB), rows, standard_processors(EOS, WORDS.__getitem__, torch.device("cpu")))
    assert isinstance(bad, SamplingFailure) and bad.reason == "NO_TOKEN_LEFT"
    assert good == SampledToken(1)


def test_preemption_retry_and_neighbours_change_nothing() -> None:
    """Nothing but the tokens is kept between steps: cramped, in small chunks, or continued elsewhere it is the same."""
    prompts = [[5, 6, 7, 8, 9, 5, 6], [1, 2, 3], [11, 12, 13, 14, 15, 16, 17, 18, 19]]
    words = {"w": [21, 22], " w": [23], "v": [30], " v": [31]}
    make = [
        {"repetition_penalty": 1.4, "frequency_penalty": 0.7},
        {"presence_penalty": 2.0, "bad_words": ["w", "v"], "min_tokens": 5},
        {"allowed_token_ids": range(10, 60), "frequency_penalty": 2.0, "logit_bias": {40: 3.0, 41: -100.0}},
    ]
    sampling = [
        SamplingParams(temperature=1.0 if i else 0.0, seed=i, max_tokens=14, logprobs=0, **m)
        for i, m in enumerate(make)
    ]
    loaded = served(make_model(*FAMILIES["llama"]))

    def run(*which: int, emitted: Sequence[Sequence[int]] = ((), (), ()), **more: int) -> list[list[int]]:
        processors = standard_processors(frozenset({4}), words.__getitem__, torch.device("cpu"))
        results = engine_run(
            loaded,
            [prompts[i] for i in which],
            [sampling[i] for i in which],
            emitted=[emitted[i] for i in which],
            processors=processors,
            **more,
        )
        return [r[0] for r in results]

    alone = [run(i)[0] for i in range(3)]
    assert run(0, 1, 2) == alone
    assert run(0, 1, 2, num_pages=10, budget=4) == alone
    for cut in (1, 9):
        emitted = [a[:cut] for a in alone]
        assert run(2, 0, 1, emitted=emitted) == [alone[i][cut:] for i in (2, 0, 1)]
    plain = engine_run(loaded, prompts, [SamplingParams(temperature=0.0, max_tokens=14, logprobs=0)] * 3)
    assert all(tokens != alone[i] for i, (tokens, _) in enumerate(plain))
    assert set(alone[2]) <= set(range(10, 60)) - {41} and VOCAB_SIZE > 60


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 2.1),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("min_tokens", -1),
        ("min_tokens", 9),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", range(70_000)),
        ("bad_words", [""]),
        ("bad_words", [" "]),
        ("bad_words", ["x" * 257]),
        ("bad_words", ["x"] * 129),
    ],
)
def test_bad_values_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"'{field}'"):
        SamplingParams(max_tokens=8, **{field: value})  # type: ignore[arg-type]


def test_bias_is_clamped() -> None:
    assert SamplingParams(logit_bias={1: 1e9, 2: -math.inf, 3: 0.5}).logit_bias == {1: 100.0, 2: -100.0, 3: 0.5}
    assert SamplingParams(logit_bias={}).logit_bias is None
