"""The edges of the roles: leases, reservations, and the smallest disaggregated path: two engines, pages copied."""

from __future__ import annotations

import pytest

from pdserve.engine.fake import expected_tokens
from pdserve.engine.page_pool import PageState
from pdserve.engine.step import (
    Abort,
    Activate,
    Add,
    Event,
    MarkReserved,
    PageRef,
    PagesReady,
    ReleaseLease,
    ReservationRefused,
    Reserve,
    Reserved,
    Runner,
    RunnerOutput,
    SamplingFailure,
    SchedulerOutput,
    SequenceFailed,
    TokensSampled,
)
from tests.engine.engines import Engine, Streams, request


def ready(events: list[Event] | tuple[Event, ...], key: str) -> list[PagesReady]:
    return [e for e in events if isinstance(e, PagesReady) and e.key == key]


def reserved(events: tuple[Event, ...]) -> dict[str, tuple[PageRef, ...]]:
    return {e.key: e.pages for e in events if isinstance(e, Reserved)}


@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 37])
@pytest.mark.parametrize("emitted", [(), (7, 8, 9)])
@pytest.mark.parametrize("staged", [False, True])
def test_prefill_here_decode_there(num_prompt: int, emitted: tuple[int, ...], staged: bool) -> None:
    prefill, decode = Engine(16, staged=staged), Engine(16, staged=staged)
    r = request("a", range(num_prompt), 12, emitted=emitted)
    pages = reserved(decode.step(Reserve(r, 5.0)).events)["a"]
    streams, pulled = Streams(), 0
    for events in (prefill.step(Add(r, handoff=True, reserved=True)), *(prefill.step() for _ in range(3))):
        streams.read(events.events)
        for watermark in ready(events.events, "a"):  # pulled while the prefill goes on
            assert watermark.first_page == pulled
            decode.pull(prefill, watermark.pages, pages[pulled : pulled + len(watermark.pages)])
            pulled += len(watermark.pages)
            assert watermark.complete == (pulled == len(pages))
    assert pulled == len(pages) == -(-(num_prompt + len(emitted)) // 4)
    (first,) = streams.tokens["a"]
    assert prefill.pool.count(PageState.HELD) == pulled
    prefill.step(ReleaseLease("a"), ReleaseLease("unknown"))
    assert prefill.pool.num_free == 16

    events = decode.run(Activate("a", first))
    assert next(e.index for e in events if isinstance(e, TokensSampled)) == len(emitted) + 1
    streams.read(events)
    streams.check([r])
    assert decode.pool.num_free == 16


def test_a_first_token_that_ends_the_request_leaves_no_lease() -> None:
    engine = Engine(8)
    events = engine.run(Add(request("a", range(9), 1), handoff=True, reserved=True))
    assert Streams(events).finished == {"a": "length"}
    assert not [e for e in ready(events, "a") if e.complete]
    assert engine.pool.num_free == 8


def test_nothing_is_announced_before_the_destination_has_reserved() -> None:
    engine = Engine(16, max_num_batched_tokens=8)
    events = engine.step(Add(request("a", range(20)), handoff=True)).events
    assert not ready(events, "a")
    (watermark,) = ready(engine.step(MarkReserved("a"), MarkReserved("a")).events, "a")[:1]
    assert (watermark.first_page, len(watermark.pages), watermark.complete) == (0, 2, False)
    engine.run(Add(request("b", range(5)), handoff=True))
    (whole,) = ready(engine.step(MarkReserved("b")).events, "b")
    assert (len(whole.pages), whole.complete) == (2, True)


def test_a_lease_released_early_goes_with_the_first_token() -> None:
    engine = Engine(16, max_num_batched_tokens=8)
    engine.step(Add(request("a", range(20)), handoff=True, reserved=True))
    events = engine.run(ReleaseLease("a"))
    assert not ready(events, "a")
    assert Streams(events).tokens["a"] == expected_tokens(range(20), 1)
    assert engine.pool.num_free == 16


def test_reserved_ones_run_before_unreserved_ones() -> None:
    engine = Engine(64, max_num_seqs=1, max_unreserved_fraction=1.0)
    adds = [Add(request(k, range(4)), handoff=True, reserved=k == "c") for k in "abc"]
    order = [e.key for e in engine.run(*adds, MarkReserved("b")) if isinstance(e, TokensSampled)]
    assert order == ["b", "c", "a"]


def test_unreserved_ones_hold_a_bounded_share_but_one_always_runs() -> None:
    engine = Engine(16, max_num_seqs=8, max_num_batched_tokens=64, max_unreserved_fraction=0.25)
    small = [request(f"s{i}", range(8)) for i in range(3)]
    events = engine.run(*(Add(r, handoff=True) for r in small))
    assert set(Streams(events).tokens) == {"s0", "s1"}
    events = engine.run(MarkReserved("s0"))
    assert set(Streams(events).tokens) == {"s2"}

    alone = Engine(16, max_num_batched_tokens=64, max_unreserved_fraction=0.0)
    assert Streams(alone.run(Add(request("big", range(60)), handoff=True))).tokens


@pytest.mark.parametrize("num_steps", [1, 3])
def test_an_unreserved_one_gives_way_to_a_reserved_one_and_comes_back(num_steps: int) -> None:
    engine = Engine(16, max_num_batched_tokens=32)
    big, small = request("big", range(60), 9), request("small", range(30), 9)
    streams = Streams(engine.step(Add(big, handoff=True)).events)
    for _ in range(num_steps - 1):
        streams.read(engine.step().events)  # after three the big one is leased, its token told
    events = engine.run(Add(small, handoff=True, reserved=True))
    assert ready(events, "small")[-1].complete
    events += engine.run(ReleaseLease("small"), MarkReserved("big"))
    streams.read(events)
    assert streams.tokens == {"big": expected_tokens(range(60), 1), "small": expected_tokens(range(30), 1)}
    pages = [ref for e in ready(events, "big") for ref in e.pages]
    assert len(pages) == 15 and ready(events, "big")[-1].complete
    assert all(engine.pool.generation(p.page_id) == p.generation for p in pages)
    engine.step(ReleaseLease("big"))
    assert engine.pool.num_free == 16


def test_nobody_gives_way_to_a_reserved_one_that_could_not_start_all_the_same() -> None:
    engine = Engine(16, max_num_batched_tokens=64)
    engine.run(Add(request("lease", range(48)), handoff=True, reserved=True))
    engine.run(Add(request("late", range(49)), handoff=True))  # shares the 12 pages of the lease, and has one
    engine.step(Add(request("big", range(100, 120)), handoff=True, reserved=True))
    assert len(engine.core._scheduler._sequences["late"].page_table) == 13
    engine.run(ReleaseLease("lease"))
    assert engine.core._scheduler._sequences["late"].page_table == []
    assert len(engine.core._scheduler._sequences["big"].page_table) == 5


def test_a_lease_that_was_revoked_can_be_released() -> None:
    engine = Engine(16, max_num_batched_tokens=64)
    engine.run(Add(request("big", range(60)), handoff=True))
    engine.run(
        Add(request("small", range(30)), handoff=True, reserved=True),
        Add(request("next", range(20)), handoff=True, reserved=True),
    )
    engine.run(ReleaseLease("big"))
    engine.run(ReleaseLease("small"), ReleaseLease("next"))
    assert engine.pool.num_free == 16


def test_reservations_are_all_or_nothing_and_first_come_first_served() -> None:
    engine = Engine(8)
    first, second, third = (request(k, range(n), 9) for k, n in (("a", 16), ("b", 16), ("c", 4)))
    granted = reserved(engine.step(Reserve(first, 5.0), Reserve(second, 5.0), Reserve(third, 9.0)).events)
    assert list(granted) == ["a"]  # four prompt pages and one to decode into; c does not overtake b
    assert len(granted["a"]) == 4 and engine.pool.num_free == 3
    assert engine.core.next_wakeup() == 5.0
    engine.now = 5.0
    events = engine.step().events
    assert events[0] == ReservationRefused("b", 1.0) and list(reserved(events)) == ["c"]
    assert engine.core.next_wakeup() is None
    engine.step(Abort("a"), Abort("c"))
    assert engine.pool.num_free == 8


def test_a_reservation_that_can_never_fit_or_is_misused_fails() -> None:
    engine = Engine(8)
    (failure,) = engine.step(Reserve(request("a", range(40)), 5.0)).events
    assert isinstance(failure, SequenceFailed) and failure.reason == "PROMPT_TOO_LONG"
    engine.step(Reserve(request("b", range(28), 9), 5.0))
    (failure,) = engine.step(Reserve(request("c", range(4), 9), 5.0), Activate("c", 1)).events
    assert isinstance(failure, SequenceFailed) and failure.reason == "NOT_RESERVED"
    (failure,) = engine.step(Activate("b", 256), Activate("unknown", 1)).events
    assert isinstance(failure, SequenceFailed) and failure.reason == "NOTHING_TO_GENERATE"
    assert engine.pool.num_free == 8


def test_decodes_never_take_pages_that_are_being_filled() -> None:
    engine = Engine(8, max_num_seqs=2)
    running, coming = request("a", range(8), 20), request("b", range(50, 62), 9, arrival_s=1.0)
    streams = Streams(engine.step(Add(running)).events)
    events = engine.step(Reserve(coming, 5.0)).events
    assert reserved(events)
    streams.read(events)
    streams.read(engine.run())  # sits still where its next page would be
    assert engine.pool.count(PageState.FILLING) == 4 and engine.pool.num_free == 0
    assert not streams.finished
    streams.read(engine.run(Abort("b")))
    streams.check([running])


def test_an_activated_one_that_is_preempted_computes_its_prompt_here() -> None:
    prefill, decode = Engine(16), Engine(8, max_num_seqs=1)
    old, new = request("old", range(4), 25), request("new", range(12), 9, arrival_s=1.0)
    streams = Streams(decode.step(Add(old)).events)
    granted = decode.step(Reserve(new, 5.0)).events
    streams.read(granted)
    pages = reserved(granted)["new"]
    events = prefill.run(Add(new, handoff=True, reserved=True))
    decode.pull(prefill, [p for e in ready(events, "new") for p in e.pages], pages)
    streams.read(events)
    streams.read(decode.run(Activate("new", streams.tokens["new"][0])))  # waits with its pages until old needs them
    streams.check([old, new])
    assert decode.pool.num_free == 8


def test_a_reservation_takes_no_pages_before_an_older_sequence_that_was_preempted() -> None:
    engine = Engine(8, max_num_seqs=2)
    old, new = request("old", range(8), 24, arrival_s=0.0), request("new", range(50, 58), 16, arrival_s=1.0)
    late = request("late", range(4), 4, arrival_s=2.0)
    streams = Streams(engine.step(Add(old), Add(new)).events)
    for _ in range(100):
        preempted = engine.core.load().num_waiting == 1
        events = engine.step(*[Reserve(late, 1e9)] * preempted).events
        streams.read(events)
        if preempted:
            break
    assert preempted and not reserved(events)
    for _ in range(100):
        finished = set(streams.finished)
        events = engine.step().events
        streams.read(events)
        if reserved(events):
            break
    assert finished == {"old"}  # pages were free for it before, while the preempted one could not start yet
    streams.read(engine.run(Abort("late")))
    streams.check([old, new])


def test_announced_pages_are_never_taken_for_a_decode() -> None:
    engine = Engine(8, max_num_seqs=2, max_num_batched_tokens=3)
    events = list(engine.step(Add(request("old", range(2), 25, arrival_s=0.0))).events)
    events += engine.run(Add(request("handoff", range(24), 9, arrival_s=1.0), handoff=True, reserved=True))
    pages = [ref for e in ready(events, "handoff") for ref in e.pages]
    assert len(pages) == 6 and ready(events, "handoff")[0].first_page == 0
    assert all(engine.pool.generation(p.page_id) == p.generation for p in pages)
    assert not Streams(events).finished  # the decode waits for the lease to end
    events += engine.run(ReleaseLease("handoff"))
    assert Streams(events).finished == {"old": "length"}


def test_an_older_activated_sequence_waiting_for_a_place_does_not_block_a_running_one() -> None:
    """One place to run, a full pool: the running sequence needs the page of the one that waits for its place."""
    prefill, decode = Engine(16), Engine(6, max_num_seqs=1)
    older, younger = request("older", range(8), 8, arrival_s=0.0), request("younger", range(3), 13, arrival_s=1.0)
    streams = Streams()
    pages = reserved(decode.step(Reserve(older, 50.0)).events)["older"]
    streams.read(decode.step(Add(younger)).events)
    for _ in range(8):  # three prompt pages of the pool's six are left to the younger one; it takes them all
        streams.read(decode.step().events)
    events = prefill.run(Add(older, handoff=True, reserved=True))
    streams.read(events)
    decode.pull(prefill, [p for e in ready(events, "older") for p in e.pages], pages)
    streams.read(decode.run(Activate("older", streams.tokens["older"][0])))
    streams.check([older, younger])
    assert decode.pool.num_free == 6


def test_every_decode_runs_even_beyond_the_token_budget() -> None:
    engine = Engine(64, max_num_seqs=8, max_num_batched_tokens=4)
    requests = [request(f"r{i}", range(i, i + 3), max_tokens=30, arrival_s=i) for i in range(8)]
    source = Engine(64)
    streams = Streams()
    for r in requests:
        pages = reserved(engine.step(Reserve(r, 50.0)).events)[r.key]
        events = source.run(Add(r, handoff=True, reserved=True))
        streams.read(events)
        engine.pull(source, [p for e in ready(events, r.key) for p in e.pages], pages)
    first = engine.step(*(Activate(r.key, streams.tokens[r.key][0]) for r in requests))
    streams.read(first.events)
    steps = [engine.step() for _ in range(3)]
    assert [s.num_tokens for s in steps] == [8, 8, 8]
    for s in steps:
        streams.read(s.events)
    streams.read(engine.run())
    streams.check(requests)


def test_announced_pages_stay_leased_when_the_first_token_ends_the_request() -> None:
    """A reader may be in the middle of them; only its end, told by `ReleaseLease`, frees them."""
    engine = Engine(16, max_num_batched_tokens=8)
    r = request("a", range(20), 1)
    events = list(engine.step(Add(r, handoff=True, reserved=True)).events)
    pages = [p for e in ready(events, "a") for p in e.pages]
    assert len(pages) == 2
    events += engine.run()
    assert [e.finish_reason for e in events if isinstance(e, TokensSampled)] == ["length"]
    assert all(engine.pool.generation(p.page_id) == p.generation for p in pages)
    engine.step(ReleaseLease("a"))
    assert engine.pool.num_free == 16


class Faulty:
    """A runner that cannot choose a token for some sequences."""

    def __init__(self, runner: Runner, bad: set[str]) -> None:
        self._runner, self._bad = runner, bad

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        sampled = self._runner.execute(output).sampled
        failure = SamplingFailure("BAD_LOGITS", "no token", kv_suspect=True)
        return RunnerOutput(
            tuple(failure if t and s.key in self._bad else t for s, t in zip(output.sequences, sampled, strict=True))
        )


def test_a_sequence_without_a_token_fails_alone() -> None:
    engine = Engine(16)
    engine.core._runner = Faulty(engine.runner, {"bad"})
    good = request("good", range(6), 8)
    events = engine.run(Add(good), Add(request("bad", range(5), 8)))
    Streams(e for e in events if e.key == "good").check([good])
    assert [(e.key, e.status, e.reason) for e in events if isinstance(e, SequenceFailed)] == [
        ("bad", "INTERNAL", "BAD_LOGITS")
    ]
    assert engine.pool.num_free == 16


@pytest.mark.parametrize("end", [Abort("bad"), ReleaseLease("bad")])
def test_announced_pages_of_a_failed_hand_off_wait_for_their_reader(end: Abort | ReleaseLease) -> None:
    engine = Engine(16, max_num_batched_tokens=8)
    engine.core._runner = Faulty(engine.runner, {"bad"})
    events = list(engine.step(Add(request("bad", range(20), 8), handoff=True, reserved=True)).events)
    pages = [p for e in ready(events, "bad") for p in e.pages]
    events = engine.run()
    assert [e.key for e in events if isinstance(e, SequenceFailed)] == ["bad"]
    assert pages and all(engine.pool.generation(p.page_id) == p.generation for p in pages)
    engine.step(end)
    assert engine.pool.num_free == 16


def test_an_older_request_that_asks_again_is_served_before_younger_ones() -> None:
    """Pages go by the request's age, not by the time of the ask: a refused request cannot be starved."""
    engine = Engine(4)
    holder = request("holder", range(12), 4, arrival_s=0.0)
    engine.step(Reserve(holder, 50.0))
    engine.step(Reserve(request("younger", range(8), 4, arrival_s=2.0), 50.0))
    engine.step(Reserve(request("older", range(8), 4, arrival_s=1.0), 50.0))
    events = engine.step(Abort("holder")).events
    assert list(reserved(events)) == ["older"]
