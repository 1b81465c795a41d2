"""The fake's point: whatever is wrong with a page becomes a wrong token."""

from __future__ import annotations

import pytest

from pdserve.core.errors import EngineError
from pdserve.engine.fake import FAKE_EOS, FAKE_VOCAB_SIZE, FakeRunner, expected_tokens, fake_layout
from pdserve.engine.step import (
    Add,
    PageCopy,
    PageCopyKind,
    PageRef,
    RunnerOutput,
    ScheduledSequence,
    SchedulerOutput,
    SequenceFailed,
    TokensSampled,
)
from tests.engine.engines import Engine, Streams, request


@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 40])
@pytest.mark.parametrize("budget", [4, 7, 64])
def test_chunks_do_not_change_the_tokens(num_prompt: int, budget: int) -> None:
    engine = Engine(32, max_num_batched_tokens=budget)
    r = request("a", range(num_prompt), max_tokens=9)
    Streams(engine.run(Add(r))).check([r])


def test_tokens_depend_on_every_token_and_its_place() -> None:
    base = expected_tokens([1, 2, 3, 4, 5], 6)
    assert base != expected_tokens([9, 2, 3, 4, 5], 6)
    assert base != expected_tokens([2, 1, 3, 4, 5], 6)
    assert expected_tokens([1, 2, 3, 4, 5, *base[:2]], 4) == base[2:]
    assert all(0 <= t < FAKE_VOCAB_SIZE and t != FAKE_EOS for t in base)


@pytest.mark.parametrize("fault", ["flip", "foreign", "swap"])
def test_a_wrong_page_is_a_wrong_token(fault: str) -> None:
    engine = Engine(32)
    r, other = request("a", range(8), 12), request("b", range(50, 58), 12)
    streams = Streams(engine.step(Add(r), Add(other)).events)
    pages = [bytearray(engine.page(p)) for p in range(4)]  # two pages of a, two of b
    if fault == "flip":
        engine.page(0)[5] ^= 1
    elif fault == "foreign":
        engine.page(1)[:] = pages[3]
    else:
        engine.page(0)[:], engine.page(1)[:] = pages[1], pages[0]
    streams.read(engine.run())
    streams.check([other])
    with pytest.raises(AssertionError, match="wrong tokens"):
        streams.check([r])


def test_eos_can_be_asked_for() -> None:
    engine = Engine(64, eos_period=4)
    requests = [request(f"r{i}", [i], max_tokens=20) for i in range(8)]
    streams = Streams(engine.run(*map(Add, requests)))
    streams.check(requests, eos_period=4)
    assert FAKE_EOS in [tokens[-1] for tokens in streams.tokens.values()]


def test_logprobs_come_when_asked_for() -> None:
    events = Engine(8).run(Add(request("a", [1], 2, logprobs=1)), Add(request("b", [1], 2)))
    sampled = [e for e in events if isinstance(e, TokensSampled)]
    assert all(len(e.logprobs) == (e.key == "a") for e in sampled)
    assert all(e.logprobs[0].chosen.token_id == e.token_ids[0] for e in sampled if e.logprobs)


def test_constraints_that_need_no_logits_are_honoured() -> None:
    allowed = request("a", [1], 30, allowed_token_ids=[7, 9, FAKE_EOS], min_tokens=20)
    early = request("b", [2], 8, stop_token_ids=range(256), min_tokens=0)
    none = request("c", [3], 8, allowed_token_ids=[FAKE_EOS], min_tokens=1)
    events = Engine(64).run(Add(allowed), Add(early), Add(none))
    tokens = {k: [t for e in events if isinstance(e, TokensSampled) and e.key == k for t in e.token_ids] for k in "ab"}
    assert set(tokens["a"][:20]) == {7, 9} and set(tokens["a"]) <= {7, 9, FAKE_EOS} and len(tokens["a"]) > 20
    assert len(tokens["b"]) == 1
    [failed] = [e for e in events if isinstance(e, SequenceFailed)]
    assert (failed.key, failed.status, failed.reason) == ("c", "INVALID_ARGUMENT", "NO_TOKEN_LEFT")


@pytest.mark.parametrize(
    "asked",
    [
        {"presence_penalty": 1.0},
        {"frequency_penalty": 1.0},
        {"repetition_penalty": 1.5},
        {"logit_bias": {1: 1.0}},
        {"bad_words": ["x"]},
    ],
)
def test_what_needs_logits_is_refused_by_name(asked: dict[str, object]) -> None:
    [failed] = [
        e for e in Engine(8).run(Add(request("a", [1], 4, **asked))) if isinstance(e, SequenceFailed | TokensSampled)
    ]
    assert isinstance(failed, SequenceFailed) and failed.status == "UNIMPLEMENTED"
    assert f"'{next(iter(asked))}'" in failed.message


def test_a_stale_reference_is_noticed() -> None:
    source, sink = Engine(4, prefix_caching=False), Engine(4)
    source.run(Add(request("a", range(4), 2)))
    with pytest.raises(AssertionError, match="stale"):
        sink.pull(source, [PageRef(0, 0)], [PageRef(0, 0)])


def test_a_row_without_a_page_for_each_of_its_tokens_is_refused_before_any_page_is_written() -> None:
    engine = Engine(2)
    row = ScheduledSequence("a", 4, [1], [0], None, 0, [0, 0, 0, 0, 1], 5)
    before = bytes(engine.memory)
    output = SchedulerOutput(1, (row,), 1)
    with pytest.raises(EngineError, match="sequence a has 1 pages, but computes up to position 4"):
        engine.runner.execute(output)
    assert bytes(engine.memory) == before


def test_a_step_of_page_copies_alone_is_done() -> None:
    layout = fake_layout(4)
    pool = bytearray(2 * layout.page_bytes)
    pool[: layout.page_bytes] = b"\x07" * layout.page_bytes
    before = bytes(pool[: layout.page_bytes])
    output = FakeRunner(memoryview(pool), layout).execute(
        SchedulerOutput(1, (), 0, (PageCopy(0, 1, PageCopyKind.COPY),))
    )
    assert output == RunnerOutput(())
    assert bytes(pool[layout.page_bytes :]) == before
