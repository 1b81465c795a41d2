"""Preemption by swap: the bytes come back, nobody waits for ever, and no host page is lost."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.request import Request
from pdserve.engine.fake import expected_tokens
from pdserve.engine.sequence import SequenceState
from pdserve.engine.step import (
    Abort,
    Activate,
    Add,
    Command,
    Event,
    PageCopyKind,
    ReservationRefused,
    Reserve,
    Reserved,
    RunnerOutput,
    SchedulerOutput,
    SequenceFailed,
)
from pdserve.engine.swap import PreemptionCosts
from tests.engine.engines import PAGE_SIZE, Engine, Streams, request

COSTS = PreemptionCosts(
    step_points=((8, 0.1), (16, 0.2), (32, 0.3)),
    context_s=0.001,
    token_budget=32,
    page_copy_s=0.01,
    swap_fixed_s=0.05,
    page_size=4,
)


class Watched(Engine):
    """An engine that keeps what its steps were."""

    def __init__(self, num_pages: int, **options: object) -> None:
        super().__init__(num_pages, **options)  # type: ignore[arg-type]
        self.outputs: list[SchedulerOutput] = []
        execute = self.runner.execute

        def watched(output: SchedulerOutput) -> RunnerOutput:
            self.outputs.append(output)
            return execute(output)

        self.runner.execute = watched  # type: ignore[method-assign]

    @property
    def num_computed(self) -> int:
        return sum(output.num_tokens for output in self.outputs)

    def num_copies(self, kind: PageCopyKind) -> int:
        return sum(copy.kind is kind for output in self.outputs for copy in output.copies)


def tight(num_requests: int = 6) -> list[Request]:
    return [request(f"r{i}", range(i, i + 6), max_tokens=20, arrival_s=i) for i in range(num_requests)]


def until_swapped(engine: Engine, commands: Iterable[Command]) -> tuple[list[Event], str]:
    """Steps until a sequence is swapped out; its key."""
    events = list(engine.step(*commands).events)
    for _ in range(100):
        for seq in engine.core._scheduler._sequences.values():
            if seq.host_pages:
                return events, seq.key
        events += engine.step().events
    raise AssertionError("nothing was swapped")


@pytest.mark.parametrize("num_pages", [8, 9, 13])
def test_what_is_swapped_is_not_computed_again(num_pages: int) -> None:
    requests = tight()
    engine = Watched(num_pages, num_host_pages=64, prefix_caching=False)
    Streams(engine.run(*map(Add, requests))).check(requests)
    load = engine.core.load()
    assert load.preemptions.num_swaps > 0 and load.preemptions.num_recomputes == 0
    assert engine.num_computed == sum(len(r.prompt_token_ids) + 19 for r in requests)
    assert engine.num_copies(PageCopyKind.SWAP_OUT) == engine.num_copies(PageCopyKind.SWAP_IN) > 0
    assert load.preemptions.num_free_host_pages == 64
    moved = engine.num_copies(PageCopyKind.SWAP_OUT) * len(engine.page(0))
    assert load.preemptions.swapped_out_bytes == load.preemptions.swapped_in_bytes == moved

    recomputing = Watched(num_pages)
    Streams(recomputing.run(*map(Add, requests))).check(requests)
    assert recomputing.core.load().preemptions.num_swaps == 0 < recomputing.core.load().preemptions.num_recomputes
    assert recomputing.num_computed > engine.num_computed


def test_pages_that_the_prefix_cache_kept_are_not_swapped_in() -> None:
    requests = tight()
    engine, without = Watched(8, num_host_pages=64), Watched(8, num_host_pages=64, prefix_caching=False)
    Streams(engine.run(*map(Add, requests))).check(requests)
    Streams(without.run(*map(Add, requests))).check(requests)
    assert engine.num_computed == without.num_computed
    assert 0 < engine.num_copies(PageCopyKind.SWAP_IN) < engine.num_copies(PageCopyKind.SWAP_OUT)


def test_every_byte_comes_back() -> None:
    engine = Watched(8, num_host_pages=64)
    requests = tight()
    events = list(engine.step(*map(Add, requests)).events)
    table: list[int] = []
    before: list[bytes] = []
    num_swapped = 0
    seq = engine.core._scheduler._sequences["r1"]
    while "r1" in engine.core._scheduler._sequences:
        if seq.page_table:
            table = list(seq.page_table)
            before = [bytes(engine.page(p)) for p in table]
        events += engine.step().events
        if engine.outputs and seq.host_pages:
            host = [copy for copy in engine.outputs[-1].copies if copy.target in seq.host_pages]
            if host and host[0].kind is PageCopyKind.SWAP_OUT:
                num_swapped += 1
                size = len(engine.page(0))
                kept = [bytes(engine.host_memory[h * size : (h + 1) * size]) for h in seq.host_pages]
                assert kept == before[: len(kept)]
    assert num_swapped > 0
    Streams(events + engine.run()).check(requests)


def test_a_wrong_byte_in_the_host_pool_is_a_wrong_token() -> None:
    engine = Engine(8, num_host_pages=64)
    requests = tight(4)
    events, key = until_swapped(engine, map(Add, requests))
    for at in range(len(engine.host_memory)):
        engine.host_memory[at] ^= 1
    streams = Streams(events + engine.run())
    streams.check(r for r in requests if r.key != key)
    with pytest.raises(AssertionError, match="wrong tokens"):
        streams.check(r for r in requests if r.key == key)


def test_a_full_host_pool_and_the_decision_lead_to_recompute() -> None:
    requests = tight()
    for options in ({"num_host_pages": 1}, {"num_host_pages": 64, "prefer_swap": lambda _: False}):
        engine = Engine(8, **options)  # type: ignore[arg-type]
        Streams(engine.run(*map(Add, requests))).check(requests)
        assert engine.core.load().preemptions.num_swaps == 0 < engine.core.load().preemptions.num_recomputes
    mixed = Engine(8, num_host_pages=64, prefer_swap=lambda num_tokens: num_tokens > 10)
    Streams(mixed.run(*map(Add, requests))).check(requests)
    assert mixed.core.load().preemptions.num_swaps > 0 and mixed.core.load().preemptions.num_recomputes > 0


def test_abort_and_failure_free_host_pages() -> None:
    engine = Engine(8, num_host_pages=64)
    _, key = until_swapped(engine, map(Add, tight(4)))
    engine.step(Abort(key))
    assert engine.core.load().preemptions.num_free_host_pages == 64
    engine = Engine(8, num_host_pages=64)
    until_swapped(engine, map(Add, tight(4)))
    engine.memory = engine.core._runner._kv = None  # type: ignore[attr-defined, assignment]
    assert any(isinstance(e, SequenceFailed) for e in engine.step().events)
    load = engine.core.load()
    assert (load.num_free_pages, load.preemptions.num_free_host_pages) == (8, 64)


def test_hand_offs_are_never_swapped() -> None:
    engine = Engine(8, max_num_seqs=4, max_unreserved_fraction=1.0, num_host_pages=64)
    engine.run(*(Add(request(f"h{i}", range(12), arrival_s=i), handoff=True) for i in range(2)))
    engine.run(Add(request("reserved", range(24)), handoff=True, reserved=True))
    load = engine.core.load()
    assert load.preemptions.num_recomputes > 0 and load.preemptions.num_swaps == 0


def test_a_fork_that_waits_with_shared_pages_is_swapped_with_its_prompt() -> None:
    """Its last page has not been copied yet: what it would copy goes to the host pool instead."""
    engine = Engine(7, max_num_seqs=2, num_host_pages=64)
    old = request("old", range(4), 17, arrival_s=0)
    leader, fork = (request(key, range(6), 9, arrival_s=1) for key in ("leader", "fork"))
    events, key = until_swapped(engine, [Add(old), Add(leader, forks=(fork,))])
    assert key == "fork"
    Streams(events + engine.run()).check([old, leader, fork])


def test_pages_being_copied_out_are_not_reserved_in_that_step() -> None:
    """A reservation's pages may be written as soon as it is told of, while the step's copies are still to be done."""
    engine = Watched(8, num_host_pages=64, max_num_batched_tokens=64)
    requests = [request("old", range(8), 16, arrival_s=0), request("young", range(16), 9, arrival_s=1)]
    streams = Streams(engine.step(*map(Add, requests)).events)
    engine.now = 1.0
    pulled = request("pulled", range(8), 4, arrival_s=-1.0)  # older than both, but what gave way comes back before it
    events = engine.step(Reserve(pulled, 1000.0)).events
    streams.read(events)
    for _ in range(40):
        if reserved := [e for e in events if isinstance(e, Reserved)]:
            break
        events = engine.step().events
        streams.read(events)
    assert reserved
    swapped = [output.step for output in engine.outputs if output.copies]
    assert swapped and engine.outputs[-1].step not in swapped
    donor = Engine(8)
    made = donor.run(Add(pulled, handoff=True, reserved=True))
    pages = [p for e in made for p in getattr(e, "pages", ())]
    engine.pull(donor, pages, reserved[0].pages)
    streams.read(engine.run(Activate("pulled", expected_tokens(range(8), 1)[0])))
    streams.check(requests)
    assert streams.tokens["pulled"] == expected_tokens(range(8), 4)[1:]


def test_expired_reservations_are_refused_in_steps_with_copies_too() -> None:
    engine = Watched(8, num_host_pages=64)
    engine.step(*map(Add, tight()))
    while engine.core.load().num_running:
        key = f"expired {len(engine.outputs)}"
        events = engine.step(Reserve(request(key, range(28)), engine.now)).events  # wants the whole pool
        assert engine.core.load().num_running == 0 or ReservationRefused(key, 1.0) in events
    assert engine.num_copies(PageCopyKind.SWAP_OUT) > 0


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=8),
    num_pages=st.integers(8, 20),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(6, 24),
    num_host_pages=st.integers(0, 20),
    min_swapped=st.integers(0, 16),
)
def test_all_end_in_bounded_steps_and_the_oldest_is_never_preempted(
    sizes: list[tuple[int, int]],
    num_pages: int,
    max_num_seqs: int,
    budget: int,
    num_host_pages: int,
    min_swapped: int,
) -> None:
    engine = Engine(
        num_pages,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        num_host_pages=num_host_pages,
        prefer_swap=lambda num_tokens: num_tokens >= min_swapped,
    )
    requests = [request(f"r{i}", range(n), m, arrival_s=i) for i, (n, m) in enumerate(sizes)]
    # The oldest computes at least a token per step and loses none: alone, one after the other, would be no faster.
    bound = sum(n + m for n, m in sizes)
    streams = Streams()
    commands: list[Command] = [Add(r) for r in requests]
    for _ in range(bound):
        oldest = next(iter(engine.core._scheduler._running), None)
        streams.read(engine.step(*commands).events)
        commands = []
        assert oldest is None or oldest.state in (SequenceState.RUNNING, SequenceState.FINISHED)
    streams.check(requests)
    load = engine.core.load()
    assert (load.num_free_pages, load.preemptions.num_free_host_pages) == (num_pages, num_host_pages)


def test_costs_lie_on_lines_through_the_points() -> None:
    assert COSTS.recompute_s(4) == pytest.approx(0.1)  # a step is never shorter than the smallest
    assert COSTS.recompute_s(12) == pytest.approx(0.15)
    assert COSTS.recompute_s(24) == pytest.approx(0.25)
    assert COSTS.swap_s(1) == COSTS.swap_s(4) == pytest.approx(0.07)
    assert COSTS.swap_s(5) == pytest.approx(0.09)


def test_long_sequences_are_computed_in_chunks_that_look_back() -> None:
    assert COSTS.recompute_s(64) == pytest.approx(2 * 0.3 + 32 * 32 * 0.001)
    assert COSTS.recompute_s(72) == pytest.approx(2 * 0.3 + 0.1 + (32 * 32 + 8 * 64) * 0.001)
    for n in range(1, 200):
        assert COSTS.recompute_s(n) <= COSTS.recompute_s(n + 1) + 1e-9


def test_beyond_the_points_the_line_goes_on() -> None:
    wide = PreemptionCosts(
        step_points=((8, 0.1), (32, 0.4)),
        context_s=0.0,
        token_budget=1024,
        page_copy_s=0.01,
        swap_fixed_s=0.0,
        page_size=PAGE_SIZE,
    )
    assert wide.recompute_s(128) == pytest.approx(0.4 + 96 * 0.3 / 24)
    assert ceil(wide.recompute_s(1024)) == 13


def test_the_cheaper_one_is_preferred_at_each_length() -> None:
    """With a fixed price for swapping and a price per page above that of its tokens only some lengths are swapped."""
    assert [COSTS.prefer_swap(n) for n in (1, 8, 64)] == [True, True, True]
    dear = PreemptionCosts(
        step_points=((8, 0.1), (32, 0.4)),
        context_s=0.001,
        token_budget=32,
        page_copy_s=0.03,
        swap_fixed_s=0.2,
        page_size=4,
    )
    for n in (8, 32, 256):
        assert dear.prefer_swap(n) == (dear.swap_s(n) < dear.recompute_s(n))
    assert [dear.prefer_swap(n) for n in (8, 32, 256)] == [False, False, True]
