"""Measures at start-up how long steps take, and chooses the token budget from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

PROFILE_LIMIT_S = 1.5
"""No further step is measured after this much time."""

_TOKEN_COUNTS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True, slots=True)
class StepProfile:
    """What was measured and chosen.

    Attributes:
        points: (tokens of a step, seconds), ascending.
        token_budget: Tokens that a step may compute.
    """

    points: tuple[tuple[int, float], ...]
    token_budget: int


def profile_steps(
    measure: Callable[[int], float], target_s: float, min_budget: int, max_budget: int, limit_s: float = PROFILE_LIMIT_S
) -> StepProfile:
    """Measures growing steps until the target or the limit is passed.

    Args:
        measure: Runs a step of so many tokens and returns its seconds.
        target_s: Step time to aim at.
        min_budget: Never choose less, or long prompts would not get on.
        max_budget: Never choose or measure more.
        limit_s: Stop measuring after this much time in all.
    """
    spent = measure(1)  # pays for first-time set-up; not a point
    points: list[tuple[int, float]] = []
    for tokens in _TOKEN_COUNTS:
        if tokens > max_budget or spent > limit_s or (points and points[-1][1] > target_s):
            break
        seconds = measure(tokens)
        spent += seconds
        points.append((tokens, seconds))
    budget = max(min_budget, min(max_budget, budget_for(points, target_s)))
    return StepProfile(tuple(points), budget)


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
