"""Measures at start-up how long steps take, and chooses the token budget from it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.core.sampling import SamplingParams
from pdserve.engine.step import Runner, ScheduledSequence, SchedulerOutput

PROFILE_LIMIT_S = 1.0
"""No further step is measured after this much time: a worker is not ready before."""

_REPEATS = 3
_REPEATS_LIMIT_S = 0.3
_GREEDY = SamplingParams(temperature=0.0)
_TOKEN_COUNTS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True, slots=True)
class StepProfile:
    """What was measured and chosen.

    Attributes:
        points: (tokens of a step, seconds), ascending.
        token_budget: Tokens that a step may compute.
        context_unit: Tokens of context with which a prompt's token takes twice as long as without; inf: not noticeable.
    """

    points: tuple[tuple[int, float], ...]
    token_budget: int
    context_unit: float = math.inf

    @property
    def token_s(self) -> float:
        """What a token adds to a step, seconds; 0 when too little was measured."""
        if len(self.points) < 2:
            return 0.0
        (n0, s0), (n1, s1) = self.points[0], self.points[-1]
        return max(0.0, (s1 - s0) / (n1 - n0))

    def holds(self, target_s: float) -> bool:
        """Says whether even the smallest step measured is within a target."""
        return not self.points or self.points[0][1] <= target_s

    def __str__(self) -> str:
        """The points, for a log line."""
        return ", ".join(f"{tokens} tokens {seconds * 1000:.0f} ms" for tokens, seconds in self.points)


def profile_steps(
    measure: Callable[[int], float],
    target_s: float,
    min_budget: int,
    max_budget: int,
    limit_s: float = PROFILE_LIMIT_S,
    num_decodes: int = 0,
) -> StepProfile:
    """Measures growing steps until the target or the limit is passed.

    Args:
        measure: Runs a step of so many tokens, decodes included, and returns its seconds.
        target_s: Step time to aim at.
        min_budget: Never choose less, or long prompts would not get on.
        max_budget: Never choose or measure more.
        limit_s: Stop measuring after this much time in all, but not before two steps.
        num_decodes: Tokens of every step that are decodes.
    """
    spent = measure(num_decodes + 1)  # pays for first-time set-up; not a point
    points: list[tuple[int, float]] = []
    for chunk in _TOKEN_COUNTS:
        tokens = num_decodes + chunk
        late = spent > limit_s and len(points) >= 2
        if tokens > max_budget or late or (points and points[-1][1] > target_s):
            break
        seconds = measure(tokens)
        spent += seconds
        points.append((tokens, seconds))
    budget = max(min_budget, min(max_budget, budget_for(points, target_s)))
    return StepProfile(tuple(points), budget)


def measure_context_unit(measure: Callable[[int], float], token_s: float, num_tokens: int, context: int) -> float:
    """Measures what context costs: a chunk without any and the same chunk with some, each at its best.

    Args:
        measure: Runs a step of one chunk with so many tokens before it, and returns its seconds.
        token_s: What a token without context adds to a step, seconds.
        num_tokens: Of the chunk.
        context: Tokens before it, >= 1.

    Returns:
        Tokens of context that cost what a token costs without; inf when they cost nothing that can be measured.
    """
    alone_s, with_context_s = (least_of(lambda n=n: measure(n), _REPEATS_LIMIT_S) for n in (0, context))  # type: ignore[misc]
    pair_s = (with_context_s - alone_s) / (num_tokens * context)
    return token_s / pair_s if pair_s > 0 and token_s > 0 else math.inf


def least_of(measure: Callable[[], float], limit_s: float, known_s: float = math.inf) -> float:
    """The least of a few measurements: that is the work, the rest are neighbours.

    Args:
        measure: Returns seconds.
        limit_s: No further one begins when they took so long together.
        known_s: Seconds measured before.
    """
    spent = 0.0
    for _ in range(_REPEATS):
        spent += (seconds := measure())
        known_s = min(known_s, seconds)
        if spent > limit_s:
            break
    return known_s


class StepMeter:
    """Runs steps of given sizes on an engine that is not in use yet: what they write is never read.

    Args:
        runner: Computes them.
        page_size: Tokens per page.
        num_pages: Pages in the pool.
        context: Tokens that each decode has behind it.
    """

    def __init__(self, runner: Runner, page_size: int, num_pages: int, context: int = 0) -> None:
        self._runner = runner
        self._page_size = page_size
        self._num_pages = num_pages
        self._context = context

    def measure(self, num_tokens: int, num_decodes: int = 0) -> float:
        """Seconds of a step of so many tokens: decodes, and the rest in one chunk of a prompt."""
        rows = [self._row(f"decode {i}", self._context, 1, i) for i in range(num_decodes)]
        if num_tokens > num_decodes:
            rows.append(self._row("prompt", 0, num_tokens - num_decodes, 0))
        return self._seconds(rows, num_tokens)

    def measure_chunk(self, num_tokens: int, context: int) -> float:
        """Seconds of a step of so many tokens of one prompt, with so many before them."""
        return self._seconds([self._row("prompt", context, num_tokens, 0)], num_tokens)

    def _seconds(self, rows: list[ScheduledSequence], num_tokens: int) -> float:
        began = time.perf_counter()
        self._runner.execute(SchedulerOutput(0, tuple(rows), num_tokens))
        return time.perf_counter() - began

    def _row(self, key: str, start: int, num: int, at: int) -> ScheduledSequence:
        size = -(-(start + num) // self._page_size)
        pages = [(at * size + i) % self._num_pages for i in range(size)]  # of its own, as far as there are any
        known = [0] * (start + num)
        return ScheduledSequence(key, start, known[start:], pages, _GREEDY, 0, known, max(start, num))


def budget_for(points: list[tuple[int, float]], target_s: float) -> int:
    """Tokens whose step takes `target_s`, by straight lines through the points and beyond them."""
    if not points:
        return 1
    if len(points) == 1 or points[0][1] >= target_s:
        tokens, seconds = points[0]
        return max(1, int(tokens * target_s / seconds))
    at = next((i for i, (_, seconds) in enumerate(points) if seconds > target_s), len(points) - 1)
    (n0, s0), (n1, s1) = points[at - 1], points[at]
    if s1 <= s0:  # noise: more tokens took no longer
        return n1
    return int(n0 + (target_s - s0) * (n1 - n0) / (s1 - s0))
