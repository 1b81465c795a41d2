"""Queues: what waits, what runs, what wants pages for a transfer; all sorted. A sequence's state says where it is."""

from __future__ import annotations

from bisect import insort
from itertools import takewhile

from pdserve.engine.sequence import Sequence, SequenceState


class Queues:
    """Attributes are for reading; the methods change them.

    Attributes:
        waiting: WAITING: those that hold pages first, then by age.
        running: RUNNING, by age.
        reservations: WAITING_KV without pages yet, by age.
        num_waiting_tokens: What those that wait have to compute.
    """

    __slots__ = ("num_waiting_tokens", "reservations", "running", "waiting")

    def __init__(self) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.reservations: list[Sequence] = []
        self.num_waiting_tokens = 0

    def enter(self, seq: Sequence) -> None:
        """Adds a sequence to the queue of its state, if that has one."""
        if seq.state is SequenceState.WAITING:
            insort(self.waiting, seq, key=waiting_key)
            self.num_waiting_tokens += seq.goal - seq.num_computed
        elif seq.state is SequenceState.RUNNING:
            insort(self.running, seq, key=age)
        elif seq.state is SequenceState.WAITING_KV and not seq.granted:
            insort(self.reservations, seq, key=age)

    def leave(self, seq: Sequence) -> None:
        """Takes it out again; call it before anything changes that `enter` looked at."""
        if seq.state is SequenceState.WAITING:
            self.waiting.remove(seq)
            self.num_waiting_tokens -= seq.goal - seq.num_computed
        elif seq.state is SequenceState.RUNNING:
            self.running.remove(seq)
        elif seq.state is SequenceState.WAITING_KV and not seq.granted:
            self.reservations.remove(seq)

    def victim(self, seq: Sequence) -> Sequence | None:
        """Whose pages a running sequence may take to grow: the youngest holder that is younger than it."""
        # Sequences that wait with pages are victims at any age: they may be waiting for this one's place to run.
        victims = list(takewhile(lambda s: s.page_table, self.waiting))
        victims += (s for s in self.running if s.order > seq.order and not (s.handoff and s.reserved))
        return max(victims, key=age, default=None)

    def num_pending_tokens(self) -> int:
        """Tokens known but not computed, of all that wait or run."""
        return self.num_waiting_tokens + sum([seq.goal - seq.num_computed for seq in self.running])

    def check(self, seq: Sequence) -> None:
        """Proves that a living sequence is where its state says, and nowhere else."""
        assert (seq in self.running) == (seq.state is SequenceState.RUNNING)
        assert (seq in self.waiting) == (seq.state is SequenceState.WAITING)
        assert (seq in self.reservations) == (seq.state is SequenceState.WAITING_KV and not seq.granted)

    def check_order(self) -> None:
        """Proves that the queues are sorted and counted right."""
        assert self.running == sorted(self.running, key=age)
        assert self.reservations == sorted(self.reservations, key=age)
        assert self.waiting == sorted(self.waiting, key=waiting_key)
        assert self.num_waiting_tokens == sum(seq.goal - seq.num_computed for seq in self.waiting)


def age(seq: Sequence) -> tuple[float, ...]:
    """Sort key: oldest first."""
    return seq.order


def waiting_key(seq: Sequence) -> tuple[float, ...]:
    """Sort key of those that wait."""
    return (not seq.page_table, *seq.order)
