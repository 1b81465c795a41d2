"""PagePool: who has which page. Pure bookkeeping; the bytes lie elsewhere.

Every page is in exactly one state, and `check()` proves it:

    FREE ──allocate──▶ HELD ──release (last holder)──▶ FREE, or CACHED when it is kept for reuse
    FREE ──allocate(FILLING)──▶ FILLING ──validate──▶ HELD          (reserved, written by a transfer)
    FILLING ──move──▶ FREE or QUARANTINE;  QUARANTINE ──move──▶ FREE
    CACHED ──hold──▶ HELD, ──allocate (too few are FREE, or no run), unkeep──▶ FREE

A page's generation grows each time it becomes free, so a reference (page, generation) names one use of the page.
CACHED pages are evicted in the order in which they lost their last holder; of the pages released together the deepest
goes first, so that what is left of a prefix can still be found from its start.

Pages are given in runs of neighbours (`free_runs`), for a run is one copy and one descriptor of a transfer. So that
there are runs to choose from, some pages are evicted ahead of need, and lie free until their neighbours are free too.
Only the engine thread touches the pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import islice

from pdserve.engine.free_runs import FreeRuns


class PageState(StrEnum):
    """The one state of a page."""

    FREE = "free"
    HELD = "held"
    CACHED = "cached"
    FILLING = "filling"
    QUARANTINE = "quarantine"


TRANSITIONS: Mapping[PageState, frozenset[PageState]] = {
    PageState.FREE: frozenset({PageState.HELD, PageState.FILLING}),
    PageState.HELD: frozenset({PageState.FREE, PageState.CACHED}),
    PageState.CACHED: frozenset({PageState.HELD, PageState.FREE}),
    PageState.FILLING: frozenset({PageState.HELD, PageState.FREE, PageState.QUARANTINE}),
    PageState.QUARANTINE: frozenset({PageState.FREE}),
}

SPARE = 16
"""One part in so many of a pool is evicted ahead of need, at most."""


class PagePool:
    """States, holders and generations of `num_pages` pages.

    Args:
        num_pages: Pages in the pool, >= 1.
        num_spare: CACHED pages that may be evicted ahead of need; None: a part of the pool.
    """

    __slots__ = ("_cached", "_free", "_generation", "_holders", "_kept", "_num_spare", "_state", "num_pages")

    def __init__(self, num_pages: int, num_spare: int | None = None) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}; it must be at least 1")
        self.num_pages = num_pages
        self._state = [PageState.FREE] * num_pages
        self._holders = [0] * num_pages
        self._generation = [0] * num_pages
        self._free = FreeRuns(num_pages)
        self._num_spare = num_pages // SPARE if num_spare is None else num_spare
        self._kept = bytearray(num_pages)
        self._cached: dict[int, None] = {}  # in the order of eviction

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can give: free or evictable."""
        return self._free.num_pages + len(self._cached)

    def state(self, page_id: int) -> PageState:
        """State of a page."""
        return self._state[page_id]

    def generation(self, page_id: int) -> int:
        """Times that the page has become free."""
        return self._generation[page_id]

    def num_holders(self, page_id: int) -> int:
        """Holders of a page."""
        return self._holders[page_id]

    def can_allocate(self, num_pages: int) -> bool:
        """Says whether `allocate(num_pages)` would succeed."""
        return num_pages <= self.num_free

    def allocate(self, num_pages: int, state: PageState = PageState.HELD) -> list[int]:
        """Takes free pages; evicts CACHED ones where those are too few, or no run. All or nothing: ask `can_allocate`.

        One run, if a run of free pages is long enough, also after evicting until `num_spare` pages more than asked for
        are free; else the fewest runs that the free pages have, the longest first.

        Args:
            num_pages: How many, >= 1.
            state: HELD (with one holder) or FILLING.

        Returns:
            Page ids, ascending within each run.
        """
        assert state in TRANSITIONS[PageState.FREE]
        assert 1 <= num_pages <= self.num_free, f"{num_pages} pages asked, {self.num_free} free"
        if self._cached and not self._free.has_run(num_pages):
            self._evict(num_pages + self._num_spare - self._free.num_pages)
        holders = 1 if state is PageState.HELD else 0
        if num_pages == 1:
            page = self._free.take_page()
            self._state[page], self._holders[page] = state, holders
            return [page]
        pages: list[int] = []
        for first, end in self._free.take(num_pages):
            pages += range(first, end)
            self._state[first:end] = [state] * (end - first)
            self._holders[first:end] = [holders] * (end - first)
        return pages

    def validate(self, pages: Iterable[int]) -> None:
        """FILLING -> HELD with one holder: the pages' bytes are whole and authentic."""
        self.move(pages, PageState.FILLING, PageState.HELD)

    def hold(self, pages: Iterable[int]) -> None:
        """Adds a holder to each page; a CACHED page becomes HELD."""
        for page in pages:
            assert self._state[page] in (PageState.HELD, PageState.CACHED), f"page {page} is {self._state[page]}"
            self._cached.pop(page, None)
            self._state[page] = PageState.HELD
            self._holders[page] += 1

    def keep(self, page: int) -> None:
        """From now on, until it is free again, a HELD page becomes CACHED when it loses its last holder."""
        assert self._state[page] is PageState.HELD, f"page {page} is {self._state[page]}, not held"
        self._kept[page] = True

    def unkeep(self, page: int) -> None:
        """Undoes `keep`; a CACHED page becomes FREE."""
        self._kept[page] = False
        if self._state[page] is PageState.CACHED:
            del self._cached[page]
            self._state[page] = PageState.FREE
            self._become_free([page])

    def release(self, pages: Sequence[int]) -> None:
        """Takes a holder from each page; without holders a page becomes FREE, or CACHED when it is kept.

        Args:
            pages: HELD pages, a sequence's in their order.
        """
        state, holders, held = self._state, self._holders, PageState.HELD
        freed = []
        for page in reversed(pages):
            assert state[page] is held, f"page {page} is {state[page]}, not held"
            num_holders = holders[page] = holders[page] - 1
            if num_holders:
                continue
            if self._kept[page]:
                state[page] = PageState.CACHED
                self._cached[page] = None
            else:
                state[page] = PageState.FREE
                freed.append(page)
        if freed:
            self._become_free(freed)

    def move(self, pages: Iterable[int], source: PageState, target: PageState) -> None:
        """Moves pages that nobody counts as held: out of FILLING and QUARANTINE.

        The caller has fenced every writer of a FILLING or QUARANTINE page that becomes FREE.
        """
        assert target in TRANSITIONS[source] and source in (PageState.FILLING, PageState.QUARANTINE)
        moved = list(pages)
        moved.reverse()
        for page in moved:
            assert self._state[page] is source, f"page {page} is {self._state[page]}, not {source}"
            self._state[page] = target
            self._holders[page] = 1 if target is PageState.HELD else 0
        if target is PageState.FREE:
            self._become_free(moved)

    def count(self, state: PageState) -> int:
        """Pages in a state."""
        return self._state.count(state)

    def check(self, holders: Mapping[int, int] | None = None) -> None:
        """Proves that every page is in exactly one state and that the sum is the pool.

        Args:
            holders: Holders that the owners of the pages count, by page; compared when given.
        """
        counts = Counter(self._state)
        assert sum(counts.values()) == self.num_pages == len(self._holders) == len(self._generation)
        self._free.check()
        assert self._free.num_pages == counts[PageState.FREE], "free runs and states disagree"
        assert all(self._state[page] is PageState.FREE for run in self._free.runs() for page in range(*run))
        assert len(self._cached) == counts[PageState.CACHED]
        assert all(self._state[page] is PageState.CACHED and self._kept[page] for page in self._cached)
        for page, state in enumerate(self._state):
            assert (self._holders[page] > 0) == (state is PageState.HELD), (
                f"page {page}: {state}, {self._holders[page]}"
            )
        if holders is not None:
            held = {page: n for page, n in enumerate(self._holders) if n}
            assert held == {page: n for page, n in holders.items() if n}, "pages leaked or taken twice"

    def _evict(self, num_pages: int) -> None:
        """Frees CACHED pages, the first in line first, as many as there are."""
        evicted = list(islice(self._cached, max(0, num_pages)))
        for page in evicted:
            del self._cached[page]
            self._state[page] = PageState.FREE
            self._kept[page] = False
        self._become_free(evicted)

    def _become_free(self, pages: Sequence[int]) -> None:
        """FREE pages come back, those that follow each other downwards as one run."""
        generation = self._generation
        first = end = 0
        for page in pages:
            generation[page] += 1
            if page != first - 1:
                if end:
                    self._free.give(first, end)
                end = page + 1
            first = page
        if end:
            self._free.give(first, end)
