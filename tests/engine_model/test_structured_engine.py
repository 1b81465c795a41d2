"""Structured outputs in an engine: a tiny random model with the built-in model's tokens."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest

from pdserve import LLM, SamplingParams, StructuredOutputs
from pdserve.core.errors import RequestError
from pdserve.core.request import FinishReason
from pdserve.engine.llm import Completion
from pdserve.engine.scheduler import Scheduler
from tests.engine_model.structures import tiny_model

PATTERN = r"(a\d){20}"
SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["x", "yy"]}},
    "required": ["id", "kind"],
    "additionalProperties": False,
}
FORMS = [StructuredOutputs(regex=PATTERN), StructuredOutputs(json=SCHEMA), StructuredOutputs(choice=("ja", "nein"))]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def make(directory: Path, num_pages: int) -> LLM:
    return LLM(directory, page_size=4, num_pages=num_pages, max_num_batched_tokens=16, max_num_seqs=8)


@pytest.fixture(scope="module")
def small(directory: Path) -> LLM:
    return make(directory, 50)


def run(llm: LLM) -> list[Completion]:
    """Every form twice, greedy and drawn, beside sequences without a form."""
    sampling = [
        SamplingParams(structured_outputs=form, temperature=temperature, seed=i, max_tokens=90)
        for i, form in enumerate([*FORMS, FORMS[0]])
        for temperature in (0.0, 1.0)
    ]
    free = SamplingParams(temperature=1.0, seed=9, max_tokens=20, ignore_eos=True)
    return llm.generate([[5 + i, 6, 7, 8, 9] for i in range(len(sampling) + 1)], [*sampling, free])


def test_a_mixed_batch_has_the_forms_and_preemption_changes_nothing(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roomy = run(make(directory, 200))
    for form, done in zip([f for f in [*FORMS, FORMS[0]] for _ in range(2)], roomy, strict=False):
        assert done.finish_reason is FinishReason.STOP, done
        if form.regex:
            assert re.fullmatch(form.regex, done.text)
        elif form.choice:
            assert done.text in form.choice
        else:
            jsonschema.validate(json.loads(done.text), SCHEMA)
    assert len(roomy[-1].token_ids) == 20
    preempted: list[int] = []
    plain = Scheduler._preempt

    def preempt(self: Scheduler, seq: object) -> None:
        preempted.append(len(seq.tokens) - seq.num_prompt)  # type: ignore[attr-defined]
        plain(self, seq)  # type: ignore[arg-type]

    monkeypatch.setattr(Scheduler, "_preempt", preempt)
    tight = run(make(directory, 25))
    assert any(n > 1 for n in preempted), "nothing was preempted in the middle of an output"
    assert [c.token_ids for c in tight] == [c.token_ids for c in roomy]


def test_a_bad_schema_is_refused_and_the_next_request_works(small: LLM) -> None:
    llm = small
    for bad, word in ((StructuredOutputs(json={"type": "bogus"}), "bogus"), (StructuredOutputs(regex="("), "unclosed")):
        with pytest.raises(RequestError, match=word) as e:
            llm.generate([5], SamplingParams(structured_outputs=bad))
        assert e.value.status == "INVALID_ARGUMENT"
    [done] = llm.generate([5], SamplingParams(structured_outputs=FORMS[2], seed=1))
    assert done.text in ("ja", "nein")


@pytest.mark.parametrize(
    "nothing",
    [
        StructuredOutputs(regex=r"[^\s\S]"),
        StructuredOutputs(regex=r"a[^\s\S]b"),
        StructuredOutputs(grammar="root ::= root"),
        StructuredOutputs(json={"$ref": "#"}),
    ],
    ids=lambda form: form.field,
)
def test_a_form_that_no_text_has_is_refused_before_anything_is_computed(small: LLM, nothing: StructuredOutputs) -> None:
    step = small._built.core._scheduler.step
    with pytest.raises(RequestError, match=rf"'structured_outputs\.{nothing.field}': no text satisfies it$"):
        small.generate([5], SamplingParams(structured_outputs=nothing))
    assert small._built.core._scheduler.step == step and not small._open


def test_max_tokens_cuts_a_form_off(small: LLM) -> None:
    [done] = small.generate([5], SamplingParams(structured_outputs=FORMS[0], seed=1, max_tokens=7))
    assert done.finish_reason is FinishReason.LENGTH and re.fullmatch(r"(a\d)*a?", done.text)


def test_the_fake_runner_refuses_by_name() -> None:
    llm = LLM(runner="fake", num_pages=8, max_num_batched_tokens=8, max_num_seqs=8)
    with pytest.raises(RequestError, match="structured_outputs"):
        llm.generate([5], SamplingParams(structured_outputs=FORMS[0]))
