"""Scheduling policies by name. All but `fair` are sort keys: seconds, fixed when a sequence arrives, lower first.

Every key is the arrival plus a handicap in seconds. So waiting counts one to one against any handicap (linear aging
needs no clock), and nobody who arrives later than (my arrival + my handicap - the least handicap) overtakes me:

policy     handicap                                      overtaken only by arrivals within
fcfs       0                                             0
priority   priority * aging_s_per_level                  (my priority - the least) * aging_s_per_level
sjf        expected work / aging_tokens_per_s            (my work - 1) / aging_tokens_per_s
"""

from __future__ import annotations

from typing import Protocol

from pdserve.core.request import MAX_PRIORITY, Request
from pdserve.engine.fair import FairPolicy
from pdserve.engine.lines import Line, Policy, Refusal, SortedLine, refuse_priority, to_compute
from pdserve.engine.sequence import Sequence

POLICIES = ("fcfs", "priority", "sjf", "fair")
"""What `--scheduling-policy` takes."""

DECODE_WEIGHT = 2.0
"""Cost of an output token; a prompt token's is 1. Source: Sheng et al. 2024, section 5.1."""

DEFAULT_AGING_S_PER_LEVEL = 60.0
DEFAULT_AGING_TOKENS_PER_S = 100.0


class Handicap(Protocol):
    """What a key policy knows; the rest is the same for all."""

    def seconds(self, seq: Sequence) -> float:
        """Seconds that an arriving sequence starts behind its arrival; may be negative."""
        ...

    def learn(self, seq: Sequence) -> None:
        """A sequence has ended here."""
        ...


class KeyPolicy:
    """A policy that is a sort key: arrival plus handicap, then age.

    Args:
        handicap: Of one sequence.
        max_priority: Largest priority up or down; 0: requests with a priority are refused.
    """

    def __init__(self, handicap: Handicap, max_priority: int = 0) -> None:
        self._handicap = handicap
        self._max_priority = max_priority

    def line(self) -> Line:
        """See `Policy`."""
        return SortedLine(_key)

    def precedes(self, a: Sequence, b: Sequence) -> bool:
        """See `Policy`."""
        return _key(a) < _key(b)

    def refusal(self, request: Request) -> Refusal | None:
        """See `Policy`."""
        if not self._max_priority:
            return refuse_priority(request)
        if abs(request.priority) <= self._max_priority:
            return None
        message = f"priority is {request.priority}; it must be in [-{self._max_priority}, {self._max_priority}]"
        return "UNSUPPORTED_PARAMETER", message

    def arrive(self, seq: Sequence) -> None:
        """See `Policy`."""
        seq.rank = seq.request.arrival_s + self._handicap.seconds(seq)

    def start(self, seq: Sequence) -> None:
        """See `Policy`."""

    def sampled(self, seq: Sequence) -> None:
        """See `Policy`."""

    def end(self, seq: Sequence) -> None:
        """See `Policy`."""
        self._handicap.learn(seq)


class NoHandicap:
    """First come, first served."""

    def seconds(self, seq: Sequence) -> float:
        """See `Handicap`."""
        return 0.0

    def learn(self, seq: Sequence) -> None:
        """See `Handicap`."""


class ByPriority(NoHandicap):
    """A level of priority weighs as much as so many seconds of waiting."""

    def __init__(self, aging_s_per_level: float = DEFAULT_AGING_S_PER_LEVEL) -> None:
        self._aging_s_per_level = aging_s_per_level

    def seconds(self, seq: Sequence) -> float:
        """See `Handicap`."""
        return seq.request.priority * self._aging_s_per_level


class ByWork:
    """Shortest job first: a second of waiting weighs as much as so many tokens of expected work.

    The work is what this engine will do for the sequence: its prompt, unless that is computed elsewhere, and twice its
    output, unless that is. How long an output will be is not known: it is taken to be the running mean of what ended
    here, or max_tokens where that is less (or nothing has ended yet). The mean follows the traffic, and a client that
    asks for little is believed.
    """

    _HORIZON = 64  # ends that the mean remembers

    def __init__(self, aging_tokens_per_s: float = DEFAULT_AGING_TOKENS_PER_S) -> None:
        self._aging_tokens_per_s = aging_tokens_per_s
        self._mean = 0.0
        self._num_ended = 0

    def seconds(self, seq: Sequence) -> float:
        """See `Handicap`."""
        return self.work(seq) / self._aging_tokens_per_s

    def work(self, seq: Sequence) -> float:
        """Expected work, in prompt tokens; at least 1."""
        prompt = to_compute(seq)
        if seq.handoff:
            return prompt
        output: float = seq.max_len - seq.num_prompt
        if self._num_ended:
            output = min(output, self._mean)
        return prompt + DECODE_WEIGHT * max(1.0, output - (seq.num_initial - seq.num_prompt))

    def learn(self, seq: Sequence) -> None:
        """Takes the output's length, whatever ended it."""
        length = len(seq.tokens) - seq.num_prompt
        if not seq.handoff and seq.admitted and length:
            self._num_ended = min(self._num_ended + 1, self._HORIZON)
            self._mean += (length - self._mean) / self._num_ended


def fcfs() -> Policy:
    """First come, first served."""
    return KeyPolicy(NoHandicap())


def make_policy(
    name: str, *, aging_s_per_level: float | None = None, aging_tokens_per_s: float | None = None
) -> Policy:
    """The policy of a name.

    Args:
        name: One of `POLICIES`.
        aging_s_per_level: priority: seconds of waiting that make up for one level, > 0; None: the default.
        aging_tokens_per_s: sjf: expected work that a second of waiting makes up for, > 0; None: the default.
    """
    match name:
        case "priority":
            return KeyPolicy(ByPriority(aging_s_per_level or DEFAULT_AGING_S_PER_LEVEL), MAX_PRIORITY)
        case "sjf":
            return KeyPolicy(ByWork(aging_tokens_per_s or DEFAULT_AGING_TOKENS_PER_S))
        case "fair":
            return FairPolicy(decode_weight=DECODE_WEIGHT)
    assert name == "fcfs", name
    return fcfs()


def _key(seq: Sequence) -> tuple[float, ...]:
    return (seq.rank, *seq.order)
