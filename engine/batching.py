"""Batching: who may join the batch, and what becomes of a member that has finished. Pure: time is an argument.

    continuous  joins and leaves at every step
    static      takes what waits once the batch before has ended, and runs to its longest member
    dynamic     as static, but waits up to a window for the batch to become full

A fixed batch (static, dynamic) keeps its finished members as padding: their slots, their pages and a row of every step.
They leave together when nobody runs any more; one by one only when a running member has no page to grow into. A member
that is preempted or aborted leaves at once; a preempted one waits for the next batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from pdserve.core.sampling import SamplingParams
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import ScheduledSequence

BATCHINGS = ("continuous", "dynamic", "static")
DEFAULT_WINDOW_MS = 50.0
_GREEDY = SamplingParams(temperature=0.0)


class Batching(Protocol):
    """An admission gate.

    Attributes:
        keeps_finished: Finished members stay as padding until the batch has ended.
    """

    keeps_finished: bool

    def room(self, now: float, num_members: int, num_waiting: int) -> int:
        """How many waiting sequences may start now; asked once per step.

        Args:
            now: Monotonic seconds.
            num_members: Sequences in the batch, padding included.
            num_waiting: Sequences that could start; for a fixed batch, with the forks that wait for their prompt.
        """
        ...

    def join(self, num: int) -> None:
        """So many of those have started."""
        ...

    def next_wakeup(self) -> float | None:
        """When to ask again although nothing happens; monotonic seconds."""
        ...


class ContinuousBatching:
    """Fills every free slot at every step.

    Args:
        size: Slots.
    """

    keeps_finished = False

    def __init__(self, size: int) -> None:
        self._size = size

    def room(self, now: float, num_members: int, num_waiting: int) -> int:
        """See `Batching`."""
        return self._size - num_members

    def join(self, num: int) -> None:
        """See `Batching`."""

    def next_wakeup(self) -> float | None:
        """See `Batching`."""
        return None


class FixedBatching:
    """One batch after the other. What the budget keeps out of a batch's first step, and the forks of its members, join
    in the steps after it.

    Args:
        size: Slots.
        window_s: Seconds for which a batch that is not full waits for more; counted from when its first was seen.
    """

    keeps_finished = True

    def __init__(self, size: int, window_s: float = 0.0) -> None:
        self._size = size
        self._window_s = window_s
        self._room = 0
        self._since: float | None = None  # when the first that waits was seen
        self._opens: float | None = None

    def room(self, now: float, num_members: int, num_waiting: int) -> int:
        """See `Batching`."""
        if not num_waiting:
            self._since = None
        elif self._since is None:
            self._since = now
        if num_members == 0:
            self._room, self._opens = 0, None
            if self._since is not None and num_waiting < self._size and now < self._since + self._window_s:
                self._opens = self._since + self._window_s
            else:
                self._room = self._size
        self._room = min(self._room, num_waiting)  # of those counted some may have been aborted
        return self._room

    def join(self, num: int) -> None:
        """See `Batching`."""
        self._room -= num
        if num:
            self._since = None  # those left over are the first of the next batch

    def next_wakeup(self) -> float | None:
        """See `Batching`."""
        return self._opens


class Padding:
    """Finished members of a fixed batch, with the row that each of them costs in every step."""

    __slots__ = ("_rows",)

    def __init__(self) -> None:
        self._rows: list[tuple[Sequence, ScheduledSequence]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for seq, _ in self._rows)

    def add(self, seq: Sequence) -> None:
        """Keeps a finished sequence, which has room for its last token; that is the row, written again and again."""
        at = len(seq.tokens) - 1
        row = ScheduledSequence(
            seq.key, at, seq.tokens[at : at + 1], seq.page_table, _GREEDY, 0, seq.tokens, seq.num_prompt
        )
        self._rows.append((seq, row))

    def rows(self) -> list[ScheduledSequence]:
        """One decode per member; whoever computes them throws the samples away."""
        return [row for _, row in self._rows]

    def pop(self) -> Sequence | None:
        """Lets the last one go, whose pages are needed."""
        return self._rows.pop()[0] if self._rows else None

    def clear(self) -> list[Sequence]:
        """Lets all go: the batch has ended."""
        rows, self._rows = self._rows, []
        return [seq for seq, _ in rows]


def make_batching(name: str, size: int, window_ms: float | None = None) -> Batching:
    """The batching that `--batching` names.

    Args:
        name: One of `BATCHINGS`.
        size: Slots, >= 1.
        window_ms: Of dynamic; default: `DEFAULT_WINDOW_MS`.
    """
    if name == "continuous":
        return ContinuousBatching(size)
    if name == "static":
        return FixedBatching(size)
    assert name == "dynamic", name
    return FixedBatching(size, (DEFAULT_WINDOW_MS if window_ms is None else window_ms) / 1000)
