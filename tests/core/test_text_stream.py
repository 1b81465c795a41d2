"""Streamed text equals the text of all tokens, however they are grouped, and stop strings cut it exactly."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.request import FinishReason
from pdserve.core.sampling import SamplingParams
from pdserve.core.text_stream import TextStream, first_stop
from pdserve.core.tokenizer import Tokenizer
from tests.core import tokenizers_made as made

TEXT = "Hello wörld 👩‍👩‍👧‍👦, 你好 stopping. A e o H stop"


@cache
def _tokenizer(name: str) -> Tokenizer:
    if name == "fake":
        return Tokenizer.fake(50)
    with TemporaryDirectory() as d:
        return made.load(Path(d), getattr(made, name)())


def _run(
    tok: Tokenizer, ids: Sequence[int], cuts: Sequence[int], params: SamplingParams
) -> tuple[str, str | None, int]:
    """Pushes `ids` in groups ending at `cuts`; returns text, stop string and tokens used."""
    stream, text, used, at = TextStream(tok, params), "", 0, 0
    for cut in sorted({*cuts, len(ids)}):
        delta = stream.push(ids[at:cut])
        text, used, at = text + delta.text, used + delta.num_tokens, cut
        if delta.stop_reason is not None:
            assert stream.finish().text == "" and stream.push([5]).text == ""
            return text, delta.stop_reason, used
    last = stream.finish()
    return text + last.text, last.stop_reason, used


NAMES = ["byte_level", "byte_fallback", "fake"]
ids_strategy = st.lists(st.integers(0, 339), max_size=40)
cuts_strategy = st.lists(st.integers(0, 40), max_size=8)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("skip", [True, False])
@given(ids=ids_strategy, cuts=cuts_strategy)
def test_deltas_join_to_the_whole_text(name: str, skip: bool, ids: list[int], cuts: list[int]) -> None:
    tok, params = _tokenizer(name), SamplingParams(skip_special_tokens=skip)
    text, stop, used = _run(tok, ids, [c for c in cuts if c < len(ids)], params)
    whole = tok.decode(ids, skip_special_tokens=skip)
    assert stop is None and used == len(ids)
    if name == "byte_fallback" and "�" in whole:
        # That decoder takes valid characters back when a wrong byte follows; streamed text cannot.
        assert text == _run(tok, ids, range(len(ids)), params)[0]
    else:
        assert text == whole


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("text", [TEXT, "  leading", "é", "🎉" * 20, " e  e   e"])
def test_real_text_arrives_whole(name: str, text: str) -> None:
    tok = _tokenizer(name)
    ids = tok.encode(text)
    assert _run(tok, ids, range(len(ids)), SamplingParams())[0] == tok.decode(ids)


def test_incomplete_character_is_held_until_it_is_whole() -> None:
    tok = _tokenizer("byte_level")
    ids = tok.encode("🎉")[1:]
    stream = TextStream(tok, SamplingParams())
    deltas = [stream.push([i]).text for i in ids]
    assert len(ids) > 1 and deltas == [""] * (len(ids) - 1) + ["🎉"]
    assert stream.push(ids[:-1]).text == ""
    assert stream.finish().text == "�"


@given(ids=ids_strategy, cuts=cuts_strategy, data=st.data(), include=st.booleans())
def test_stop_does_not_depend_on_grouping(ids: list[int], cuts: list[int], data: st.DataObject, include: bool) -> None:
    tok = _tokenizer("byte_level")
    whole = tok.decode(ids)
    stops = []
    for _ in range(data.draw(st.integers(1, 3))):
        a = data.draw(st.integers(0, max(0, len(whole) - 1)))
        stops.append(whole[a : a + data.draw(st.integers(1, 6))] or "zz")
    params = SamplingParams(stop=tuple(stops), include_stop_str_in_output=include)
    alone = _run(tok, ids, range(len(ids)), params)
    assert _run(tok, ids, [c for c in cuts if c < len(ids)], params) == alone
    text, stop, used = alone
    if match := first_stop(whole, stops):
        start, expected = match
        assert stop == expected
        assert text == whole[: start + len(expected) if include else start]
        assert used == len(ids) or expected in tok.decode(ids[:used])
    else:
        assert stop is None and text == whole


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    stream = TextStream(Tokenizer.fake(50), SamplingParams(stop=(" t1 t2",)))
    assert stream.push([7]).text == " t7"
    assert stream.push([1]).text == ""
    assert stream.push([3]).text == " t1 t3"
    assert stream.push([1]).text == ""
    assert stream.finish().text == " t1"


def test_stop_inside_a_push_says_how_many_tokens_it_took() -> None:
    stream = TextStream(Tokenizer.fake(50), SamplingParams(stop=("2 t",)))
    delta = stream.push([7, 2, 3, 4])
    assert (delta.text, delta.stop_reason, delta.num_tokens) == (" t7 t", "2 t", 3)
    assert stream.push([1]) == stream.finish()


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert first_stop("abcd", ["abcd", "c"]) == (2, "c")
    assert first_stop("abcd", ["c", "bc"]) == (1, "bc")
    assert first_stop("abcd", ["x"]) is None


def test_a_stream_rebuilt_from_earlier_tokens_goes_on_alike() -> None:
    tok, params = _tokenizer("byte_level"), SamplingParams(stop=("zzz",))
    ids = tok.encode(TEXT)
    for at in random.Random(1).sample(range(len(ids)), 8):
        first, second = TextStream(tok, params), TextStream(tok, params)
        first.push(ids[:at])
        for i in ids[:at]:
            second.push([i])
        assert first.push(ids[at:]) == second.push(ids[at:])
        assert first.finish() == second.finish()


def test_a_stop_string_within_min_tokens_is_text() -> None:
    stream = TextStream(Tokenizer.fake(50), SamplingParams(stop=("t1 t2",), min_tokens=3))
    assert stream.advance([1, 2]).text == " t1 t2"
    # Begun within min_tokens, complete after it: it ends the stream, and what began it was held back.
    assert stream.advance([1]).text == " "
    news = stream.advance([2, 5])
    assert (news.text, news.stop_reason, news.num_tokens, news.stopped_early) == ("", "t1 t2", 1, True)


def test_a_stop_string_that_ended_within_min_tokens_is_not_found_later() -> None:
    stream = TextStream(Tokenizer.fake(50), SamplingParams(stop=("t2", "t1 t2 t3 t4"), min_tokens=2))
    assert stream.advance([1, 2]).text == " "  # may begin the longer one
    assert stream.advance([5]).text == "t1 t2 t5"
    assert stream.advance([2]).stop_reason == "t2"


def test_min_tokens_holds_to_the_end() -> None:
    stream = TextStream(Tokenizer.fake(50), SamplingParams(stop=("t1",), min_tokens=2, max_tokens=2))
    news = stream.advance([1, 1], FinishReason.LENGTH)
    assert (news.text, news.finish_reason, news.stop_reason) == (" t1 t1", FinishReason.LENGTH, None)
