"""Sampling parameters on the real model in fp32 against transformers' `generate`, token for token."""

from __future__ import annotations

import pytest

from pdserve import LLM, SamplingParams
from pdserve.engine.llm import Completion
from pdserve.engine.model_store import BUILT_IN_MODEL
from tests.parity.features import CASES, NUM_TOKENS, Case, Expected, expected, generate
from tests.parity.reference import Reference, assert_parity, references


def params(case: Case) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=0, prompt_logprobs=0, **case.sampling)


@pytest.fixture(scope="module")
def everything() -> tuple[list[Completion], list[Completion], list[Reference]]:
    """32 requests at once, the cases and plain prompts: prompts in chunks, and a pool too small: some are swapped."""
    plain = [r for r in references() if len(r.prompt.token_ids) < 64][: 32 - len(CASES)]
    llm = LLM(
        model=BUILT_IN_MODEL,
        dtype="float32",
        page_size=1,  # so that outputs need pages again and again
        num_pages=260,
        max_num_batched_tokens=64,
        max_num_seqs=32,
        preemption_mode="swap",
        swap_space_bytes=16 << 20,
    )
    more = [SamplingParams(temperature=0.0, max_tokens=r.prompt.max_tokens) for r in plain]
    done = llm.generate([*(c.prompt for c in CASES), *(r.prompt.prompt for r in plain)], [*map(params, CASES), *more])
    preempted = llm._built.core.load().preemptions
    assert preempted.num_swaps, preempted
    return done[: len(CASES)], done[len(CASES) :], plain


@pytest.fixture(scope="module")
def outputs(everything: tuple[list[Completion], list[Completion], list[Reference]]) -> list[Completion]:
    """Those of the cases."""
    return everything[0]


@pytest.mark.timeout(300)
def test_plain_prompts_beside_them_are_not_touched(
    everything: tuple[list[Completion], list[Completion], list[Reference]],
) -> None:
    _, plain, expected = everything
    assert len(plain) == 12
    assert_parity(expected, [p.token_ids for p in plain])


@pytest.mark.timeout(300)
def test_tokens_equal_those_of_generate(outputs: list[Completion]) -> None:
    for case, want, got in zip(CASES, expected(), outputs, strict=True):
        assert list(got.token_ids) == want.token_ids, case.name


def test_logprobs_are_those_of_the_model_before_any_edit(outputs: list[Completion]) -> None:
    for case, want, got in zip(CASES, expected(), outputs, strict=True):
        assert [p.chosen.logprob for p in got.logprobs] == pytest.approx(want.logprobs, abs=1e-4), case.name


def test_prompt_logprobs_are_those_of_the_model(outputs: list[Completion]) -> None:
    for case, want, got in zip(CASES, expected(), outputs, strict=True):
        first, *others = got.prompt_logprobs
        assert first is None
        assert [p.chosen.token_id for p in others if p] == list(got.prompt_token_ids[1:])
        assert [p.chosen.logprob for p in others if p] == pytest.approx(want.prompt_logprobs, abs=1e-4), case.name


def same(a: list[Expected], b: list[Expected]) -> None:
    assert [e.token_ids for e in a] == [e.token_ids for e in b]
    for one, other in zip(a, b, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert one.prompt_logprobs == pytest.approx(other.prompt_logprobs, abs=1e-4)


@pytest.mark.timeout(300)
def test_the_kept_outputs_are_what_transformers_gives() -> None:
    same(generate(CASES[-1:]), expected()[-1:])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_kept_outputs_are_what_transformers_gives() -> None:
    same(generate(CASES), expected())
