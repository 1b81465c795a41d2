"""Slot arithmetic: what batching can gain at most, from output lengths alone. Pure.

A sequence takes one row in each step from its start to its last token; a fixed batch gives each member as many rows as
its longest has tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Slots:
    """What a workload takes.

    Attributes:
        steps: Steps until the last sequence has ended.
        rows: Rows computed in all of them.
    """

    steps: int
    rows: int


def fixed(lengths: Sequence[int], size: int) -> Slots:
    """Batches of `size` in order, each run to its longest member."""
    batches = [lengths[at : at + size] for at in range(0, len(lengths), size)]
    return Slots(sum(map(max, batches)), sum(max(b) * len(b) for b in batches))


def continuous(lengths: Sequence[int], size: int) -> Slots:
    """Each of `size` slots takes the next sequence as soon as it is free."""
    free = [0] * size
    for length in lengths:
        heapq.heappush(free, heapq.heappop(free) + length)
    return Slots(max(free), sum(lengths))


@dataclass(frozen=True, slots=True)
class StepCost:
    """Time of a step as a sum of parts, each in seconds and never negative.

    Attributes:
        step_s: Of any step.
        row_s: Of each decoding row.
        chunk_token_s: Of each prompt token.
    """

    step_s: float
    row_s: float
    chunk_token_s: float

    def of(self, slots: Slots, prompt_tokens: int) -> float:
        """Seconds that a workload takes."""
        return self.step_s * slots.steps + self.row_s * slots.rows + self.chunk_token_s * prompt_tokens


def fit_cost(steps: Sequence[tuple[int, int, float]]) -> StepCost:
    """Least squares over steps of (decoding rows, prompt tokens, seconds); without the parts that come out negative."""
    data = np.array(steps, dtype=np.float64)
    columns = np.column_stack((np.ones(len(data)), data[:, 0], data[:, 1]))
    use = [0, 1, 2]
    while use:
        parts, *_ = np.linalg.lstsq(columns[:, use], data[:, 2], rcond=None)
        if (parts >= 0).all():
            found = dict(zip(use, parts.tolist(), strict=True))
            return StepCost(found.get(0, 0.0), found.get(1, 0.0), found.get(2, 0.0))
        del use[int(parts.argmin())]
    return StepCost(0.0, 0.0, 0.0)
