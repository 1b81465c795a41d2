"""Forks: sequences of one prompt, of which the first computes it for all.

    leader WAITING ─▶ RUNNING ─▶ prompt computed ──▶ goes on alone
    forks  WAITING_FORK ────────────────┴─ share ──▶ WAITING, with the prompt's pages, or without when there is no room

A leader that ends before that leaves its forks to the first of them. Afterwards nothing ties them: a fork without pages
computes its prompt as any sequence does, so that no order of ends, aborts and preemptions can leave one waiting. Where
the prompt's KV was pulled the leader has it from the start.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdserve.core.request import Request
from pdserve.engine.sequence import Sequence, SequenceState


def same_prefix(a: Request, b: Request) -> bool:
    """Says whether one may fork from the other."""
    return a.prompt_token_ids == b.prompt_token_ids and a.cache_salt == b.cache_salt


class Forks:
    """Knows those that wait for a leader."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def lead(self, family: list[Sequence]) -> Sequence | None:
        """Makes all but the first wait for the first one's prompt.

        Returns:
            The first, to be queued; None of an empty family.
        """
        if not family:
            return None
        leader, *forks = family
        for fork in forks:
            if fork.state is not SequenceState.WAITING_FORK:
                fork.move(SequenceState.WAITING_FORK)
        self._waiting.update(forks)
        leader.forks = tuple(forks)
        return leader

    def release(self, leader: Sequence) -> list[Sequence]:
        """Those that still wait for a leader; they do so no more."""
        forks, leader.forks = leader.forks, ()
        self._waiting.difference_update(forks)
        return [fork for fork in forks if fork.state is SequenceState.WAITING_FORK]

    def end(self, seq: Sequence) -> list[Sequence]:
        """A sequence leaves, whether it waits here or not; returns those that waited for it."""
        self._waiting.discard(seq)
        return self.release(seq) if seq.forks else []

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Proves that those that wait for a leader, and no others, have one."""
        led = set[Sequence]()
        waiting = set[Sequence]()
        for seq in sequences:
            led.update(seq.forks)
            waiting.update([seq] if seq.state is SequenceState.WAITING_FORK else [])
        assert waiting == self._waiting and waiting <= led
