"""PagePool: who has which page. Pure bookkeeping; the bytes lie elsewhere.

Every page is in exactly one state, and `check()` proves it:

    FREE ──allocate──▶ HELD ──release (last holder)──▶ FREE, or CACHED when it is kept for reuse
    FREE ──allocate(FILLING)──▶ FILLING ──validate──▶ HELD          (reserved, written by a transfer)
    FILLING ──move──▶ FREE or QUARANTINE;  QUARANTINE ──move──▶ FREE
    CACHED ──hold──▶ HELD, ──allocate (no page is FREE), unkeep──▶ FREE

A page's generation grows each time it becomes free, so a reference (page, generation) names one use of the page.
CACHED pages are evicted in the order in which they lost their last holder; of the pages released together the deepest
goes first, so that what is left of a prefix can still be found from its start.
Only the engine thread touches the pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum


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


class PagePool:
    """States, holders and generations of `num_pages` pages.

    Args:
        num_pages: Pages in the pool, >= 1.
    """

    __slots__ = ("_cached", "_free", "_generation", "_holders", "_kept", "_state", "num_pages")

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}; it must be at least 1")
        self.num_pages = num_pages
        self._state = [PageState.FREE] * num_pages
        self._holders = [0] * num_pages
        self._generation = [0] * num_pages
        # A stack whose top is its end. Pages leave in ascending runs and come back as the run they were.
        self._free = list(range(num_pages - 1, -1, -1))
        self._kept = bytearray(num_pages)
        self._cached: dict[int, None] = {}  # in the order of eviction

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can give: free or evictable."""
        return len(self._free) + len(self._cached)

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
        """Takes free pages, and evicts CACHED ones where these are too few; all or nothing, ask `can_allocate` first.

        Args:
            num_pages: How many, >= 1.
            state: HELD (with one holder) or FILLING.

        Returns:
            Page ids, in runs where the free list has runs.
        """
        assert state in TRANSITIONS[PageState.FREE]
        assert 1 <= num_pages <= self.num_free, f"{num_pages} pages asked, {self.num_free} free"
        while len(self._free) < num_pages:
            page = next(iter(self._cached))
            del self._cached[page]
            self._become_free(page)
        pages = self._free[-num_pages:]
        pages.reverse()
        del self._free[-num_pages:]
        holders = 1 if state is PageState.HELD else 0
        for page in pages:
            self._state[page] = state
            self._holders[page] = holders
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
            self._become_free(page)

    def release(self, pages: Sequence[int]) -> None:
        """Takes a holder from each page; without holders a page becomes FREE, or CACHED when it is kept.

        Args:
            pages: HELD pages, a sequence's in their order.
        """
        for page in reversed(pages):
            assert self._state[page] is PageState.HELD, f"page {page} is {self._state[page]}, not held"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if self._kept[page]:
                    self._state[page] = PageState.CACHED
                    self._cached[page] = None
                else:
                    self._become_free(page)

    def move(self, pages: Iterable[int], source: PageState, target: PageState) -> None:
        """Moves pages that nobody counts as held: out of FILLING and QUARANTINE.

        The caller has fenced every writer of a FILLING or QUARANTINE page that becomes FREE.
        """
        assert target in TRANSITIONS[source] and source in (PageState.FILLING, PageState.QUARANTINE)
        for page in reversed(list(pages)):
            assert self._state[page] is source, f"page {page} is {self._state[page]}, not {source}"
            if target is PageState.FREE:
                self._become_free(page)
            else:
                self._state[page] = target
                self._holders[page] = 1 if target is PageState.HELD else 0

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
        assert len(self._free) == len(set(self._free)) == counts[PageState.FREE], "free list and states disagree"
        assert all(self._state[page] is PageState.FREE for page in self._free)
        assert len(self._cached) == counts[PageState.CACHED]
        assert all(self._state[page] is PageState.CACHED and self._kept[page] for page in self._cached)
        for page, state in enumerate(self._state):
            assert (self._holders[page] > 0) == (state is PageState.HELD), (
                f"page {page}: {state}, {self._holders[page]}"
            )
        if holders is not None:
            held = {page: n for page, n in enumerate(self._holders) if n}
            assert held == {page: n for page, n in holders.items() if n}, "pages leaked or taken twice"

    def _become_free(self, page: int) -> None:
        self._state[page] = PageState.FREE
        self._holders[page] = 0
        self._kept[page] = False
        self._generation[page] += 1
        self._free.append(page)
