"""What form an output may be asked to have, and what is refused before any worker hears of it."""

from __future__ import annotations

import json

import pytest

from pdserve.client.convert import generate_request
from pdserve.core.errors import RequestError, UnimplementedError
from pdserve.core.sampling import SamplingParams
from pdserve.core.sampling_proto import sampling_from_proto, sampling_to_proto
from pdserve.core.structured import MAX_CHOICES, MAX_REGEX_CHARS, StructuredOutputs, check_structured
from pdserve.core.tokenizer import Tokenizer
from pdserve.v1 import common_pb2

FORMS: list[dict[str, object]] = [
    {"json": '{"type": "object"}'},
    {"regex": "[a-z]+"},
    {"choice": ("yes", "no")},
    {"grammar": 'start: "a"+'},
    {"grammar": 'root ::= "a" | "(" root ")"'},
    {"json_object": True},
]


class RealTokenizer(Tokenizer):
    """A tokenizer whose tokens are text; what it encodes does not matter here."""

    def __init__(self) -> None:
        self.can_constrain = True


REAL = RealTokenizer()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_form_passes_and_survives_sdk_and_wire(form: dict[str, object]) -> None:
    structured = StructuredOutputs(**form)  # type: ignore[arg-type]
    check_structured(structured, REAL)
    params = SamplingParams(structured_outputs=structured, seed=1)
    assert sampling_from_proto(sampling_to_proto(params)) == params
    sent = generate_request(prompt="x", options={"structured_outputs": form}).sampling
    assert sampling_from_proto(sent).structured_outputs == structured


def test_a_schema_may_be_a_mapping_in_both_entrances() -> None:
    schema = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"const": "é"}}}
    structured = StructuredOutputs(json=schema)
    assert json.loads(str(structured.json)) == schema
    assert list(json.loads(str(structured.json))["properties"]) == ["b", "a"]  # the order of the output
    sent = generate_request(prompt="x", options={"structured_outputs": {"json": schema}}).sampling
    assert sampling_from_proto(sent).structured_outputs == structured


WRONG: list[tuple[dict[str, object], str]] = [
    ({}, "exactly one"),
    ({"regex": "a", "choice": ("b",)}, "regex, choice"),
    ({"json_object": False}, "exactly one"),
    ({"choice": ("a", "")}, "choice"),
    ({"choice": ("a",) * (MAX_CHOICES + 1)}, "choice"),
    ({"regex": "a" * (MAX_REGEX_CHARS + 1)}, "regex"),
    ({"json": {"const": {1, 2}}}, "json"),
]


@pytest.mark.parametrize(("form", "word"), WRONG, ids=[w[1] for w in WRONG])
def test_a_malformed_form_is_refused(form: dict[str, object], word: str) -> None:
    with pytest.raises(RequestError, match=word) as e:
        StructuredOutputs(**form)  # type: ignore[arg-type]
    assert (e.value.reason, e.value.status) == ("BAD_STRUCTURED_OUTPUTS", "INVALID_ARGUMENT")


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"json": '{"type": "obj'}, "json"),
    ({"json": "[1]"}, "not a JSON object"),
    ({"json": {"type": "bogus"}}, "bogus"),
    ({"json": {"not": {"type": "string"}}}, '"not"'),  # what the library cannot enforce is refused, not ignored
    ({"json": {"$ref": "http://example.org/schema"}}, "example.org"),
    ({"json": {"type": "string", "minLength": 3, "maxLength": 2}}, "Unsatisfiable"),
    ({"json": "[" * 1_000 + "]" * 1_000}, "json"),
    ({"regex": "(a"}, "unclosed group"),
    ({"regex": "a(?=b)"}, "look-around"),
    ({"grammar": "start: nonterminal"}, "nonterminal"),
    ({"grammar": "root ::= other"}, "other"),
    ({"grammar": 'start: %json {"type": "integer", "multipleOf": 99991}'}, "%json"),
]


@pytest.mark.parametrize(("form", "word"), REFUSED, ids=[str(r[0])[:60] for r in REFUSED])
def test_what_cannot_be_honoured_is_refused_with_the_librarys_reason(form: dict[str, object], word: str) -> None:
    with pytest.raises(RequestError) as e:
        check_structured(StructuredOutputs(**form), REAL)  # type: ignore[arg-type]
    assert word in e.value.message and f"structured_outputs.{next(iter(form))}" in e.value.message
    assert (e.value.reason, e.value.status) == ("BAD_STRUCTURED_OUTPUTS", "INVALID_ARGUMENT")


@pytest.mark.parametrize(
    "schema",
    [
        '{"multipleOf": 999983}',
        '{"allOf": [{"multipleOf": 97}, {"multipleOf": 89}, {"multipleOf": 83}]}',
        '{"multipleOf": 1.0000019}',
        '{"multipleOf": 1e-99999999}',
        '{"multipleOf": 1e99999999}',
        '{"multipleOf": 0}',
    ],
)
def test_divisors_that_the_library_would_unfold_without_limit_are_refused_at_once(schema: str) -> None:
    with pytest.raises(RequestError, match="multipleOf"):
        check_structured(StructuredOutputs(json=schema), REAL)


@pytest.mark.parametrize("divisor", ["7", "0.01", "1000", "2.5", "1e6"])
def test_ordinary_divisors_pass(divisor: str) -> None:
    check_structured(StructuredOutputs(json=f'{{"type": "number", "multipleOf": {divisor}}}'), REAL)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ignore_eos", True),
        ("min_tokens", 2),
        ("stop_token_ids", (1,)),
        ("allowed_token_ids", (1,)),
        ("bad_words", ("x",)),
    ],
)
def test_what_else_says_what_may_come_or_where_the_end_is_is_refused_beside_it(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(structured_outputs=StructuredOutputs(regex="a"), **{name: value})  # type: ignore[arg-type]


def test_a_plain_mapping_is_refused_with_what_to_write() -> None:
    with pytest.raises(RequestError, match="StructuredOutputs"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


def test_structural_tags_are_refused_by_name() -> None:
    message = common_pb2.SamplingParams(structured_outputs=common_pb2.StructuredOutputs(structural_tag="{}"))
    with pytest.raises(UnimplementedError, match="structural_tag"):
        sampling_from_proto(message)


def test_two_fields_on_the_wire_are_refused() -> None:
    form = common_pb2.StructuredOutputs(regex="a", choice=["a"])
    with pytest.raises(RequestError, match="regex, choice"):
        sampling_from_proto(common_pb2.SamplingParams(structured_outputs=form))


def test_tokens_that_are_not_text_are_refused_by_name() -> None:
    with pytest.raises(UnimplementedError, match="'structured_outputs' needs a real model: the fake's"):
        check_structured(StructuredOutputs(regex="a"), Tokenizer.fake(10))
    check_structured(None, Tokenizer.fake(10))
