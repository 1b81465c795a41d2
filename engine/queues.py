"""Queues: what waits, what runs, what wants pages for a transfer. A sequence's state says where it is.

They also tell the policy of a sequence: it arrives, it is admitted (runs, or has pages to be filled), it ends.
"""

from __future__ import annotations

from bisect import insort

from pdserve.engine.lines import Policy, age
from pdserve.engine.sequence import Sequence, SequenceState
from pdserve.engine.waiting import WaitingQueue


class Queues:
    """Attributes are for reading; the methods change them.

    Attributes:
        waiting: WAITING, in the order in which they may start.
        running: RUNNING, by age.
        reservations: WAITING_KV without pages yet, in the policy's order.
        num_waiting_tokens: What those that wait have to compute.
    """

    __slots__ = ("_policy", "num_waiting_tokens", "reservations", "running", "waiting")

    def __init__(self, policy: Policy, long_tokens: int | None = None) -> None:
        self._policy = policy
        self.waiting = WaitingQueue(policy, long_tokens)
        self.running: list[Sequence] = []
        self.reservations = policy.line()
        self.num_waiting_tokens = 0

    def enter(self, seq: Sequence) -> None:
        """Adds a sequence to the queue of its state, if that has one."""
        if seq.state is SequenceState.WAITING:
            self._arrive(seq)
            self.waiting.push(seq)
            self.num_waiting_tokens += seq.goal - seq.num_computed
        elif seq.state is SequenceState.RUNNING:
            insort(self.running, seq, key=age)
        elif seq.state is SequenceState.WAITING_KV and not seq.granted:
            self._arrive(seq)
            self.reservations.push(seq)

    def admit(self, seq: Sequence) -> None:
        """It starts, or gets pages to be filled, and has left its queue: the policy's part in it is over."""
        if not seq.admitted:
            self._policy.start(seq)
            seq.admitted = True

    def end(self, seq: Sequence) -> None:
        """It is over, and has left its queue."""
        if seq.arrived:
            self._policy.end(seq)

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
        victims = self.waiting.with_pages()
        victims += (s for s in self.running if s.order > seq.order and not (s.handoff and s.reserved))
        return max(victims, key=age, default=None)

    def num_pending_tokens(self) -> int:
        """Tokens known but not computed, of all that wait or run."""
        return self.num_waiting_tokens + sum([seq.goal - seq.num_computed for seq in self.running])

    def check(self, seq: Sequence) -> None:
        """Proves that a living sequence is whole and where its state says, and nowhere else."""
        seq.check()
        assert (seq in self.running) == (seq.state is SequenceState.RUNNING)
        assert (seq in self.waiting) == (seq.state is SequenceState.WAITING)
        assert any(seq is s for s in self.reservations) == (seq.state is SequenceState.WAITING_KV and not seq.granted)

    def check_order(self) -> None:
        """Proves that the queues are sorted and counted right."""
        assert self.running == sorted(self.running, key=age)
        self.waiting.check()
        assert self.num_waiting_tokens == sum(seq.goal - seq.num_computed for seq in self.waiting)

    def _arrive(self, seq: Sequence) -> None:
        if not seq.arrived:
            self._policy.arrive(seq)
            seq.arrived = True
