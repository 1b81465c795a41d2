"""Measures at start-up what swap and recompute of a preempted sequence cost; `engine.swap` chooses by it."""

from __future__ import annotations

import time
from typing import Protocol

from pdserve.core.layout import KVLayout
from pdserve.core.sampling import SamplingParams
from pdserve.engine.profile import least_of, profile_steps
from pdserve.engine.step import PageCopy, PageCopyKind, Runner, ScheduledSequence, SchedulerOutput
from pdserve.engine.swap import PreemptionCosts

_LIMIT_S = 1.0  # no further step is measured after this much time
_REPEATS = 3  # of each measurement, as far as the limits allow: the least is the work, the rest are neighbours
_CONTEXT_TOKENS = 512
_COPIED_PAGES = 16


class Meter(Protocol):
    """Runs work on an engine that is not in use yet.

    Attributes:
        max_tokens: Of one sequence.
    """

    max_tokens: int

    def step(self, num_tokens: int, context: int = 0) -> float:
        """Seconds of a step that computes so many tokens of one sequence after so many computed ones."""
        ...

    def copies(self, num_pages: int) -> float:
        """Seconds to copy so many pages one way."""
        ...


class PreemptionMeter:
    """The meter of a runner; what its steps write is never read.

    Args:
        runner: Computes them.
        layout: Layout of the pages.
        max_tokens: Of one sequence; the pool holds as many.
    """

    def __init__(self, runner: Runner, layout: KVLayout, max_tokens: int) -> None:
        self._runner, self._layout, self.max_tokens = runner, layout, max_tokens

    def step(self, num_tokens: int, context: int = 0) -> float:
        """See `Meter`."""
        end = context + num_tokens
        pages, known = range(self._layout.num_pages(end)), [0] * end
        greedy = SamplingParams(temperature=0.0)
        row = ScheduledSequence("preemption", context, known[context:], pages, greedy, 0, known, end)
        return self._seconds(SchedulerOutput(0, (row,), num_tokens))

    def copies(self, num_pages: int) -> float:
        """See `Meter`."""
        copies = tuple(PageCopy(page, page, PageCopyKind.SWAP_OUT) for page in range(num_pages))
        return self._seconds(SchedulerOutput(0, (), 0, copies))

    def _seconds(self, output: SchedulerOutput) -> float:
        began = time.perf_counter()
        self._runner.execute(output)
        return time.perf_counter() - began


def measure_preemption(meter: Meter, token_budget: int, page_size: int, max_pages: int) -> PreemptionCosts:
    """Measures steps without context and with, and copies of one page and of several.

    Args:
        meter: Runs them.
        token_budget: Tokens that a step may compute.
        page_size: Tokens per page.
        max_pages: Pages that can be copied at once.
    """
    largest = min(token_budget, meter.max_tokens)
    points = profile_steps(meter.step, _LIMIT_S, 1, largest, _LIMIT_S).points or ((1, meter.step(1)),)
    # Once more, and again: what was measured once and cold is several times too much on a machine with neighbours.
    points = tuple((n, least_of(lambda n=n: meter.step(n), _LIMIT_S / len(points), s)) for n, s in points)  # type: ignore[misc]
    num_tokens, alone_s = points[-1]
    num_pairs = num_tokens * max(0, min(_CONTEXT_TOKENS, meter.max_tokens - num_tokens))
    longer_s = 0.0
    if num_pairs:
        with_context_s = least_of(lambda: meter.step(num_tokens, num_pairs // num_tokens), _LIMIT_S)
        longer_s = max(0.0, with_context_s - alone_s)
    many = min(_COPIED_PAGES, max_pages)
    meter.copies(many)  # the first use of the memory takes longer
    one_s, many_s = (min(meter.copies(n) for _ in range(_REPEATS)) for n in (1, many))
    page_copy_s = max(0.0, many_s - one_s) / (many - 1) if many > 1 else one_s
    return PreemptionCosts(
        step_points=points,
        context_s=longer_s / num_pairs if num_pairs else 0.0,
        token_budget=token_budget,
        page_copy_s=page_copy_s,
        swap_fixed_s=2 * max(0.0, one_s - page_copy_s),
        page_size=page_size,
    )
