"""What becomes of the KV of a preempted sequence: computed anew, or kept in host pages until it runs again.

    running ──save──▶ waiting, KV in host pages ──restore──▶ running, same bytes in other pages
            └───────▶ waiting, nothing computed ──────────▶ running, computed again

Host pages are lent by a pool of their own and given back when the sequence runs again or ends. Both ways are page
copies of a step (`engine.step.PageCopy`); nothing is moved here. Hand-offs are never swapped: their pages get a reader.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from pdserve.engine.page_pool import PagePool
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import PageCopy, PageCopyKind, Preemptions

PREEMPTION_MODES = ("auto", "recompute", "swap")
PreferSwap = Callable[[int], bool]
"""Says whether so many computed tokens come back sooner by swap than by recompute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionCosts:
    """Seconds of engine time that a preempted sequence costs, from measurements at start.

    Attributes:
        step_points: (tokens of a step without context, seconds), ascending in tokens, at least one.
        context_s: What a step takes longer for each pair of a token and a token computed in an earlier step.
        token_budget: Tokens that a step computes at most: longer sequences take several chunks.
        page_copy_s: Seconds to copy one page one way.
        swap_fixed_s: Seconds of a swap out and in besides its pages.
        page_size: Tokens per page.
    """

    step_points: tuple[tuple[int, float], ...]
    context_s: float
    token_budget: int
    page_copy_s: float
    swap_fixed_s: float
    page_size: int

    def __str__(self) -> str:
        steps = ", ".join(f"{tokens} tokens {1000 * seconds:.1f} ms" for tokens, seconds in self.step_points)
        return (
            f"steps of {steps}, {1e6 * self.context_s:.3g} ms more per 1,000 pairs with earlier tokens; a page copied "
            f"in {1000 * self.page_copy_s:.2f} ms, {1000 * self.swap_fixed_s:.2f} ms per swap besides"
        )

    def recompute_s(self, num_tokens: int) -> float:
        """Seconds to compute so many tokens, in chunks of the token budget."""
        num_full, rest = divmod(num_tokens, self.token_budget)
        seconds = num_full * self._step_s(self.token_budget) + (self._step_s(rest) if rest else 0.0)
        # Each token attends to all of the chunks before its own.
        pairs = self.token_budget**2 * (num_full * (num_full - 1) // 2) + rest * num_full * self.token_budget
        return seconds + pairs * self.context_s

    def swap_s(self, num_tokens: int) -> float:
        """Seconds to copy the pages of so many tokens out and in."""
        return self.swap_fixed_s + 2 * self.page_copy_s * -(-num_tokens // self.page_size)

    def prefer_swap(self, num_tokens: int) -> bool:
        """See `PreferSwap`."""
        return self.swap_s(num_tokens) < self.recompute_s(num_tokens)

    def _step_s(self, num_tokens: int) -> float:
        """By straight lines through the points, beyond the last one as steep as from the first to it."""
        points = self.step_points
        if num_tokens <= points[0][0]:
            return points[0][1]  # a step of few tokens takes as long as the smallest measured
        at = bisect_left(points, num_tokens, key=lambda point: point[0])
        (n0, s0), (n1, s1) = (points[at - 1], points[at]) if at < len(points) else (points[0], points[-1])
        if n0 == n1:
            return s1 * num_tokens / n1
        return s1 + (num_tokens - n1) * max(0.0, s1 - s0) / (n1 - n0)


class SwapSpace:
    """Lends host pages to preempted sequences and counts preemptions.

    Args:
        num_pages: Host pages; 0: all are computed anew.
        page_size: Tokens per page.
        page_bytes: Bytes per page.
        prefer_swap: Asked for each preempted sequence that could be swapped.
    """

    __slots__ = ("_page_bytes", "_page_size", "_pool", "_prefer_swap", "_totals")

    def __init__(
        self, num_pages: int = 0, page_size: int = 1, page_bytes: int = 0, prefer_swap: PreferSwap = lambda _: True
    ) -> None:
        self._pool = PagePool(num_pages) if num_pages else None
        self._page_size = page_size
        self._page_bytes = page_bytes
        self._prefer_swap = prefer_swap
        self._totals = Preemptions(num_host_pages=num_pages, num_free_host_pages=num_pages)

    def totals(self) -> Preemptions:
        """What happened so far."""
        return self._totals

    def save(self, seq: Sequence) -> list[PageCopy]:
        """Decides what becomes of a preempted sequence's KV; it has its pages still.

        Returns:
            Copies to do before any of its pages is written. None: it starts anew.
        """
        num_pages = -(-seq.num_computed // self._page_size)
        if not self._can_save(seq, num_pages):
            self._totals = replace(self._totals, num_recomputes=self._totals.num_recomputes + 1)
            seq.num_computed = 0
            return []
        assert self._pool is not None
        seq.host_pages = self._pool.allocate(num_pages)
        self._count(num_swaps=1, swapped_out=num_pages)
        sources = seq.page_table[:num_pages]  # those beyond hold nothing yet
        if seq.copy_from is not None:  # a fork that has not run: its last page holds nothing yet either
            sources[-1] = seq.copy_from
        return [PageCopy(page, host, PageCopyKind.SWAP_OUT) for page, host in zip(sources, seq.host_pages, strict=True)]

    def restore(self, seq: Sequence) -> list[PageCopy]:
        """Brings a sequence's KV back; it has all of its pages again.

        Returns:
            Copies to do before it runs; none when it was not swapped, and none into pages that the prefix cache had.
        """
        if not seq.host_pages:
            return []
        pairs = list(zip(seq.host_pages, seq.page_table, strict=False))[seq.num_published :]
        self._count(swapped_in=len(pairs))
        copies = [PageCopy(host, page, PageCopyKind.SWAP_IN) for host, page in pairs]
        self.drop(seq)
        return copies

    def drop(self, seq: Sequence) -> None:
        """Takes back the host pages of a sequence, if it has any."""
        if seq.host_pages:
            assert self._pool is not None
            self._pool.release(seq.host_pages)
            seq.host_pages = []
            self._count()

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Proves that the host pages are those of the sequences, none lost and none taken twice."""
        held: Counter[int] = Counter()
        for seq in sequences:
            held.update(seq.host_pages)
            if seq.host_pages:
                assert not seq.page_table and not seq.handoff
                assert len(seq.host_pages) == -(-seq.num_computed // self._page_size)
        if self._pool is not None:
            self._pool.check(held)
            assert self._totals.num_free_host_pages == self._pool.num_free
        assert self._pool is not None or not held

    def _count(self, num_swaps: int = 0, swapped_out: int = 0, swapped_in: int = 0) -> None:
        assert self._pool is not None
        totals = self._totals
        self._totals = replace(
            totals,
            num_swaps=totals.num_swaps + num_swaps,
            swapped_out_bytes=totals.swapped_out_bytes + swapped_out * self._page_bytes,
            swapped_in_bytes=totals.swapped_in_bytes + swapped_in * self._page_bytes,
            num_free_host_pages=self._pool.num_free,
        )

    def _can_save(self, seq: Sequence, num_pages: int) -> bool:
        if self._pool is None or seq.handoff or num_pages == 0 or not self._pool.can_allocate(num_pages):
            return False
        return self._prefer_swap(seq.num_computed)
