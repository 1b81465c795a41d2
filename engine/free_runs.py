"""FreeRuns: the free pages of a pool as runs of pages that follow each other. Pure.

Neighbours are one run at all times: a run that comes back is joined with what lies free before and after it. What is
asked for comes out of the shortest run that is long enough, so that long runs stay for long prompts and the pages that
decodes ask for one by one fill the holes. Where no run is long enough the longest go first: no choice has fewer runs.

    run [first, end)   _ends[first] = end   _firsts[end] = first   _bins[min(end - first, LONG)] has first
    any other page     _ends[page] = 0      _firsts[page] = -1     no bin has it

Taking and giving a run costs the same however long it is and however many there are; only among runs of LONG pages and
more a fitting one is searched.
"""

from __future__ import annotations

from itertools import pairwise

LONG = 256
"""Runs of so many pages and more share a bin."""


class FreeRuns:
    """Free pages, by runs.

    Args:
        num_pages: All pages of [0, num_pages) are free at first.

    Attributes:
        num_pages: Free pages now; to read.
    """

    __slots__ = ("_bins", "_ends", "_firsts", "_mask", "num_pages")

    def __init__(self, num_pages: int) -> None:
        self._ends = [0] * (num_pages + 1)
        self._firsts = [-1] * (num_pages + 1)
        self._bins: tuple[dict[int, None], ...] = tuple({} for _ in range(LONG + 1))  # in the order of coming back
        self._mask = 0  # bit n: bin n has runs
        self.num_pages = 0
        self.give(0, num_pages)

    def has_run(self, num_pages: int) -> bool:
        """Says whether `take(num_pages)` would give one run."""
        if num_pages <= LONG:
            return self._mask >> num_pages != 0
        return any(self._ends[first] - first >= num_pages for first in self._bins[LONG])

    def take(self, num_pages: int) -> list[tuple[int, int]]:
        """Takes pages.

        Args:
            num_pages: How many, between 1 and what is free.

        Returns:
            Runs [first, end): one if any is long enough; else as few as there can be, the longest first.
        """
        assert 1 <= num_pages <= self.num_pages, f"{num_pages} pages asked, {self.num_pages} free"
        taken = []
        while num_pages:
            first = self._pop(num_pages)
            run_end = self._ends[first]
            end = first + num_pages
            self._ends[first] = 0
            if end < run_end:
                self._list(end, run_end)
            else:
                end = run_end
                self._firsts[end] = -1
            taken.append((first, end))
            self.num_pages -= end - first
            num_pages -= end - first
        return taken

    def take_page(self) -> int:
        """Takes one page out of a shortest run; as `take(1)`, and quicker."""
        lowest = self._mask & -self._mask
        length = lowest.bit_length() - 1
        found = self._bins[length]
        page, _ = found.popitem()
        if not found:
            self._mask ^= lowest
        ends = self._ends
        end, ends[page] = ends[page], 0
        if length == 1:
            self._firsts[end] = -1
        else:
            self._list(page + 1, end)
        self.num_pages -= 1
        return page

    def give(self, first: int, end: int) -> None:
        """Takes back the pages [first, end), none of which is free."""
        ends, firsts = self._ends, self._firsts
        self.num_pages += end - first
        if (before := firsts[first]) >= 0:
            self._unlist(before, first - before)
            firsts[first] = -1
            first = before
        if behind := ends[end]:
            self._unlist(end, behind - end)
            ends[end] = 0
            end = behind
        self._list(first, end)

    def runs(self) -> list[tuple[int, int]]:
        """All runs [first, end), ascending."""
        return [(first, end) for first, end in enumerate(self._ends) if end]

    def check(self) -> None:
        """Proves that runs neither touch nor overlap, and that every index names the same ones."""
        runs = self.runs()
        assert all(first < end for first, end in runs)
        assert all(end < first for (_, end), (first, _) in pairwise(runs)), "runs touch or overlap"
        assert sum(end - first for first, end in runs) == self.num_pages
        assert [(first, end) for end, first in enumerate(self._firsts) if first >= 0] == runs
        listed = {first: length for length, found in enumerate(self._bins) for first in found}
        assert listed == {first: min(end - first, LONG) for first, end in runs}
        assert self._mask == sum(1 << length for length, found in enumerate(self._bins) if found)

    def _pop(self, num_pages: int) -> int:
        """Takes the best run for so many pages out of its bin; returns its first page."""
        fits = self._mask >> num_pages
        if num_pages >= LONG and self._bins[LONG]:
            first = self._best_long(num_pages)
            self._unlist(first, LONG)
            return first
        length = num_pages + (fits & -fits).bit_length() - 1 if fits else self._mask.bit_length() - 1
        found = self._bins[length]
        first, _ = found.popitem()
        if not found:
            self._mask ^= 1 << length
        return first

    def _best_long(self, num_pages: int) -> int:
        """Of the runs of LONG pages and more the shortest that is long enough, or the longest."""
        lengths = {first: self._ends[first] - first for first in self._bins[LONG]}
        fitting = [first for first, length in lengths.items() if length >= num_pages]
        return min(fitting, key=lengths.__getitem__) if fitting else max(lengths, key=lengths.__getitem__)

    def _list(self, first: int, end: int) -> None:
        self._ends[first] = end
        self._firsts[end] = first
        length = end - first
        if length > LONG:
            length = LONG
        self._bins[length][first] = None
        self._mask |= 1 << length

    def _unlist(self, first: int, length: int) -> None:
        if length > LONG:
            length = LONG
        found = self._bins[length]
        del found[first]
        if not found:
            self._mask ^= 1 << length
