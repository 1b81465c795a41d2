"""Structured outputs: whatever the logits are, the output has the form, and its state follows from the tokens alone."""

from __future__ import annotations

import functools
import gc
import json
import re
import threading
from concurrent.futures import Future

import jsonschema
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdserve.core.errors import CapacityError, RequestError
from pdserve.core.sampling import SamplingParams
from pdserve.core.structured import StructuredOutputs
from pdserve.core.tokenizer import Tokenizer
from pdserve.engine.grammars import Grammars
from pdserve.engine.preparation import finish
from pdserve.engine.step import SamplingFailure
from pdserve.engine.structured import StructuredProcessor
from tests.engine_model.structures import EOS, VOCAB_SIZE, allowed, mask, model_dir, prepare, row, schemas, walk

CHARACTERS = "abAB01 \n\t\"'\\/|<>{}[]()$^.*+?#%é日🙂\u2028"
WIDE = {"deadline": None, "suppress_health_check": list(HealthCheck)}


texts = st.one_of(
    st.text(CHARACTERS, min_size=1, max_size=8), st.sampled_from(["<|im_end|>", "a<|im_start|>b", "%json {}"])
)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return fresh()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(model_dir())


def text_of(tokenizer: Tokenizer, tokens: list[int | SamplingFailure]) -> str:
    assert tokens[-1] == EOS, tokens[-1]
    return tokenizer.decode(tokens[:-1], skip_special_tokens=False)  # type: ignore[arg-type]


def check_schema(grammars: Grammars, tokenizer: Tokenizer, schema: dict[str, object], seed: int) -> None:
    tokens = list(walk(StructuredProcessor(grammars, 8), StructuredOutputs(json=schema), seed, 2_000))
    jsonschema.validate(
        json.loads(text_of(tokenizer, tokens)), schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )


@given(schemas, st.integers(0, 2**32))
@settings(max_examples=5, **WIDE)
def test_random_logits_give_valid_instances_of_random_schemas(
    grammars: Grammars, tokenizer: Tokenizer, schema: dict[str, object], seed: int
) -> None:
    check_schema(grammars, tokenizer, schema, seed)


@pytest.mark.slow
@given(schemas, st.integers(0, 2**32))
@settings(max_examples=120, **WIDE)
def test_random_logits_give_valid_instances_of_many_random_schemas(
    grammars: Grammars, tokenizer: Tokenizer, schema: dict[str, object], seed: int
) -> None:
    check_schema(grammars, tokenizer, schema, seed)


def test_any_json_object(grammars: Grammars, tokenizer: Tokenizer) -> None:
    structured = StructuredOutputs(json_object=True)
    processor = StructuredProcessor(grammars, 8)
    output: list[int] = []
    for text in ('{"a": [1, {"b": null}]', "}"):
        assert EOS not in allowed(processor, row(structured, output))
        output += tokenizer.encode(text)
    assert EOS in allowed(processor, row(structured, output))


@pytest.mark.parametrize("pattern", [r"(ab|c){1,4}", r"[A-Z]\d{2}-(foo|bar)x?", r"é+|ü{2}", "(a*b){2,3}"])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_end_comes_exactly_where_the_whole_output_matches(
    grammars: Grammars, tokenizer: Tokenizer, pattern: str, seed: int
) -> None:
    structured, processor = StructuredOutputs(regex=pattern), StructuredProcessor(grammars, 8)
    output: list[int] = []
    for token in walk(processor, structured, seed, 30):
        assert isinstance(token, int)
        text = tokenizer.decode(output)
        may_end = bool(mask(processor, row(structured, output))[EOS])
        assert may_end == (re.fullmatch(pattern, text) is not None), text
        output.append(token)


@given(st.lists(texts, min_size=1, max_size=5, unique=True), st.integers(0, 2**32))
@settings(max_examples=6, **WIDE)
def test_a_choice_is_one_of_the_choices(
    grammars: Grammars, tokenizer: Tokenizer, choices: list[str], seed: int
) -> None:
    tokens = list(walk(StructuredProcessor(grammars, 8), StructuredOutputs(choice=tuple(choices)), seed, 100))
    assert text_of(tokenizer, tokens) in choices


@pytest.mark.parametrize("grammar", ['start: "(" start ")" | "x"{1,3}', 'root ::= "(" root ")" | "x" "x"? "x"?'])
def test_a_recursive_grammar(grammars: Grammars, tokenizer: Tokenizer, grammar: str) -> None:
    for seed in range(4):
        tokens = list(walk(StructuredProcessor(grammars, 8), StructuredOutputs(grammar=grammar), seed, 200))
        text = text_of(tokenizer, tokens)
        inner = text.strip("()")
        assert inner in ("x", "xx", "xxx") and text == "(" * text.count("(") + inner + ")" * text.count("(")


@given(schemas, st.integers(0, 2**32), st.data())
@settings(max_examples=4, **WIDE)
def test_a_state_built_anew_from_the_tokens_allows_the_same(
    grammars: Grammars, schema: dict[str, object], seed: int, data: st.DataObject
) -> None:
    structured, kept = StructuredOutputs(json=schema), StructuredProcessor(grammars, 8)
    tokens = [t for t in walk(StructuredProcessor(grammars, 8), structured, seed, 25) if isinstance(t, int)]
    step_by_step = [mask(kept, row(structured, tokens[:n])) for n in range(len(tokens))]
    jumps = data.draw(st.lists(st.integers(0, len(tokens) - 1), max_size=6))  # back: taken back; ahead: handed off
    jumping = StructuredProcessor(grammars, 8)
    for n in [*jumps, len(tokens) - 1]:
        assert torch.equal(mask(jumping, row(structured, tokens[:n])), step_by_step[n])


def test_more_sequences_and_grammars_than_are_kept(tokenizer: Tokenizer) -> None:
    few = fresh(max_grammars=2)
    one, many = StructuredProcessor(few, 1), StructuredProcessor(few, 100)
    forms = {f"r{i}": StructuredOutputs(regex=f"(a{i}|b){{2,4}}") for i in range(4)}
    walks = [{k: walk(p, s, i, 40, key=k) for i, (k, s) in enumerate(forms.items())} for p in (one, many)]
    outputs = [{k: [] for k in forms} for _ in walks]
    for _ in range(10):  # in turns, so that each step finds another sequence's matcher
        for going, output in zip(walks, outputs, strict=True):
            for key, tokens in going.items():
                output[key] += [t for t in [next(tokens, None)] if t is not None]
    assert outputs[0] == outputs[1] and all(o[-1] == EOS for o in outputs[0].values())
    assert len(one._states) == 1 and len(many._states) == 4 and len(few._compiled) == 2


def test_a_head_wider_than_the_vocabulary(tokenizer: Tokenizer) -> None:
    wide = Grammars(model_dir() / "tokenizer.json", VOCAB_SIZE + 77, frozenset({EOS, 0}))
    processor, structured = StructuredProcessor(wide, 8), StructuredOutputs(choice=("a",))
    [a] = tokenizer.encode("a")
    assert allowed(processor, row(structured, []), VOCAB_SIZE + 77) == {a}
    assert allowed(processor, row(structured, [a]), VOCAB_SIZE + 77) == {EOS, 0}


def failure_of(processor: StructuredProcessor, structured: StructuredOutputs, output: list[int]) -> SamplingFailure:
    prepare(processor, structured)
    failure = processor.edit(torch.zeros(VOCAB_SIZE), row(structured, output))
    assert failure is not None
    return failure


def test_a_wrong_grammar_fails_with_its_reason_and_the_next_request_works(grammars: Grammars) -> None:
    processor = StructuredProcessor(grammars, 8)
    for bad, word in ((StructuredOutputs(json={"type": "bogus"}), "bogus"), (StructuredOutputs(regex="("), "regex")):
        failure = failure_of(processor, bad, [])
        assert (failure.status, failure.reason) == ("INVALID_ARGUMENT", "BAD_STRUCTURED_OUTPUTS")
        assert word in failure.message
    assert allowed(processor, row(StructuredOutputs(regex="a"), []))


def test_output_that_does_not_fit_the_grammar_is_an_error(grammars: Grammars, tokenizer: Tokenizer) -> None:
    failure = failure_of(StructuredProcessor(grammars, 8), StructuredOutputs(regex="a+"), tokenizer.encode("ab"))
    assert (failure.status, failure.reason) == ("INTERNAL", "GRAMMAR_BROKEN")


def test_what_the_tokens_cannot_write_is_refused(grammars: Grammars) -> None:
    unknown = "\U00040000"  # the built-in model's vocabulary lacks its first byte
    failure = failure_of(StructuredProcessor(grammars, 8), StructuredOutputs(choice=(unknown,)), [])
    assert (failure.status, failure.reason) == ("INVALID_ARGUMENT", "BAD_STRUCTURED_OUTPUTS")


def test_a_grammar_that_outgrows_the_limits_fails_alone(grammars: Grammars) -> None:
    huge = StructuredOutputs(grammar="start: A\nA: /(.*a.{10}){3}/ & /(.*b.{9}){3}/ & ~/.*xyz.*/")
    processor = StructuredProcessor(grammars, 8)
    failure = failure_of(processor, huge, [])
    assert failure.status == "INVALID_ARGUMENT" and "too complex" in failure.message
    assert allowed(processor, row(StructuredOutputs(regex="a"), []))


class Closed:
    """Holds a `Grammars`' compile thread up until it is opened."""

    def __init__(self, grammars: Grammars) -> None:
        self._open, started = threading.Event(), threading.Event()

        def wait() -> None:
            started.set()
            assert self._open.wait(20)

        self._running = grammars._compiler.submit(wait)
        assert started.wait(20)

    def open(self) -> None:
        self._open.set()
        self._running.result(20)


def form(pattern: str) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputs(regex=pattern))


@functools.cache
def library_tokenizer() -> object:
    return Grammars(model_dir() / "tokenizer.json", VOCAB_SIZE, frozenset({EOS}))._read_tokenizer()


def fresh(**options: int) -> Grammars:
    """Grammars that have read the tokenizer, which takes a second."""
    made = Grammars(model_dir() / "tokenizer.json", VOCAB_SIZE, frozenset({EOS}), **options)  # type: ignore[arg-type]
    made._tokenizer = library_tokenizer()  # type: ignore[assignment]
    return made


def test_the_step_thread_waits_once_for_many_missing_grammars_and_fails_their_rows() -> None:
    grammars = fresh()
    closed, processor = Closed(grammars), StructuredProcessor(grammars, 8)
    waits: list[float | None] = []
    plain = Future.result

    def result(self: Future[object], timeout: float | None = None) -> object:
        waits.append(timeout)
        return plain(self, timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Future, "result", result)
        for i in range(20):
            failure = processor.edit(torch.zeros(VOCAB_SIZE), row(StructuredOutputs(regex=f"a{i}"), []))
            assert failure is not None
            assert (failure.status, failure.reason) == ("RESOURCE_EXHAUSTED", "GRAMMAR_NOT_READY")
    closed.open()
    assert sum(w or 0.0 for w in waits) <= 0.2, waits


def test_the_compile_queue_is_bounded_and_what_is_given_up_leaves_it() -> None:
    grammars = fresh(max_queued=2)
    closed = Closed(grammars)
    one, two = form("a"), form("b")
    first, again, second = grammars.prepare(one), grammars.prepare(one), grammars.prepare(two)
    assert first and again and second
    with pytest.raises(CapacityError) as e:
        grammars.prepare(form("c"))
    assert (e.value.status, e.value.reason) == ("RESOURCE_EXHAUSTED", "GRAMMAR_QUEUE_FULL")
    first.give_up()
    first.give_up()
    with pytest.raises(CapacityError):  # another request still waits for it
        grammars.prepare(form("c"))
    second.give_up()
    third, anew = grammars.prepare(form("c")), None
    with pytest.raises(CapacityError):
        grammars.prepare(two)
    closed.open()
    again.result(20)
    assert third is not None
    third.result(20)
    anew = grammars.prepare(two)  # what was given up is compiled when somebody wants it again
    assert anew is not None
    anew.result(20)


def test_a_grammar_stays_as_long_as_its_request() -> None:
    grammars = fresh(max_grammars=2)
    processor, requests = StructuredProcessor(grammars, 8), [form(f"a{i}") for i in range(6)]
    for params in requests:
        preparation = grammars.prepare(params)
        assert preparation is not None
        preparation.result(20)
    closed = Closed(grammars)
    for params in requests:
        assert params.structured_outputs is not None
        assert processor.edit(torch.zeros(VOCAB_SIZE), row(params.structured_outputs, [])) is None
    closed.open()
    assert len(grammars._held) >= 6
    del params, requests, preparation, processor
    assert len(grammars._held) == len(grammars._compiled) == 2


class Panic(BaseException):
    """As PyO3's: no Exception."""


@pytest.mark.parametrize("error", [ValueError("bad"), RuntimeError("worse"), Panic("worst")], ids=repr)
@pytest.mark.parametrize("method", ["consume_tokens", "compute_bitmask", "is_accepting"])
def test_what_the_library_raises_fails_its_row_alone(
    grammars: Grammars, tokenizer: Tokenizer, error: BaseException, method: str
) -> None:
    processor, structured = StructuredProcessor(grammars, 8), StructuredOutputs(regex="a+")
    output = tokenizer.encode("a")
    prepare(processor, structured)
    good = grammars.matcher

    class Failing:
        def __init__(self, inner: object) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> object:
            if name == method:
                raise error
            return getattr(self._inner, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammars, "matcher", lambda s: Failing(good(s)))
        failure = processor.edit(torch.zeros(VOCAB_SIZE), row(structured, output))
    assert failure is not None and (failure.status, failure.reason) == ("INTERNAL", "GRAMMAR_FAILED")
    assert str(error) in failure.message
    assert EOS in allowed(processor, row(structured, output))


@pytest.mark.parametrize("error", [ValueError("bad"), Panic("worst")], ids=repr)
def test_what_the_library_raises_while_compiling_fails_its_request(error: BaseException) -> None:
    import llguidance

    def raising(*args: object, **options: object) -> object:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llguidance, "LLMatcher", raising)
        failure = failure_of(StructuredProcessor(fresh(), 8), StructuredOutputs(regex="a"), [])
    assert (failure.status, failure.reason) == ("INTERNAL", "GRAMMAR_FAILED") and str(error) in failure.message


@pytest.mark.parametrize(
    ("file", "eos", "reason"),
    [
        ("tokenizer.json", frozenset(), "NO_EOS_TOKEN"),
        ("missing.json", {EOS}, "BAD_TOKENIZER"),
        ("config.json", {EOS}, "BAD_TOKENIZER"),
    ],
)
def test_a_model_that_cannot_be_constrained(file: str, eos: frozenset[int], reason: str) -> None:
    broken = Grammars(model_dir() / file, VOCAB_SIZE, eos)
    assert failure_of(StructuredProcessor(broken, 8), StructuredOutputs(regex="a"), []).reason == reason


def test_what_is_wrong_with_a_form_does_not_keep_it() -> None:
    """An error that is kept has frames that know the request: of endless wrong ones nothing may stay."""
    forgetful = fresh(max_grammars=2)
    for i in range(6):
        params = SamplingParams(structured_outputs=StructuredOutputs(regex=rf"x{i}[^\s\S]"))
        for _ in range(2):
            preparation = forgetful.prepare(params)
            assert preparation is not None
            with pytest.raises(RequestError, match="no text satisfies it"):
                finish(preparation, 20.0)
    del params, preparation
    gc.collect()
    assert len(forgetful._held) <= 2
