"""Fair shares among tenants by virtual token counters. Source: Sheng et al. 2024, "Fairness in Serving Large Language
Models", algorithm 2.

A tenant's counter rises by the tokens that it is served: a prompt's when it starts, an output token's when it is
sampled. Who starts next is the first of the waiting tenant with the smallest counter; ties go to the one chosen longest
ago. A tenant that comes back from idle is lifted, so that it cannot save up: to the counter of the waiting tenant that
was chosen longest ago, or of the last one that left when none waits. (The paper lifts to the smallest counter. Ours is
between the smallest and the largest: that is all that the paper's proof uses, and an endless stream of new tenants
cannot pass one by.) What was charged for a prompt that was not computed, since its request was aborted, is the
tenant's credit: it pays for what is served next. So counters never fall.

Two tenants that wait all the time: their served costs differ by at most 2 max(largest prompt, 2 * tokens in all pages).
Bounded wait: nobody who comes from idle precedes the waiting tenant that was chosen longest ago.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count

from pdserve.core.request import Request
from pdserve.engine.lines import Line, Refusal, SortedLine, age, refuse_priority, to_compute
from pdserve.engine.sequence import Sequence

MAX_IDLE_TENANTS = 1024
"""Idle tenants whose counters are remembered. Beyond it the smallest are forgotten: they have the least to lose, and
one below the next lift loses nothing."""


class Tenant:
    """One tenant's account.

    Attributes:
        counter: Cost served, with lifts; it never falls.
        credit: Cost that the counter has in advance.
        turn: When it was last chosen, or began to wait: a number that only grows.
        num_waiting: Its sequences that have not started.
        num_started: Its sequences that have, and live.
    """

    __slots__ = ("counter", "credit", "num_started", "num_waiting", "turn")

    def __init__(self) -> None:
        self.counter = 0.0
        self.credit = 0.0
        self.turn = 0
        self.num_waiting = 0
        self.num_started = 0

    @property
    def key(self) -> tuple[float, int]:
        """Who has the smallest goes first; it only grows."""
        return (self.counter, self.turn)

    def charge(self, cost: float) -> None:
        """Counts what is served."""
        paid = min(self.credit, cost)
        self.credit -= paid
        self.counter += cost - paid


class FairPolicy:
    """Implements `lines.Policy`; one per engine.

    Args:
        decode_weight: Cost of an output token; a prompt token's is 1.
    """

    def __init__(self, decode_weight: float) -> None:
        self._decode_weight = decode_weight
        self._tenants: dict[str, Tenant] = {}
        self._charged: dict[str, int] = {}  # for prompts, by sequence
        self._by_turn: dict[str, Tenant] = {}  # those that wait; the one chosen longest ago first
        self._turns = count(1)
        self._last: Tenant | None = None  # the last that left, of those that waited

    def line(self) -> Line:
        """See `lines.Policy`."""
        return FairLine(self._tenants)

    def precedes(self, a: Sequence, b: Sequence) -> bool:
        """See `lines.Policy`."""
        mine, theirs = (self._tenants[s.request.tenant].key for s in (a, b))
        return (mine, a.order) < (theirs, b.order)

    def refusal(self, request: Request) -> Refusal | None:
        """See `lines.Policy`."""
        return refuse_priority(request)

    def arrive(self, seq: Sequence) -> None:
        """Counts one more that waits; a tenant that comes back from idle is lifted."""
        name = seq.request.tenant
        tenant = self._tenants.setdefault(name, Tenant())
        if not tenant.num_waiting:
            lift = next(iter(self._by_turn.values()), self._last)
            if lift is not None and lift.counter > tenant.counter:
                tenant.credit = max(0.0, tenant.credit - (lift.counter - tenant.counter))
                tenant.counter = lift.counter
            self._take_turn(name, tenant)
        tenant.num_waiting += 1

    def start(self, seq: Sequence) -> None:
        """Charges what will be computed of the prompt."""
        name = seq.request.tenant
        tenant = self._tenants[name]
        tenant.num_started += 1
        self._charged[seq.key] = cost = to_compute(seq)
        tenant.charge(cost)
        self._take_turn(name, tenant)
        self._leave(name, tenant)

    def sampled(self, seq: Sequence) -> None:
        """Charges an output token."""
        self._tenants[seq.request.tenant].charge(self._decode_weight)

    def end(self, seq: Sequence) -> None:
        """Forgets the sequence, and idle tenants when they are too many; what its prompt did not take is credit."""
        name = seq.request.tenant
        tenant = self._tenants[name]
        if seq.admitted:
            tenant.num_started -= 1
            charged = self._charged.pop(seq.key)
            if len(seq.tokens) == seq.num_initial:  # nothing sampled: it may have ended within its prompt
                tenant.credit += min(charged, max(0, seq.num_initial - seq.num_computed))
        else:
            self._leave(name, tenant)
        if not tenant.num_waiting and not tenant.num_started:
            self._forget_some()

    def counters(self) -> dict[str, float]:
        """Counter by tenant, of those that are remembered."""
        return {name: tenant.counter for name, tenant in self._tenants.items()}

    def _leave(self, name: str, tenant: Tenant) -> None:
        """One of the tenant's sequences does not wait any more."""
        tenant.num_waiting -= 1
        if not tenant.num_waiting:
            del self._by_turn[name]
            self._last = tenant

    def _take_turn(self, name: str, tenant: Tenant) -> None:
        tenant.turn = next(self._turns)
        self._by_turn.pop(name, None)
        self._by_turn[name] = tenant

    def _forget_some(self) -> None:
        if len(self._tenants) <= 2 * MAX_IDLE_TENANTS:  # not each time: sorting them costs
            return
        idle = [name for name, t in self._tenants.items() if not t.num_waiting and not t.num_started]
        idle.sort(key=lambda name: self._tenants[name].counter)
        for name in idle[: max(0, len(idle) - MAX_IDLE_TENANTS)]:
            del self._tenants[name]


class FairLine:
    """A `lines.Line` whose head is the oldest sequence of the tenant with the smallest key.

    Keys only grow, so no entry of the heap is above the truth: one that comes up out of date is put right there.

    Args:
        tenants: The accounts; read only.
    """

    def __init__(self, tenants: Mapping[str, Tenant]) -> None:
        self._tenants = tenants
        self._lines: dict[str, SortedLine] = {}  # none is empty
        self._heap: list[tuple[tuple[float, int], int, str, SortedLine]] = []  # one per line, and some for lines gone
        self._serials = count()
        self._num = 0

    def push(self, seq: Sequence) -> None:
        """See `Line`."""
        name = seq.request.tenant
        if (line := self._lines.get(name)) is None:
            line = self._lines[name] = SortedLine(age)
            heappush(self._heap, (self._tenants[name].key, next(self._serials), name, line))
            if len(self._heap) > 2 * len(self._lines) + 16:
                self._heap = [entry for entry in self._heap if self._lines.get(entry[2]) is entry[3]]
                heapify(self._heap)
        line.push(seq)
        self._num += 1

    def remove(self, seq: Sequence) -> None:
        """See `Line`."""
        name = seq.request.tenant
        self._lines[name].remove(seq)
        self._num -= 1
        if not self._lines[name]:
            del self._lines[name]

    def head(self) -> Sequence | None:
        """See `Line`."""
        while self._heap:
            key, serial, name, line = self._heap[0]
            if self._lines.get(name) is not line:
                heappop(self._heap)
            elif key != (now := self._tenants[name].key):
                heapreplace(self._heap, (now, serial, name, line))
            else:
                return line.head()
        return None

    def __iter__(self) -> Iterator[Sequence]:
        """All; in no certain order."""
        return (seq for line in self._lines.values() for seq in line)

    def __len__(self) -> int:
        return self._num
