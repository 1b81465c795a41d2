"""Scheduler: the budget, who goes first, who gives way, and how sequences end."""

from __future__ import annotations

import pytest

from pdserve.core.request import FinishReason
from pdserve.engine.chunks import SchedulerLimits
from pdserve.engine.fake import expected_tokens
from pdserve.engine.page_pool import PagePool
from pdserve.engine.policies import make_policy
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.sequence import TRANSITIONS, Sequence, SequenceState
from pdserve.engine.step import (
    Abort,
    Add,
    PrefillStarted,
    RunnerOutput,
    SampledToken,
    SchedulerOutput,
    SequenceAborted,
    SequenceFailed,
    TokensSampled,
)
from tests.engine.engines import Engine, Streams, request


def scheduler(
    num_pages: int = 32, *, page_size: int = 4, num_seqs: int = 4, budget: int = 8, policy: str = "fcfs"
) -> Scheduler:
    limits = SchedulerLimits(
        page_size=page_size,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=256,
        least_tokens=page_size,
    )
    return Scheduler(limits, PagePool(num_pages), make_policy(policy))


def advance(s: Scheduler) -> list[tuple[str, int]]:
    """One step that samples token 7 everywhere; who computed how many tokens."""
    output = s.schedule(0.0)
    assert isinstance(output, SchedulerOutput)
    s.update(output, RunnerOutput(tuple(SampledToken(7) if i.sampling else None for i in output.sequences)))
    s.check()
    assert output.num_tokens == sum(len(i.token_ids) for i in output.sequences)
    return [(i.key, len(i.token_ids)) for i in output.sequences]


def test_decodes_go_first_then_chunks_share_what_is_left() -> None:
    s = scheduler(budget=8)
    s.add(request("short", range(3)))
    assert advance(s) == [("short", 3)]
    s.add(request("long", range(20)))
    s.add(request("next", range(4)))
    assert advance(s) == [("short", 1), ("long", 7)]
    assert advance(s) == [("short", 1), ("long", 7)]
    assert advance(s) == [("short", 1), ("long", 6), ("next", 1)]
    assert advance(s) == [("short", 1), ("long", 1), ("next", 3)]
    assert advance(s) == [("short", 1), ("long", 1), ("next", 1)]


def test_sampling_only_at_the_end_of_the_known_tokens() -> None:
    s = scheduler(budget=8)
    s.add(request("a", range(10), emitted=[5, 6]))
    output = s.schedule(0.0)
    assert output is not None and output.sequences[0].sampling is None
    s.update(output, RunnerOutput((None,)))
    output = s.schedule(0.0)
    assert output is not None
    item = output.sequences[0]
    assert (item.start, list(item.token_ids), item.output_index) == (8, [8, 9, 5, 6], 2)
    assert item.sampling is not None


def test_max_num_seqs_and_order_of_waiting() -> None:
    s = scheduler(num_seqs=2, budget=64, policy="priority")
    for key, priority, arrival in (("late", 0, 2.0), ("early", 0, 1.0), ("urgent", -1, 3.0)):
        s.add(request(key, [1], max_tokens=2, priority=priority, arrival_s=arrival))
    assert advance(s) == [("urgent", 1), ("early", 1)]
    assert s.load().num_waiting == 1
    assert advance(s) == [("early", 1), ("urgent", 1)]  # once started, age counts
    assert advance(s) == [("late", 1)]


def test_load_counts_what_is_left() -> None:
    s = scheduler(num_pages=8, budget=8)
    s.add(request("a", range(12)))
    assert s.load().num_pending_prefill_tokens == 12
    advance(s)
    load = s.load()
    assert (load.num_running, load.num_waiting, load.num_pending_prefill_tokens) == (1, 0, 4)
    assert (load.num_free_pages, load.num_pages) == (5, 8)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "emitted", "reason"),
    [
        (0, 1, 0, "EMPTY_PROMPT"),
        (32, 1, 0, "PROMPT_TOO_LONG"),
        (30, 9, 2, "PROMPT_TOO_LONG"),
        (3, 2, 2, "NOTHING_TO_GENERATE"),
    ],
)
def test_what_can_never_run_is_refused_at_once(prompt: int, max_tokens: int, emitted: int, reason: str) -> None:
    s = scheduler(num_pages=8)
    s.add(request("a", range(prompt), max_tokens, emitted=range(emitted)))
    (failure,) = s.take_events()
    assert isinstance(failure, SequenceFailed)
    assert (failure.status, failure.reason) == ("INVALID_ARGUMENT", reason)
    assert s.schedule(0.0) is None


def test_the_longest_that_fits_runs_to_its_length_alone() -> None:
    engine = Engine(8)
    r = request("a", range(31), max_tokens=100)
    streams = Streams(engine.run(Add(r)))
    assert streams.tokens["a"] == expected_tokens(range(31), 1)
    assert streams.finished["a"] is FinishReason.LENGTH
    r = request("b", [1], max_tokens=100)
    streams = Streams(engine.run(Add(r)))
    assert streams.tokens["b"] == expected_tokens([1], 31)


def test_stop_tokens_end_with_stop_and_say_which() -> None:
    tokens = expected_tokens(range(5), 6)
    r = request("a", range(5), 6, stop_token_ids=(tokens[3],))
    last = [e for e in Engine(8).run(Add(r)) if isinstance(e, TokensSampled)][-1]
    assert (last.index, last.token_ids, last.stop_token_id) == (3, (tokens[3],), tokens[3])
    assert last.finish_reason is FinishReason.STOP


def test_ignore_eos_goes_on_after_it() -> None:
    engine = Engine(16, eos_period=1)
    assert Streams(engine.run(Add(request("a", [1], 5)))).tokens["a"] == [256]
    assert Streams(engine.run(Add(request("b", [1], 5, ignore_eos=True)))).tokens["b"] == [256] * 5


@pytest.mark.parametrize("num_pages", [8, 9, 13])
def test_a_tiny_pool_preempts_and_all_finish_with_the_right_tokens(num_pages: int) -> None:
    engine = Engine(num_pages, max_num_seqs=4)
    requests = [request(f"r{i}", range(i, i + 6), max_tokens=20, arrival_s=i) for i in range(6)]
    events = engine.run(*map(Add, requests))
    Streams(events).check(requests)
    assert [e.key for e in events if isinstance(e, PrefillStarted)] == [r.key for r in requests]
    assert engine.pool.num_free == num_pages


def test_the_oldest_is_never_preempted() -> None:
    s = scheduler(num_pages=6, num_seqs=3, budget=16)
    for i in range(3):
        s.add(request(str(i), range(4), max_tokens=19, arrival_s=i))
    computed = 0
    while "0" in (keys := dict(advance(s))):
        computed += keys["0"]
    assert computed == 4 + 18


def test_abort_in_any_state_frees_the_pages_and_answers() -> None:
    engine = Engine(8, max_num_seqs=1)
    engine.step(Add(request("running", range(20), 4)), Add(request("waiting", range(4), 4)))
    events = engine.step(Abort("running"), Abort("waiting"), Abort("unknown"), Abort("running")).events
    assert events == tuple(
        SequenceAborted(k, known)
        for k, known in (("running", True), ("waiting", True), ("unknown", False), ("running", False))
    )
    assert engine.pool.num_free == 8


def test_a_second_sequence_with_a_living_key_is_refused_and_the_first_lives() -> None:
    engine = Engine(8)
    r = request("a", [1], 9)
    streams = Streams(engine.step(Add(r)).events)
    refused, *events = engine.step(Add(request("a", [2], 9))).events
    assert isinstance(refused, SequenceFailed) and refused.reason == "DUPLICATE_KEY"
    streams.read(events)
    streams.read(engine.run())
    streams.check([r])


def test_what_starts_leaves_the_others_room_to_grow() -> None:
    s = scheduler(num_pages=4, budget=16)
    s.add(request("old", range(7), max_tokens=3, arrival_s=0))
    advance(s)
    s.add(request("new", range(8), max_tokens=2, arrival_s=1))
    advance(s)
    assert s.load().num_waiting == 1  # it would fit, but the next page of the older one would be taken from it


def test_a_prefill_whose_pages_are_taken_is_not_computed_in_that_step() -> None:
    engine = Engine(12, max_num_seqs=2, max_num_batched_tokens=2)
    old, new = request("old", range(4), 30, arrival_s=0), request("new", range(36), 4, arrival_s=1)
    streams = Streams(engine.step(Add(old)).events)
    streams.read(engine.run(Add(new)))
    streams.check([old, new])


def test_no_other_transitions_than_those_of_the_table() -> None:
    for source in SequenceState:
        for target in SequenceState:
            seq = Sequence(request("a", [1]), (0.0,), 8, False, False)
            seq.state = source
            if target in TRANSITIONS[source]:
                seq.move(target)
                assert seq.state is target
            else:
                with pytest.raises(AssertionError):
                    seq.move(target)


def test_a_runner_that_fails_ends_every_sequence_and_the_engine() -> None:
    engine = Engine(16, max_num_seqs=1)
    engine.step(Add(request("a", [1], 9)), Add(request("b", [2], 9)))
    engine.memory = engine.core._runner._kv = None  # type: ignore[attr-defined, assignment]
    events = engine.step().events
    assert {(e.key, e.reason) for e in events if isinstance(e, SequenceFailed)} == {
        ("a", "ENGINE_FAILED"),
        ("b", "ENGINE_FAILED"),
    }
    assert engine.core.failure is not None and "TypeError" in engine.core.failure.message
    (late,) = engine.step(Add(request("c", [1], 9))).events
    assert isinstance(late, SequenceFailed) and late.reason == "ENGINE_FAILED"
    assert engine.pool.num_free == 16
