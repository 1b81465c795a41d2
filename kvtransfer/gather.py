"""One prompt's KV from several sources, each with a range of the KV heads, as data. No clock, no I/O, no tasks.

Every source's part is a transfer of its own (`handoff`), into the same pages. `on_gather(gather, event)` says when the
parts open, and what their ends mean together:

| invariant | how |
| --- | --- |
| nothing is pulled unless the sources make the whole | `Begin`: all joined, `coverage_fault` found nothing |
| no page is VALID without every source's part | COMPLETE comes with the last `Arrived` |
| the first failure is the whole's, the others end | every part that has not ended gets an `EndPart` |
| pages are freed once, under no writer | `Resolve` comes once, when every part is ARRIVED or OVER |
| one first token | parts that say different things of the prompt fail the whole |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from pdserve.core.layout import KVLayout
from pdserve.kvtransfer.convert import HeadShard, coverage_fault
from pdserve.kvtransfer.handoff import TERMINAL, ManifestFacts, TransferState


class PartState(StrEnum):
    """Where one source's part is."""

    WAITING = "waiting"
    JOINED = "joined"
    OPEN = "open"
    ARRIVED = "arrived"
    ENDING = "ending"
    OVER = "over"


P, T = PartState, TransferState
SETTLED = frozenset({P.ARRIVED, P.OVER})
"""Nothing of such a part writes any more."""

# WAITING for its welcome; JOINED we know its heads; OPEN pages may come; ENDING it failed or was told to end, and may
# still be written.
PART_TRANSITIONS: Mapping[PartState, frozenset[PartState]] = {
    P.WAITING: frozenset({P.JOINED, P.ENDING}),
    P.JOINED: frozenset({P.OPEN, P.ENDING}),
    P.OPEN: frozenset({P.ARRIVED, P.ENDING}),
    P.ENDING: frozenset({P.OVER}),
    P.ARRIVED: frozenset(),
    P.OVER: frozenset(),
}
GATHER_TRANSITIONS: Mapping[TransferState, frozenset[TransferState]] = {
    T.INIT: frozenset({T.PULLING, T.FAILED, T.ABORTED}),
    T.PULLING: frozenset({T.COMPLETE, T.FAILED, T.ABORTED}),
    T.COMPLETE: frozenset(),
    T.FAILED: frozenset(),
    T.ABORTED: frozenset(),
}
SHARD_FAILED = "SHARD_FAILED"
"""Why a part ends though nothing is wrong with it."""


@dataclass(frozen=True, slots=True)
class Part:
    """One source's part.

    Attributes:
        state: Where it is.
        shard: What the source has; set once it joined.
        facts: Its manifest; set once it arrived.
    """

    state: PartState = P.WAITING
    shard: HeadShard | None = None
    facts: ManifestFacts | None = None


@dataclass(frozen=True, slots=True)
class Gather:
    """All parts of one transfer.

    Attributes:
        ours: Layout of our pages.
        parts: The sources' parts; the first one's source samples.
        state: INIT until all are open, then PULLING until a terminal state.
        reason: Why it ended.
        message: The same for an operator; may be empty.
        num_late: Events dropped because they came too late or twice.
    """

    ours: KVLayout
    parts: tuple[Part, ...]
    state: TransferState = T.INIT
    reason: str = ""
    message: str = ""
    num_late: int = 0

    @classmethod
    def of(cls, ours: KVLayout, num_parts: int) -> Gather:
        """Nothing is known of any source yet."""
        assert num_parts >= 1
        return cls(ours, (Part(),) * num_parts)

    @property
    def is_settled(self) -> bool:
        """No source can write into our pages any more."""
        return all(part.state in SETTLED for part in self.parts)

    @property
    def may_free_pages(self) -> bool:
        """True once it has ended and no source can write any more."""
        return self.state in TERMINAL and self.is_settled


# ---- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Joined:
    """A source of the same identity said which heads it has."""

    part: int
    shard: HeadShard


@dataclass(frozen=True, slots=True)
class Arrived:
    """A part is complete: all its pages are there and verified, and nothing of it writes any more."""

    part: int
    facts: ManifestFacts


@dataclass(frozen=True, slots=True)
class Failed:
    """A part will not be complete; it may be written until `Over`."""

    part: int
    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Over:
    """Nothing of a part that did not arrive writes any more."""

    part: int


@dataclass(frozen=True, slots=True)
class Ended:
    """Our owner ends all of it.

    Attributes:
        state: FAILED or ABORTED.
        reason: UPPER_SNAKE_CASE.
        message: For an operator.
    """

    state: TransferState
    reason: str
    message: str = ""


GatherEvent = Joined | Arrived | Failed | Over | Ended


# ---- actions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """Open every part."""


@dataclass(frozen=True, slots=True)
class EndPart:
    """End a part that has not ended; feed `Over` or `Arrived` when nothing of it writes any more."""

    part: int
    reason: str


@dataclass(frozen=True, slots=True)
class Decide:
    """How it ends is known; pages may be written until `Resolve`."""


@dataclass(frozen=True, slots=True)
class Resolve:
    """The pages are VALID (COMPLETE) or may be freed."""


GatherAction = Begin | EndPart | Decide | Resolve


# ---- what happens ---------------------------------------------------------------------------------------------------


def on_gather(gather: Gather, event: GatherEvent) -> tuple[Gather, list[GatherAction]]:
    """Advances a transfer from several sources.

    Args:
        gather: Where it is.
        event: What happened.

    Returns:
        Where it is now, and what to do, in order.
    """
    match event:
        case Joined():
            return _joined(gather, event)
        case Arrived():
            return _arrived(gather, event)
        case Failed():
            return _failed(gather, event)
        case Over():
            if gather.parts[event.part].state is not P.ENDING:
                return _late(gather)
            return _over(gather, event.part)
        case Ended():
            assert event.state in (T.FAILED, T.ABORTED)
            return _late(gather) if gather.state in TERMINAL else _ended(gather, event, event.reason)


def _joined(gather: Gather, event: Joined) -> tuple[Gather, list[GatherAction]]:
    if gather.parts[event.part].state is not P.WAITING:
        return _late(gather)
    gather = _part_moved(gather, event.part, P.JOINED, shard=event.shard)
    shards = [part.shard for part in gather.parts if part.shard is not None]
    if any(part.state is not P.JOINED for part in gather.parts):
        return gather, []
    if (fault := coverage_fault(shards, gather.ours)) is not None:
        return _ended(gather, Ended(T.FAILED, "SHARDS", fault), SHARD_FAILED)
    for index in range(len(gather.parts)):
        gather = _part_moved(gather, index, P.OPEN)
    return _moved(gather, T.PULLING), [Begin()]


def _arrived(gather: Gather, event: Arrived) -> tuple[Gather, list[GatherAction]]:
    state = gather.parts[event.part].state
    if state is P.ENDING:  # it was complete before it was told to end
        return _over(gather, event.part)
    if state is not P.OPEN:
        return _late(gather)
    gather = _part_moved(gather, event.part, P.ARRIVED, facts=event.facts)
    for index, part in enumerate(gather.parts):
        if part.facts is not None and (fault := _disagreement(index, part.facts, event)) is not None:
            return _ended(gather, Ended(T.FAILED, "SHARDS_DISAGREE", fault), SHARD_FAILED)
    if any(part.state is not P.ARRIVED for part in gather.parts):
        return gather, []
    first = gather.parts[0].facts
    assert first is not None
    return _moved(gather, T.COMPLETE, "FINISHED" if first.finished else "COMPLETE"), [Decide(), Resolve()]


def _failed(gather: Gather, event: Failed) -> tuple[Gather, list[GatherAction]]:
    state = gather.parts[event.part].state
    if state in SETTLED:
        return _late(gather)
    if state is P.ENDING:  # as it was told to
        return gather, []
    gather = _part_moved(gather, event.part, P.ENDING)
    return _ended(gather, Ended(T.FAILED, event.reason, event.message), SHARD_FAILED)


def _over(gather: Gather, part: int) -> tuple[Gather, list[GatherAction]]:
    gather = _part_moved(gather, part, P.OVER)
    return gather, [Resolve()] if gather.is_settled else []


def _ended(gather: Gather, event: Ended, told: str) -> tuple[Gather, list[GatherAction]]:
    """Ends what has not ended; `told` is what the sources hear."""
    gather = _moved(gather, event.state, event.reason, event.message)
    actions: list[GatherAction] = [Decide()]
    for index, part in enumerate(gather.parts):
        if part.state not in SETTLED and part.state is not P.ENDING:
            gather = _part_moved(gather, index, P.ENDING)
            actions.append(EndPart(index, told))
    return gather, [*actions, Resolve()] if gather.is_settled else actions


def _disagreement(index: int, facts: ManifestFacts, event: Arrived) -> str | None:
    """Their pages may be of unlike sizes; everything else that they say of the prompt is the same."""
    if replace(facts, num_pages=0) == replace(event.facts, num_pages=0):
        return None
    return f"source {index} says {_said(facts)}, source {event.part} says {_said(event.facts)}"


def _said(facts: ManifestFacts) -> str:
    what = f"token {facts.token_id} at index {facts.index} after {facts.num_tokens} tokens"
    return what + (", the last one" if facts.finished else "")


def _moved(gather: Gather, state: TransferState, reason: str = "", message: str = "") -> Gather:
    assert state in GATHER_TRANSITIONS[gather.state], f"{gather.state} -> {state}"
    return replace(gather, state=state, reason=reason, message=message)


def _part_moved(
    gather: Gather,
    index: int,
    state: PartState,
    *,
    shard: HeadShard | None = None,
    facts: ManifestFacts | None = None,
) -> Gather:
    part = gather.parts[index]
    assert state in PART_TRANSITIONS[part.state], f"part {index}: {part.state} -> {state}"
    part = Part(state, shard or part.shard, facts or part.facts)
    return replace(gather, parts=(*gather.parts[:index], part, *gather.parts[index + 1 :]))


def _late(gather: Gather) -> tuple[Gather, list[GatherAction]]:
    return replace(gather, num_late=gather.num_late + 1), []
