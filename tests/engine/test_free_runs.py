"""Free pages come as one run wherever there is one, else in as few as possible; neighbours are one run again."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine import free_runs
from pdserve.engine.free_runs import LONG, FreeRuns


def runs_of(pages: set[int]) -> list[tuple[int, int]]:
    """The longest runs [first, end) of a set, found page by page."""
    firsts = [p for p in sorted(pages) if p - 1 not in pages]
    ends = [p + 1 for p in sorted(pages) if p + 1 not in pages]
    return list(zip(firsts, ends, strict=True))


def test_the_shortest_run_that_is_long_enough_is_taken() -> None:
    free = FreeRuns(20)
    assert free.take(20) == [(0, 20)]
    for first, end in ((0, 5), (7, 9), (12, 15)):
        free.give(first, end)
    assert free.take_page() == 7
    assert free.take(3) == [(12, 15)]
    assert free.take(6) == [(0, 5), (8, 9)]
    assert free.num_pages == 0 and not free.has_run(1)


def test_neighbours_are_joined_on_both_sides() -> None:
    free = FreeRuns(9)
    free.take(9)
    for first in (0, 6, 3):
        free.give(first, first + 3)
    assert free.runs() == [(0, 9)]
    free.check()


def test_among_long_runs_the_shortest_that_fits() -> None:
    size = 4 * LONG
    free = FreeRuns(3 * size)
    free.take(3 * size)
    free.give(0, size)
    free.give(size + 1, 2 * size - 5)
    free.give(2 * size, 2 * size + LONG)
    assert free.has_run(size) and not free.has_run(size + 1)
    assert free.take(size - 6) == [(size + 1, 2 * size - 5)]
    assert free.take(size + 1) == [(0, size), (2 * size, 2 * size + 1)]
    free.check()


def test_more_than_is_free_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="3 pages asked, 2 free"):
        FreeRuns(2).take(3)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([6, LONG]), st.data())
def test_any_use(long: int, data: st.DataObject) -> None:
    """Pages come back in any parts and order; what is taken is held to a set of pages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(free_runs, "LONG", long)
        use(40, data)


def use(num_pages: int, data: st.DataObject) -> None:
    free, known, out = FreeRuns(num_pages), set(range(num_pages)), list[tuple[int, int]]()
    for _ in range(data.draw(st.integers(0, 20))):
        if known and data.draw(st.booleans()):
            asked = data.draw(st.integers(1, len(known)))
            lengths = sorted((end - first for first, end in runs_of(known)), reverse=True)
            fewest = next(i for i, total in enumerate(accumulate(lengths), 1) if total >= asked)
            assert free.has_run(asked) == (fewest == 1)
            taken = [(page, page + 1) for page in (free.take_page(),)] if asked == 1 else free.take(asked)
            assert len(taken) == fewest
            pages = [page for run in taken for page in range(*run)]
            assert len(pages) == len(set(pages)) == asked and known.issuperset(pages)
            known.difference_update(pages)
            out += taken
        elif out:
            first, end = out.pop(data.draw(st.integers(0, len(out) - 1)))
            middle = data.draw(st.integers(first, end))
            for part in ((first, middle), (middle, end)):
                if part[0] < part[1] and data.draw(st.booleans()):
                    free.give(*part)
                    known.update(range(*part))
                elif part[0] < part[1]:
                    out.append(part)
        free.check()
        assert free.num_pages == len(known)
        assert free.runs() == runs_of(known)
