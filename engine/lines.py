"""What the scheduler knows of a policy: a line that sequences wait in, and what the policy is told of them.

A policy orders who STARTS. Who is preempted, and who gets on first once started, goes by age alone (`Sequence.order`):
see docs/decisions/0007-two-orders.md.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Protocol

from pdserve.core.request import Request
from pdserve.engine.sequence import Sequence, SequenceState

Key = Callable[[Sequence], tuple[float, ...]]
"""Sort key of a sequence, unique, the same for as long as it waits."""


Refusal = tuple[str, str]
"""Reason and message."""


class Line(Protocol):
    """Sequences that wait, and which of them is the first."""

    def push(self, seq: Sequence) -> None:
        """Takes a sequence in."""
        ...

    def remove(self, seq: Sequence) -> None:
        """Lets a sequence out, from wherever it stands."""
        ...

    def head(self) -> Sequence | None:
        """The first, or None."""
        ...

    def __iter__(self) -> Iterator[Sequence]:
        """All of them; in no certain order."""
        ...

    def __len__(self) -> int: ...


class Policy(Protocol):
    """Orders sequences that have not started yet. It hears of a sequence in this order: arrive, start, sampled, end."""

    def line(self) -> Line:
        """Makes an empty line in this policy's order."""
        ...

    def precedes(self, a: Sequence, b: Sequence) -> bool:
        """Says whether `a` starts before `b` if both could start now."""
        ...

    def refusal(self, request: Request) -> Refusal | None:
        """Why this policy cannot honour what the request asks for; None when it can."""
        ...

    def arrive(self, seq: Sequence) -> None:
        """The sequence is about to wait for the first time (state WAITING, or WAITING_KV: its KV will be pulled)."""
        ...

    def start(self, seq: Sequence) -> None:
        """The sequence has pages for the first time."""
        ...

    def sampled(self, seq: Sequence) -> None:
        """A token of the sequence was sampled here."""
        ...

    def end(self, seq: Sequence) -> None:
        """The sequence leaves, started or not."""
        ...


class SortedLine:
    """A `Line` in the order of a sort key."""

    __slots__ = ("_key", "_seqs")

    def __init__(self, key: Key) -> None:
        self._key = key
        self._seqs: list[Sequence] = []

    def push(self, seq: Sequence) -> None:
        """See `Line`."""
        insort(self._seqs, seq, key=self._key)

    def remove(self, seq: Sequence) -> None:
        """See `Line`."""
        at = bisect_left(self._seqs, self._key(seq), key=self._key)
        assert self._seqs[at] is seq, f"sequence {seq.key} does not wait here"
        del self._seqs[at]

    def head(self) -> Sequence | None:
        """See `Line`."""
        return self._seqs[0] if self._seqs else None

    def __iter__(self) -> Iterator[Sequence]:
        """In order."""
        return iter(self._seqs)

    def __len__(self) -> int:
        return len(self._seqs)


def age(seq: Sequence) -> tuple[float, ...]:
    """Sort key: the oldest first."""
    return seq.order


def to_compute(seq: Sequence) -> int:
    """Tokens that this engine computes before it samples: none for a sequence whose KV will be pulled."""
    return 0 if seq.state is SequenceState.WAITING_KV else seq.goal - seq.num_computed


def refuse_priority(request: Request) -> Refusal | None:
    """Why a policy that is blind to priorities does not take the request; None when it has none."""
    if not request.priority:
        return None
    message = f"priority is {request.priority}; only workers with --scheduling-policy priority honour it: leave it out"
    return "UNSUPPORTED_PARAMETER", message
