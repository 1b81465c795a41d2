"""Both sides' tables, explored: every interleaving to a stated depth.

Two networks: one that loses, doubles and reorders messages, which is more than gRPC does; and one that keeps their
order and dies as a whole, as a control stream does. Time is virtual: a step is an event.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from pdserve.kvtransfer import handoff as h
from pdserve.kvtransfer.handoff import TERMINAL, SinkTransfer, SourceTransfer, TransferState
from pdserve.kvtransfer.transport import SourcePageRef

NUM_PAGES, LEASE_S = 2, 1.0
MAX_PAGES = 3
PAGES = tuple(SourcePageRef(10 + i, 1, 5) for i in range(MAX_PAGES))
MANIFEST = h.ManifestFacts(NUM_PAGES, 16, 42, 0, b"digest")


@dataclass(frozen=True)
class World:
    """Both sides, the messages on their way, and the one pull that may run.

    Attributes:
        reading: The running pull has a read in flight at the source.
        was_read: That read has ended well.
        arrived: Pages that pulls brought.
        num_final: Pages that the engine has finished.
    """

    source: SourceTransfer
    sink: SinkTransfer
    to_sink: tuple[h.SinkEvent, ...] = ()
    to_source: tuple[h.SourceEvent, ...] = ()
    published: frozenset[SourcePageRef] = frozenset()
    asked: tuple[SourcePageRef, ...] = ()
    withdrawing: bool = False
    reading: bool = False
    was_read: bool = False
    arrived: int = 0
    num_final: int = 0
    computed: bool = False
    freed: bool = False
    resolved: bool = False
    doubled: bool = False
    now: float = 0.0
    ordered: bool = False
    may_finish: bool = False

    @property
    def num_pages(self) -> int:
        return self.source.num_pages

    @property
    def wanted(self) -> frozenset[SourcePageRef]:
        return frozenset(PAGES[self.sink.num_cached_pages : self.num_pages])


def begin(num_cached: int, num_pages: int = NUM_PAGES, ordered: bool = False, may_finish: bool = False) -> World:
    sink = SinkTransfer(num_pages, num_cached, 16, b"digest")
    opened = h.Opened(num_cached)
    source = SourceTransfer(num_pages, LEASE_S)
    return World(source, sink, to_source=(opened,), ordered=ordered, may_finish=may_finish)


def changed(world: World, **changes: object) -> World:
    """`replace` for the many worlds, several times as fast."""
    new = object.__new__(World)
    new.__dict__.update(world.__dict__, **changes)
    return new


def source_step(world: World, event: h.SourceEvent) -> World:
    before = world.source
    after, actions = h.on_source(before, event, world.now)
    assert before.state not in TERMINAL or after.state is before.state, "a terminal state changed"
    world = changed(world, source=after)
    for action in actions:
        match action:
            case h.Announce():
                assert after.num_cached_pages is not None and action.first_page >= after.num_cached_pages
                assert not world.withdrawing, "published after the end"
                world = changed(world, published=world.published | set(action.pages))
                world = changed(world, to_sink=(*world.to_sink, h.PagesFinal(action.first_page, action.pages)))
            case h.SendManifest():
                assert not world.withdrawing, "a manifest after the end"
                assert action.manifest.finished or world.published == world.wanted, "a manifest before its pages"
                world = changed(world, to_sink=(*world.to_sink, h.Computed(action.manifest)))
            case h.SendClosed():
                ended = h.Ended(TransferState.FAILED, action.reason, by_peer=True)
                world = changed(world, to_sink=(*world.to_sink, ended))
            case h.Withdraw():
                assert not world.withdrawing, "withdrawn twice"
                world = changed(world, withdrawing=True, published=frozenset(), reading=False)
            case h.ReportEnded():
                assert not world.freed, "ended twice"
                world = changed(world, freed=True)
    assert world.freed == after.may_free_pages
    return world


def sink_step(world: World, event: h.SinkEvent) -> World:
    before = world.sink
    after, actions = h.on_sink(before, event, world.now)
    assert before.state not in TERMINAL or after.state is before.state, "a terminal state changed"
    world = changed(world, sink=after)
    for action in actions:
        match action:
            case h.Pull():
                assert not before.pulling or isinstance(event, h.PullEnded), "two pulls at once"
                assert action.position >= after.num_cached_pages
                world = changed(world, asked=action.pages, was_read=False, reading=False)
            case h.CancelPull():
                assert after.pulling
            case h.SendClosed():
                ended = h.Ended(action.state, action.reason, by_peer=True)
                world = changed(world, to_source=(*world.to_source, ended))
            case h.Resolve():
                assert not world.resolved, "resolved twice"
                assert not after.pulling, "freed under a writer"
                world = changed(world, resolved=True)
    assert world.resolved == after.may_free_pages
    if after.state is TransferState.COMPLETE:
        assert after.manifest is not None
        whole = world.arrived == world.num_pages - after.num_cached_pages
        assert whole or after.manifest.finished, "complete without all pages"
    return world


def pull_ended(world: World, error: str | None) -> World:
    arrived = world.arrived + (len(world.asked) if error is None else 0)
    return sink_step(changed(world, arrived=arrived, reading=False, was_read=False), h.PullEnded(1, error))


def without(messages: tuple[object, ...], at: int) -> tuple[object, ...]:
    return messages[:at] + messages[at + 1 :]


def delivered_anyhow(w: World) -> Iterator[World]:
    """In any order, lost, or doubled once."""
    for at, message in enumerate(w.to_sink):
        left = changed(w, to_sink=without(w.to_sink, at))
        yield sink_step(left, message)
        yield left
        if not w.doubled:
            yield sink_step(changed(w, doubled=True), message)
    for at, ask in enumerate(w.to_source):
        left = changed(w, to_source=without(w.to_source, at))
        yield source_step(left, ask)
        yield left
        if not w.doubled:
            yield source_step(changed(w, doubled=True), ask)


def delivered_in_order(w: World) -> Iterator[World]:
    """The oldest of each direction; or the stream dies, and both sides hear of it."""
    if w.to_sink:
        yield sink_step(changed(w, to_sink=w.to_sink[1:]), w.to_sink[0])
    if w.to_source:
        yield source_step(changed(w, to_source=w.to_source[1:]), w.to_source[0])
    lost = h.Ended(TransferState.FAILED, "PEER_LOST", by_peer=True)
    yield source_step(sink_step(changed(w, to_sink=(), to_source=()), lost), lost)


def successors(w: World) -> Iterator[World]:
    if w.freed and w.resolved:
        return
    yield from delivered_in_order(w) if w.ordered else delivered_anyhow(w)
    manifest = replace(MANIFEST, num_pages=w.num_pages)
    if w.num_final < w.num_pages and not w.computed:
        page = PAGES[w.num_final : w.num_final + 1]
        yield source_step(changed(w, num_final=w.num_final + 1), h.PagesFinal(w.num_final, page))
    if not w.computed and w.may_finish:
        yield source_step(changed(w, computed=True), h.Computed(replace(manifest, finished=True)))
    if not w.computed and w.num_final == w.num_pages:
        yield source_step(changed(w, computed=True), h.Computed(manifest))
    if w.source.lease_expires_s is not None and w.now < 2:
        yield source_step(changed(w, now=w.now + 1), h.Tick())
    if w.source.lease_expires_s is not None:
        yield source_step(w, h.Renewed())
    yield source_step(w, h.Ended(TransferState.ABORTED, "ABORTED"))
    yield source_step(w, h.Ended(TransferState.FAILED, "PEER_LOST", by_peer=True))
    if w.withdrawing and not w.reading and not w.freed:
        yield source_step(w, h.Withdrawn())
    yield sink_step(w, h.Ended(TransferState.ABORTED, "ABORTED"))
    yield sink_step(w, h.Ended(TransferState.FAILED, "PEER_LOST", by_peer=True))
    if w.sink.pulling:
        yield pull_ended(w, "PEER_GONE")
        if w.was_read:
            yield pull_ended(w, None)
        elif w.reading:
            yield changed(w, reading=False, was_read=True)
        elif set(w.asked) <= w.published:
            yield changed(w, reading=True)


LONG = [pytest.mark.slow, pytest.mark.timeout(900)]
ALL = 60
"""More steps than any run has."""


def key(w: World) -> World:
    """Equal for worlds that differ only in counters and times that decide nothing."""
    sink, source = w.sink, w.source
    if (sink.num_late, sink.num_bytes, sink.first_pull_s, sink.manifest_s, sink.reason) != (0, 0, None, None, ""):
        sink = replace(sink, num_late=0, num_bytes=0, first_pull_s=None, last_pull_s=None, manifest_s=None, reason="")
    to_sink, to_source = w.to_sink, w.to_source
    if not w.ordered:
        to_sink, to_source = tuple(sorted(to_sink, key=hash)), tuple(sorted(to_source, key=hash))
    if source.num_late or source.reason:
        source = replace(source, num_late=0, reason="")
    return changed(w, source=source, sink=sink, to_sink=to_sink, to_source=to_source)


def check(w: World) -> None:
    if w.reading:
        assert not w.freed, "a freed page is being read"
        assert w.source.state not in TERMINAL, "a page is read though its lease has ended"
    if w.freed and w.resolved:
        for event in (
            h.Opened(0),
            h.PagesFinal(0, PAGES[:NUM_PAGES]),
            h.Computed(MANIFEST),
            h.Renewed(),
            h.Tick(),
            h.Withdrawn(),
        ):
            assert h.on_source(w.source, event, 9.0) == (replace(w.source, num_late=w.source.num_late + 1), [])
        for event in (
            h.PagesFinal(0, PAGES[:NUM_PAGES]),
            h.Computed(MANIFEST),
            h.PullEnded(1),
            h.Ended(TransferState.FAILED, "X"),
        ):
            assert h.on_sink(w.sink, event, 9.0) == (replace(w.sink, num_late=w.sink.num_late + 1), [])
        return
    # from everywhere both sides come to rest when they are told to
    end = source_step(w, h.Ended(TransferState.ABORTED, "ABORTED"))
    if not end.freed:
        end = source_step(end, h.Withdrawn())
    end = sink_step(end, h.Ended(TransferState.ABORTED, "ABORTED"))
    if end.sink.pulling:
        end = pull_ended(end, "CANCELLED")
    assert end.freed and end.resolved


@pytest.mark.parametrize(
    ("num_pages", "num_cached", "network", "may_finish", "depth"),
    [
        (2, 0, "any order", False, 7),
        pytest.param(2, 1, "any order", False, ALL, marks=LONG),  # one page to pull
        (2, 1, "in order", True, ALL),
        pytest.param(2, 1, "any order", True, ALL, marks=LONG),
        pytest.param(2, 0, "any order", True, 9, marks=LONG),
        pytest.param(2, 0, "in order", True, ALL, marks=LONG),
        pytest.param(3, 0, "in order", True, ALL, marks=LONG),
    ],
)
def test_every_interleaving_keeps_the_invariants(
    num_pages: int, num_cached: int, network: str, may_finish: bool, depth: int
) -> None:
    seen = {key(begin(num_cached, num_pages, network == "in order", may_finish))}
    frontier, ends = list(seen), set()
    for _ in range(depth):
        reached: list[World] = []
        for world in frontier:
            for following in successors(world):
                normal = key(following)
                before = len(seen)
                seen.add(normal)  # hashed once
                if len(seen) > before:
                    check(normal)
                    reached.append(normal)
                    ends.add((normal.source.state, normal.sink.state))
        frontier = reached
    assert (TransferState.ABORTED, TransferState.FAILED) in ends
    if depth == ALL:
        assert not frontier, "not exhausted"
        wanted = (TransferState.COMPLETE, TransferState.FAILED, TransferState.ABORTED)
        assert {sink for _, sink in ends} >= set(wanted)
        assert {source for source, _ in ends} >= {*wanted, TransferState.EXPIRED}


def play(world: World, *steps: h.SourceEvent) -> World:
    """The undisturbed run: every message arrives in order, every pull succeeds at once."""
    queue = list(steps)
    while queue or world.to_sink or world.to_source or world.sink.pulling:
        if world.to_source:
            world = source_step(changed(world, to_source=world.to_source[1:]), world.to_source[0])
        elif world.to_sink:
            world = sink_step(changed(world, to_sink=world.to_sink[1:]), world.to_sink[0])
        elif world.sink.pulling:
            assert set(world.asked) <= world.published
            world = pull_ended(world, None)
        else:
            world = source_step(world, queue.pop(0))
    return world


def test_the_undisturbed_run_completes_on_both_sides() -> None:
    world = play(begin(0), h.PagesFinal(0, PAGES[:1]), h.PagesFinal(1, PAGES[1:2]), h.Computed(MANIFEST))
    assert (world.source.state, world.sink.state) == (TransferState.COMPLETE, TransferState.COMPLETE)
    assert world.resolved and world.withdrawing and not world.freed
    assert source_step(world, h.Withdrawn()).freed


@pytest.mark.parametrize(
    "wrong",
    [
        replace(MANIFEST, num_pages=3),
        replace(MANIFEST, num_tokens=17),
        replace(MANIFEST, prompt_digest=b"other"),
        replace(MANIFEST, prompt_digest=b"other", finished=True),
    ],
)
def test_a_wrong_manifest_never_completes(wrong: h.ManifestFacts) -> None:
    world = play(begin(0), h.PagesFinal(0, PAGES[:NUM_PAGES]), h.Computed(wrong))
    assert world.sink.state is TransferState.FAILED and world.sink.reason == "MANIFEST_MISMATCH"


def test_a_lease_is_extended_and_never_shortened() -> None:
    transfer = SourceTransfer(num_pages=0, lease_s=2.0)
    transfer, _ = h.on_source(transfer, h.Renewed(), 50.0)
    assert transfer.lease_expires_s is None, "the clock starts when the prompt is computed"
    transfer, _ = h.on_source(transfer, h.Computed(replace(MANIFEST, num_pages=0)), 100.0)
    for renewed, expires in ((101.0, 103.0), (99.0, 103.0), (102.5, 104.5)):
        transfer, _ = h.on_source(transfer, h.Renewed(), renewed)
        assert transfer.lease_expires_s == expires
    assert h.on_source(transfer, h.Tick(), 104.4)[0].state not in TERMINAL
    assert h.on_source(transfer, h.Tick(), 104.5)[0].state is TransferState.EXPIRED


def test_no_table_lets_a_terminal_state_go() -> None:
    for table in (h.SOURCE_TRANSITIONS, h.SINK_TRANSITIONS):
        assert set(table) >= set(TransferState) - {TransferState.PULLING}
        for state, following in table.items():
            assert following == frozenset() if state in TERMINAL else following >= TERMINAL
