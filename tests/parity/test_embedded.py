"""The embedded engine on the real model in fp32 against transformers' `generate`, token for token."""

from __future__ import annotations

import pytest

from pdserve import LLM, SamplingParams
from pdserve.engine.model_store import BUILT_IN_MODEL
from tests.parity.prompts import PAGE_SIZE
from tests.parity.reference import Reference, assert_parity, generate, references


@pytest.fixture(scope="module")
def expected() -> list[Reference]:
    return references()


@pytest.fixture(scope="module")
def llm() -> LLM:
    # A small budget cuts the longer prompts into chunks beside decodes.
    return LLM(model=BUILT_IN_MODEL, dtype="float32", page_size=PAGE_SIZE, num_pages=400, max_num_batched_tokens=128)


@pytest.mark.timeout(300)
def test_greedy_equals_generate(expected: list[Reference], llm: LLM) -> None:
    assert len(expected) >= 40
    sampling = [SamplingParams(temperature=0.0, max_tokens=r.prompt.max_tokens) for r in expected]
    outputs = llm.generate([r.prompt.prompt for r in expected], sampling)
    assert [o.prompt_token_ids for o in outputs] == [r.prompt.token_ids for r in expected]
    assert_parity(expected, [o.token_ids for o in outputs])


@pytest.mark.timeout(300)
def test_seeded_sampling_alone_equals_a_batch_of_16(expected: list[Reference], llm: LLM) -> None:
    prompts = [r.prompt.prompt for r in expected[:16]]
    sampling = [SamplingParams(temperature=0.9, top_p=0.95, top_k=200, seed=i, max_tokens=6) for i in range(16)]
    together = llm.generate(prompts, sampling)
    assert len({o.token_ids for o in together}) == 16
    for i in range(0, 16, 3):
        assert llm.generate([prompts[i]], sampling[i])[0].token_ids == together[i].token_ids


def test_a_known_answer(llm: LLM) -> None:
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    deltas = list(llm.stream(chat, SamplingParams(temperature=0.0, max_tokens=20)))
    assert "".join(d.text for d in deltas) == "The capital of France is Paris."
    assert deltas[-1].finish_reason == "stop"


def test_the_reference_is_what_transformers_gives(expected: list[Reference]) -> None:
    some = expected[3:50:12]
    assert_parity(some, [r.token_ids for r in generate([r.prompt for r in some])])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_reference_is_what_transformers_gives(expected: list[Reference]) -> None:
    assert_parity(expected, [r.token_ids for r in generate([r.prompt for r in expected])])
