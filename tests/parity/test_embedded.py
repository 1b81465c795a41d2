"""The embedded engine on the real model in fp32 against transformers' `generate`, token for token."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pdserve import LLM, SamplingParams, StructuredOutputs
from pdserve.core.hashing import choice_seed
from pdserve.engine.model_store import BUILT_IN_MODEL
from tests.engine_model.structures import schemas
from tests.parity.prompts import PAGE_SIZE
from tests.parity.reference import Reference, assert_parity, generate, references

PET_CHAT = [{"role": "user", "content": "Describe a pet as JSON."}]
PET = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 30}},
    "required": ["kind", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    # A small budget cuts the longer prompts into chunks beside decodes.
    return LLM(model=BUILT_IN_MODEL, dtype="float32", page_size=PAGE_SIZE, num_pages=400, max_num_batched_tokens=128)


@pytest.mark.timeout(300)
def test_greedy_equals_generate(expected: list[Reference], llm: LLM) -> None:
    sampling = [SamplingParams(temperature=0.0, max_tokens=r.prompt.max_tokens) for r in expected]
    outputs = llm.generate([r.prompt.prompt for r in expected], sampling)
    assert [o.prompt_token_ids for o in outputs] == [r.prompt.token_ids for r in expected]
    assert_parity(expected, [o.token_ids for o in outputs])


@pytest.mark.timeout(300)
def test_seeded_sampling_alone_equals_a_batch(expected: list[Reference], llm: LLM) -> None:
    prompts = [r.prompt.prompt for r in expected[:16]]
    sampling = [SamplingParams(temperature=0.9, top_p=0.95, top_k=200, seed=i, max_tokens=6) for i in range(16)]
    together = llm.generate(prompts, sampling[: len(prompts)])
    assert len({o.token_ids for o in together}) == len(prompts) > 10
    for i in range(0, len(prompts), 5):
        assert llm.generate([prompts[i]], sampling[i])[0].token_ids == together[i].token_ids


@pytest.mark.timeout(300)
def test_turns_of_a_conversation_say_the_same_with_and_without_reuse(llm: LLM) -> None:
    """A salt of its own makes a request compute all of its prompt."""
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    messages = [{"role": "user", "content": "Name three rivers of Europe and the seas that they flow into."}]
    num_known = 0
    for turn, question in enumerate(["Which one is the longest?", "And the shortest?", ""]):
        [reused] = llm.generate([messages], sampling)
        [computed] = llm.generate([messages], sampling, cache_salt=f"turn {turn}")
        assert reused.token_ids == computed.token_ids
        assert computed.usage.cached_tokens == 0
        cached = reused.usage.cached_tokens
        # Whole pages of what was known before, unless the template writes the answer down in other tokens.
        assert cached % PAGE_SIZE == 0 and (not turn or num_known - 9 - PAGE_SIZE <= cached <= num_known)
        num_known = len(reused.prompt_token_ids) + 8
        answer = {"role": "assistant", "content": reused.text}
        messages = [*messages, answer, {"role": "user", "content": question}]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_tokens", [2 * PAGE_SIZE, 3 * PAGE_SIZE - 1])  # a full last page, and one without a token
def test_n_choices_are_what_requests_with_their_seeds_give(
    expected: list[Reference], llm: LLM, num_tokens: int
) -> None:
    prompt = next(r.prompt.token_ids for r in expected if len(r.prompt.token_ids) > num_tokens)[:num_tokens]
    several = SamplingParams(temperature=1.2, seed=11, max_tokens=6, n=3, logprobs=0)
    seeds = [choice_seed(11, i) for i in range(3)]
    alone = llm.generate([prompt] * 3, [replace(several, n=1, seed=seed) for seed in seeds])
    [together] = llm.generate(prompt, several)
    assert [c.token_ids for c in together.choices] == [a.token_ids for a in alone]
    assert [c.text for c in together.choices] == [a.text for a in alone]
    assert len({c.token_ids for c in together.choices}) == 3
    for choice, single in zip(together.choices, alone, strict=True):
        ours, theirs = ([p.chosen.logprob for p in of.logprobs] for of in (choice, single))
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert together.usage.prompt_tokens == num_tokens


def test_choices_share_the_full_pages_of_their_prompt(expected: list[Reference], llm: LLM) -> None:
    prompt = next(r.prompt.token_ids for r in expected if len(r.prompt.token_ids) > 4 * PAGE_SIZE)[: 4 * PAGE_SIZE - 2]
    load = llm._built.core.load
    stream = llm.stream(prompt, SamplingParams(temperature=1.0, seed=5, max_tokens=30, n=4))
    while next(stream).choice < 3:
        pass
    assert load().num_pages - load().num_free_pages == 3 + 4
    stream.close()
    llm.generate([1], SamplingParams(max_tokens=1))
    llm._built.core.check()
    assert load().num_free_pages == load().num_pages


def test_a_known_answer(llm: LLM) -> None:
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    deltas = list(llm.stream(chat, SamplingParams(temperature=0.0, max_tokens=20)))
    assert "".join(d.text for d in deltas) == "The capital of France is Paris."
    assert deltas[-1].finish_reason == "stop"


@pytest.mark.timeout(900)
def test_the_reference_is_what_transformers_gives(expected: list[Reference]) -> None:
    again = expected if len(expected) == len(references()) else expected[::4]
    assert_parity(again, [r.token_ids for r in generate([r.prompt for r in again])])


def structured(temperature: float, seed: int = 5, **form: object) -> SamplingParams:
    constraint = StructuredOutputs(**form)  # type: ignore[arg-type]
    return SamplingParams(structured_outputs=constraint, temperature=temperature, seed=seed, max_tokens=600)


def test_the_model_answers_in_the_form(llm: LLM) -> None:
    pattern = r"[A-Z][a-z]{2,5}, \d{1,2}"
    forms = [structured(0.0, json=PET), structured(1.0, json=PET), structured(1.0, regex=pattern)]
    done = llm.generate([PET_CHAT] * 3, forms)
    for pet in done[:2]:
        jsonschema.validate(json.loads(pet.text), PET)
    assert re.fullmatch(pattern, done[2].text)
    assert all(c.finish_reason == "stop" for c in done)


@pytest.mark.slow
@pytest.mark.timeout(900)
@given(schemas, st.integers(0, 2**32), st.sampled_from([0.0, 1.0]))
@settings(
    max_examples=12, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
def test_the_model_gives_valid_instances_of_random_schemas(
    llm: LLM, schema: dict[str, object], seed: int, temperature: float
) -> None:
    [done] = llm.generate([PET_CHAT], structured(temperature, seed, json=schema))
    if done.finish_reason == "stop":  # a number may have digits without end: then it is cut off
        jsonschema.validate(json.loads(done.text), schema)
    else:
        assert done.usage.completion_tokens == 600
