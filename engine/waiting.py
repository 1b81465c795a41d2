"""WaitingQueue: sequences that wait to run, in the order in which they may start.

1. with pages: pulled from elsewhere, they only lack a place to run           by age
2. preempted                                                                   by age
3. new                                                                         by the policy
4. as 2 and 3, of hand-offs whose destination has not reserved                 so: behind all others

So the policy orders only what has not started: nothing new starts before what has given way, but for this: sequences
with long prompts stand in lines of their own, so that others, new ones too, pass when no further long one may start.
"""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.engine.lines import Line, Policy, SortedLine, age
from pdserve.engine.sequence import Sequence

_NUM_CLASSES = 5
_NEW = (2, 4)


class WaitingQueue:
    """See the module.

    Args:
        policy: Orders what has not started.
        long_tokens: A sequence with more tokens than this to compute is long; None: none is.
    """

    def __init__(self, policy: Policy, long_tokens: int | None = None) -> None:
        self._policy = policy
        self._long_tokens = long_tokens
        self._lines: list[tuple[Line, Line]] = []  # per class: the others, the long ones
        for i in range(_NUM_CLASSES):
            make = policy.line if i in _NEW else lambda: SortedLine(age)
            self._lines.append((make(), make()))

    def push(self, seq: Sequence) -> None:
        """Takes a sequence in; what decides its place must not change while it waits."""
        seq.long = self._long_tokens is not None and seq.goal - seq.num_computed > self._long_tokens
        self._lines[_class(seq)][seq.long].push(seq)

    def remove(self, seq: Sequence) -> None:
        """Lets a sequence out, from wherever it stands."""
        self._lines[_class(seq)][seq.long].remove(seq)

    def head(self, with_long: bool = True) -> Sequence | None:
        """Who starts next, or None.

        Args:
            with_long: False: the first that is not long.
        """
        for others, long in self._lines:
            first, other = others.head(), long.head() if with_long else None
            if first is None or other is None:
                if (only := first or other) is not None:
                    return only
            else:
                return other if self.precedes(other, first) else first
        return None

    def precedes(self, a: Sequence, b: Sequence) -> bool:
        """Says whether `a` may have pages before `b`; both wait, here or for their KV."""
        mine, theirs = _class(a), _class(b)
        if mine != theirs:
            return mine < theirs
        return self._policy.precedes(a, b) if mine in _NEW else a.order < b.order

    def with_pages(self) -> list[Sequence]:
        """Those that have pages already."""
        return [*self._lines[0][0], *self._lines[0][1]]

    def __contains__(self, seq: object) -> bool:
        return any(s is seq for s in self)

    def __iter__(self) -> Iterator[Sequence]:
        """All; in no certain order."""
        return (seq for pair in self._lines for line in pair for seq in line)

    def __len__(self) -> int:
        return sum(len(line) for pair in self._lines for line in pair)

    def check(self) -> None:
        """Proves that every sequence stands where it belongs."""
        for i, pair in enumerate(self._lines):
            for is_long, line in enumerate(pair):
                for seq in line:
                    assert (_class(seq), seq.long) == (i, bool(is_long)), f"{seq.key} stands in the wrong line"


def _class(seq: Sequence) -> int:
    if seq.page_table:
        return 0
    return (3 if seq.unreserved else 1) + (not seq.admitted)
