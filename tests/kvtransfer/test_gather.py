"""Several sources' parts as one transfer: all orders of events, with a fault at each."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.layout import KVLayout
from pdserve.kvtransfer import gather as g
from pdserve.kvtransfer.convert import HeadShard
from pdserve.kvtransfer.gather import Gather, PartState
from pdserve.kvtransfer.handoff import TERMINAL, ManifestFacts, TransferState

OURS = KVLayout.uniform(num_layers=2, num_kv_heads=4, head_dim=8, page_size=16, dtype="float32")
FACTS = ManifestFacts(num_pages=3, num_tokens=40, token_id=7, index=0, prompt_digest=b"digest")


def shard(first: int, num: int, page_size: int = 16) -> HeadShard:
    layout = KVLayout.uniform(num_layers=2, num_kv_heads=num, head_dim=8, page_size=page_size, dtype="float32")
    return HeadShard(layout, (first,))


WHOLE = {2: [shard(0, 2), shard(2, 2, 32)], 3: [shard(0, 1), shard(1, 2), shard(3, 1)]}
"""Sources that make the whole, by their number."""


@dataclass
class World:
    """A `Gather` and its parts as they really are: what each may do next, and who writes.

    Attributes:
        writing: Per part: it was opened and may be written.
        ended: Per part: it was told to end.
        settled: Per part: it told that nothing of it writes any more.
    """

    gather: Gather
    begun: bool = False
    decided: bool = False
    resolved: bool = False
    writing: list[bool] = field(default_factory=list)
    failing: list[bool] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)
    settled: list[bool] = field(default_factory=list)

    @classmethod
    def of(cls, num: int) -> World:
        return cls(Gather.of(OURS, num), False, False, False, *([False] * num for _ in range(4)))

    def feed(self, event: g.GatherEvent) -> None:
        before = self.gather
        self.gather, actions = g.on_gather(before, event)
        assert before.state not in TERMINAL or self.gather.state is before.state, "a terminal state changed"
        for action in actions:
            match action:
                case g.Begin():
                    assert not self.begun and all(part.shard for part in self.gather.parts)
                    self.begun, self.writing = True, [True] * len(self.writing)
                case g.EndPart():
                    assert not self.ended[action.part] and not self.settled[action.part]
                    assert not self.failing[action.part], "told to end though it failed"
                    self.ended[action.part] = True
                case g.Decide():
                    assert not self.decided and self.gather.state in TERMINAL
                    self.decided = True
                case g.Resolve():
                    assert not self.resolved and self.decided
                    assert not any(self.writing), "freed under a writer"
                    self.resolved = True
        assert self.decided == (self.gather.state in TERMINAL)
        if self.decided:
            ends = zip(self.settled, self.failing, self.ended, strict=True)
            assert all(any(end) for end in ends), "a source was not told that it is over"
        assert self.resolved == self.gather.may_free_pages
        if self.gather.state is TransferState.COMPLETE:
            assert all(part.state is PartState.ARRIVED for part in self.gather.parts), "VALID without every part"

    def arrive(self, part: int, facts: ManifestFacts = FACTS) -> None:
        self.writing[part], self.settled[part] = False, True
        self.feed(g.Arrived(part, facts))

    def fail(self, part: int, reason: str = "PEER_LOST") -> None:
        self.failing[part] = True
        self.feed(g.Failed(part, reason))

    def over(self, part: int) -> None:
        self.writing[part], self.settled[part] = False, True
        self.feed(g.Over(part))


@settings(max_examples=60)
@given(st.integers(2, 3), st.data())
def test_any_order_of_events_with_a_fault_anywhere_keeps_the_invariants(num: int, data: st.DataObject) -> None:
    w, shards = World.of(num), list(WHOLE[num])
    if data.draw(st.integers(0, 5)) == 0:
        shards[0] = shard(0, 3)  # overlaps
    facts = [replace(FACTS, num_pages=index) for index in range(num)]
    if data.draw(st.integers(0, 5)) == 0:
        facts[-1] = replace(FACTS, token_id=8)
    for _ in range(40):
        steps = [("abort", 0), ("overdue", 0)] if data.draw(st.integers(0, 9)) == 0 else []
        for i, part in enumerate(w.gather.parts):
            if w.settled[i]:
                continue
            if part.state is PartState.WAITING and not w.ended[i]:
                steps.append(("join", i))
            if part.state is PartState.OPEN:
                steps.append(("arrive", i))
            if w.ended[i] and w.begun:
                steps.append(("arrive", i))  # it was complete before it heard
            if w.ended[i] or w.failing[i]:
                steps.append(("over", i))
            if not w.failing[i] and (w.ended[i] or data.draw(st.integers(0, 7)) == 0):
                steps.append(("fail", i))
        if not steps:
            break
        step, i = data.draw(st.sampled_from(steps))
        match step:
            case "join":
                w.feed(g.Joined(i, shards[i]))
            case "arrive" if not w.failing[i]:
                w.arrive(i, facts[i])
            case "over":
                w.over(i)
            case "fail":
                w.fail(i)
            case "abort":
                w.feed(g.Ended(TransferState.ABORTED, "ABORTED"))
            case "overdue":
                w.feed(g.Ended(TransferState.FAILED, "PULL_SLOW"))
    # from everywhere it comes to rest when it is told to
    for _ in range(2):
        w.feed(g.Ended(TransferState.ABORTED, "ABORTED"))
    for i in range(num):
        if not w.settled[i]:
            w.over(i)
    assert w.resolved
    if w.gather.state is TransferState.COMPLETE:
        assert w.gather.parts[0].facts is not None
        assert all(p.facts and p.facts.token_id == w.gather.parts[0].facts.token_id for p in w.gather.parts)
        assert shards == WHOLE[num], "complete though the sources overlap"
    # what comes afterwards changes nothing but the count
    for event in (
        g.Joined(0, shards[0]),
        g.Arrived(0, FACTS),
        g.Failed(0, "X"),
        g.Over(0),
        g.Ended(TransferState.ABORTED, "X"),
    ):
        before = w.gather
        assert g.on_gather(before, event) == (replace(before, num_late=before.num_late + 1), [])


@pytest.mark.parametrize("num", [2, 3])
def test_whichever_part_fails_wherever_the_others_are_all_of_them_end(num: int) -> None:
    found: dict[tuple[PartState, ...], Gather] = {}
    todo = [Gather.of(OURS, num)]
    while todo:
        at = todo.pop()
        states = tuple(part.state for part in at.parts)
        if at.state in TERMINAL or states in found:
            continue
        found[states] = at
        todo += [g.on_gather(at, g.Joined(i, WHOLE[num][i]))[0] for i in range(num)]
        todo += [g.on_gather(at, g.Arrived(i, FACTS))[0] for i in range(num)]
    assert len(found) == 2 * (2**num - 1), "WAITING or JOINED each, then OPEN or ARRIVED each"
    for states, at in found.items():
        for failing in (i for i in range(num) if states[i] not in g.SETTLED):
            others = [i for i in range(num) if i != failing and states[i] not in g.SETTLED]
            after, actions = g.on_gather(at, g.Failed(failing, "PEER_LOST"))
            assert actions == [g.Decide(), *(g.EndPart(i, g.SHARD_FAILED) for i in others)]
            for i in (*others, failing):
                assert not after.may_free_pages
                after, actions = g.on_gather(after, g.Over(i))
            assert after.may_free_pages and actions == [g.Resolve()]


def begun(num: int = 2) -> World:
    w = World.of(num)
    for i, one in enumerate(WHOLE[num]):
        assert not w.begun
        w.feed(g.Joined(i, one))
    assert w.begun
    return w


def test_it_is_complete_with_the_last_part() -> None:
    w = begun(3)
    for i in (2, 0, 1):
        assert w.gather.state is TransferState.PULLING
        w.arrive(i)
    assert w.gather.state is TransferState.COMPLETE and w.resolved


@pytest.mark.parametrize(
    ("shards", "says"),
    [
        ([shard(0, 3), shard(2, 2)], "KV head 2 comes from two sources"),
        ([shard(0, 1), shard(2, 2)], "KV head 1 comes from no source"),
        ([shard(0, 4), shard(0, 4)], "KV head 0 comes from two sources"),
    ],
)
def test_sources_that_do_not_make_the_whole_are_refused_before_anything_is_asked(
    shards: list[HeadShard], says: str
) -> None:
    w = World.of(2)
    for i, one in enumerate(shards):
        w.feed(g.Joined(i, one))
    assert not w.begun and w.ended == [True, True]
    assert (w.gather.state, w.gather.reason) == (TransferState.FAILED, "SHARDS")
    assert says in w.gather.message


def test_the_first_failure_is_the_one_that_is_told() -> None:
    w = begun(3)
    w.arrive(2)
    w.fail(1, "CORRUPT_PAGE")
    assert w.gather.reason == "CORRUPT_PAGE" and w.ended == [True, False, False]
    w.fail(0, "ABORTED")
    w.over(0)
    assert not w.resolved, "the part that failed may still be written"
    w.over(1)
    assert w.resolved and w.gather.reason == "CORRUPT_PAGE"


@pytest.mark.parametrize(
    "other",
    [replace(FACTS, token_id=8), replace(FACTS, index=1), replace(FACTS, finished=True), replace(FACTS, num_tokens=41)],
)
def test_sources_that_say_different_things_of_the_prompt_fail_it(other: ManifestFacts) -> None:
    w = begun()
    w.arrive(0)
    w.arrive(1, other)
    assert (w.gather.state, w.gather.reason) == (TransferState.FAILED, "SHARDS_DISAGREE")
    assert "source 0 says token 7 at index 0 after 40 tokens, source 1 says" in w.gather.message
    assert w.resolved


def test_pages_of_unlike_sizes_are_no_disagreement() -> None:
    w = begun()
    w.arrive(0)
    w.arrive(1, replace(FACTS, num_pages=2))
    assert w.gather.state is TransferState.COMPLETE


def test_aborts_from_everywhere_and_twice_end_it_once() -> None:
    for joined in range(3):
        w = World.of(2)
        for i in range(joined):
            w.feed(g.Joined(i, WHOLE[2][i]))
        for _ in range(2):
            w.feed(g.Ended(TransferState.ABORTED, "CANCELLED"))
        assert w.ended == [True, True] and not w.resolved
        w.over(1)
        w.over(0)
        assert w.resolved and w.gather.reason == "CANCELLED" and w.gather.num_late == 1


def test_tables_name_every_state() -> None:
    assert set(g.PART_TRANSITIONS) == set(PartState)
    assert all(g.PART_TRANSITIONS[state] == frozenset() for state in g.SETTLED)
    assert all(following == frozenset() for state, following in g.GATHER_TRANSITIONS.items() if state in TERMINAL)
