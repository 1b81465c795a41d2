"""Forks: one prompt is computed once, its full pages are shared, and each stream goes on alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.core.hashing import choice_seed
from pdserve.core.request import Request
from pdserve.engine.fake import expected_tokens
from pdserve.engine.page_pool import PageState
from pdserve.engine.step import (
    Abort,
    Activate,
    Add,
    MarkReserved,
    PagesReady,
    PrefillStarted,
    ReleaseLease,
    Reserve,
    Reserved,
    RunnerOutput,
    SequenceAborted,
    SequenceFailed,
    TokensSampled,
)
from tests.engine.engines import Engine, Streams, request


def family(num: int, prompt: range, max_tokens: int = 8, emitted: int = 0) -> list[Request]:
    """Requests of one prompt; what they have emitted differs, so that their tokens do."""
    return [request(f"f{i}", prompt, max_tokens + i, emitted=range(100, 100 + i * emitted)) for i in range(num)]


def add(requests: list[Request]) -> Add:
    return Add(requests[0], forks=tuple(requests[1:]))


def count_computed(engine: Engine) -> list[int]:
    """Tokens computed per step, appended to as the engine runs."""
    counts: list[int] = []
    execute = engine.runner.execute

    def counted(output: object) -> RunnerOutput:
        counts.append(sum(len(s.token_ids) for s in output.sequences))  # type: ignore[attr-defined]
        return execute(output)  # type: ignore[arg-type]

    engine.runner.execute = counted  # type: ignore[method-assign, assignment]
    return counts


@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 12, 13])
def test_the_prompt_is_computed_once_and_only_full_pages_are_shared(num_prompt: int) -> None:
    engine = Engine(64, max_num_batched_tokens=64)
    requests = family(4, range(num_prompt))
    counts = count_computed(engine)
    streams = Streams(engine.step(add(requests)).events)
    assert counts == [num_prompt]
    num_shared = (num_prompt - 1) // 4
    num_own = -(-num_prompt // 4) - num_shared
    assert 64 - engine.pool.num_free == num_shared + 4 * num_own
    streams.read(engine.step().events)
    assert counts == [num_prompt, 1 + 3]  # the others compute the last token once more
    tables = [engine.core._scheduler._sequences[r.key].page_table for r in requests]
    assert all(t[:num_shared] == tables[0][:num_shared] for t in tables)
    own = [page for t in tables for page in t[num_shared:]]
    assert len(own) == len(set(own))
    streams.read(engine.run())
    streams.check(requests)
    assert engine.pool.num_free == 64


def test_forks_that_have_emitted_tokens_begin_after_the_prompt() -> None:
    engine = Engine(64, max_num_batched_tokens=8)
    requests = family(4, range(10), emitted=3)
    counts = count_computed(engine)
    streams = Streams(engine.run(add(requests)))
    streams.check(requests)
    computed = 10 + sum(len(t) for t in streams.tokens.values()) - 4  # the last token of each is never computed
    assert sum(counts) == computed + 3 + 6 + 9


def test_a_leader_that_ends_at_once_leaves_its_pages_to_its_forks() -> None:
    engine = Engine(64)
    requests = [request("leader", range(10), 1), *family(3, range(10))]
    streams = Streams(engine.run(add(requests)))
    streams.check(requests)
    assert engine.pool.num_free == 64


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("victim", [0, 1, 3])
def test_one_that_is_aborted_leaves_the_others_alone(victim: int, num_steps: int) -> None:
    engine = Engine(64, max_num_batched_tokens=4)
    requests = family(4, range(10))
    streams = Streams(engine.step(add(requests)).events)
    for _ in range(num_steps):
        streams.read(engine.step().events)
    events = engine.run(Abort(requests[victim].key))
    assert SequenceAborted(requests[victim].key, True) in events
    streams.read(events)
    del requests[victim]
    streams.check(requests)
    assert engine.pool.num_free == 64


def test_the_prompt_is_computed_by_the_next_one_when_the_leader_is_aborted_halfway() -> None:
    engine = Engine(64, max_num_batched_tokens=4, prefix_caching=False)
    requests = family(3, range(12))
    engine.step(add(requests))
    counts = count_computed(engine)
    engine.step(Abort("f0"))
    engine.step()
    engine.step()
    assert sum(counts) == 12
    engine.step(Abort("f1"), Abort("f2"))
    assert engine.pool.num_free == 64


@pytest.mark.parametrize("num_pages", [4, 5, 6, 8])
@pytest.mark.parametrize("num_seqs", [1, 2, 5])
def test_no_room_to_share_is_no_deadlock(num_pages: int, num_seqs: int) -> None:
    engine = Engine(num_pages, max_num_seqs=num_seqs)
    requests = family(5, range(11), 3)
    others = [request(f"o{i}", range(i, i + 9), 5, arrival_s=1.0) for i in range(3)]
    streams = Streams(engine.run(add(requests), *map(Add, others)))
    streams.check([*requests[:2], *others])
    assert engine.pool.num_free == num_pages


def test_all_of_a_family_that_can_never_fit_are_refused_at_once() -> None:
    engine = Engine(4)
    events = engine.step(add(family(3, range(16)))).events
    assert [(e.key, e.reason) for e in events if isinstance(e, SequenceFailed)] == [
        (f"f{i}", "PROMPT_TOO_LONG") for i in range(3)
    ]
    assert engine.core.load().num_waiting == 0


def test_a_living_key_among_the_forks_refuses_that_fork_only() -> None:
    engine = Engine(32)
    old, (leader, other) = request("f1", range(3), 20), family(2, range(9))
    engine.step(Add(old))
    events = engine.run(Add(leader, forks=(request("f1", range(9)), request("f9", range(9)))))
    assert [e.key for e in events if isinstance(e, SequenceFailed)] == ["f1"]
    Streams(e for e in events if getattr(e, "key", "") != "f1").check([leader, request("f9", range(9))])
    assert other.key == old.key and engine.pool.num_free == 32


def test_shared_pages_are_held_until_their_last_reader_ends() -> None:
    engine = Engine(16, max_num_batched_tokens=32)
    requests = [request("short", range(8), 2), request("long", range(8), 9)]
    engine.step(add(requests))
    engine.step()
    shared = engine.core._scheduler._sequences["long"].page_table[0]
    assert "short" not in engine.core._scheduler._sequences
    assert engine.pool.state(shared) is PageState.HELD
    engine.run()
    assert engine.pool.state(shared) is PageState.CACHED


def test_a_runner_that_fails_ends_a_whole_family() -> None:
    engine = Engine(32, max_num_batched_tokens=4)
    engine.step(add(family(3, range(12))))
    engine.runner.execute = None  # type: ignore[method-assign, assignment]
    events = engine.step().events
    assert sorted(e.key for e in events if isinstance(e, SequenceFailed)) == ["f0", "f1", "f2"]
    assert engine.pool.num_free == 32


@pytest.mark.parametrize("num_pages", [10, 64])
@pytest.mark.parametrize("num_prompt", [1, 4, 5, 16, 30])
@pytest.mark.parametrize("max_tokens", [1, 9])
def test_a_prompt_is_handed_off_once_for_all_choices(num_prompt: int, num_pages: int, max_tokens: int) -> None:
    prefill, decode = Engine(16), Engine(num_pages)
    one = request("a", range(num_prompt), max_tokens)
    whole = replace(one, sampling=replace(one.sampling, n=3))
    first, *forks = whole.choices()
    pages = next(e.pages for e in decode.step(Reserve(first, 5.0)).events if isinstance(e, Reserved))
    watermarks = [
        e for e in prefill.run(Add(whole, handoff=True, reserved=True)) if isinstance(e, PagesReady)
    ]  # whether its own first token ends the first choice or not
    assert watermarks[-1].complete
    decode.pull(prefill, [page for e in watermarks for page in e.pages], pages)
    prefill.step(ReleaseLease("a"))
    counts = count_computed(decode)
    events = list(decode.step(Activate("a", None, tuple(forks))).events)
    if max_tokens > 1 and num_pages == 64:  # who computes the last token once more does so on no page that others share
        table = decode.core._scheduler._sequences["a"].page_table
        assert (table[(num_prompt - 1) // 4] == pages[-1].page_id) == (num_prompt % 4 != 0)
    events += decode.run()
    streams = Streams(events)
    streams.check([first, *forks])
    assert not any(isinstance(e, PrefillStarted) for e in events)  # none of them waited here for its prefill
    assert list(streams.first_index.values()) == [0, 0, 0]
    if num_pages == 64:
        assert sum(counts) == 3 * max_tokens  # no prompt but its last token
    assert (prefill.pool.num_free, decode.pool.num_free) == (16, num_pages)


def test_a_shared_hand_off_whose_token_ends_it_keeps_its_pages_until_a_destination_comes() -> None:
    engine = Engine(16)
    one = request("a", range(9), 1)
    events = engine.run(Add(replace(one, sampling=replace(one.sampling, n=2)), handoff=True))
    assert Streams(events).finished == {"a": "length"} and engine.pool.num_free == 13
    (ready,) = engine.step(MarkReserved("a")).events
    assert isinstance(ready, PagesReady) and ready.complete and len(ready.pages) == 3
    engine.step(ReleaseLease("a"))
    assert engine.pool.num_free == 16


def test_seeds_of_choices_stay_what_they_are() -> None:
    assert [choice_seed(1, i) for i in range(3)] == [1, 8580740675083722629, 7123343949786655733]


def test_sampled_tokens_go_to_the_right_one() -> None:
    engine = Engine(32)
    requests = family(3, range(6), emitted=1)
    events = engine.run(add(requests))
    firsts = {e.key: (e.index, e.token_ids[0]) for e in reversed(events) if isinstance(e, TokensSampled)}
    assert firsts == {
        r.key: (i, expected_tokens((*r.prompt_token_ids, *r.emitted_token_ids), 1)[0]) for i, r in enumerate(requests)
    }


def test_forks_that_wait_for_their_leader_count_in_the_load() -> None:
    engine = Engine(64, max_num_batched_tokens=4)
    engine.step(add(family(3, range(12))))
    load = engine.core.load()
    assert (load.num_running, load.num_waiting) == (1, 2)
    engine.step(Abort("f1"))
    assert engine.core.load().num_waiting == 1
    engine.step(Abort("f0"))
    load = engine.core.load()
    assert load.num_running + load.num_waiting == 1
