"""PagePool: one state per page, all-or-nothing allocation, generations, and a check that can fail."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.page_pool import PagePool, PageState


def test_pages_come_in_runs_and_neighbours_are_one_run_again() -> None:
    pool = PagePool(8)
    first, second = pool.allocate(3), pool.allocate(4)
    assert (first, second) == ([0, 1, 2], [3, 4, 5, 6])
    assert not pool.can_allocate(2) and pool.can_allocate(1)
    pool.release(second)
    pool.release(first)
    assert pool.allocate(8) == list(range(8))
    pool.check()


def test_single_pages_fill_holes_and_leave_long_runs() -> None:
    pool = PagePool(8)
    hole, other = pool.allocate(1), pool.allocate(1)
    pool.release(hole)
    assert pool.allocate(1) == hole
    assert pool.allocate(6) == [2, 3, 4, 5, 6, 7]
    pool.release([*other, *hole])
    assert pool.allocate(2) == [0, 1]


def test_pages_are_evicted_ahead_of_need_where_no_run_is_long_enough() -> None:
    """Two leave for one that is asked for, and no more while a run is long enough."""
    pool = PagePool(8, num_spare=1)
    pages = pool.allocate(8)
    for page in pages:
        pool.keep(page)
    pool.release(pages)
    assert pool.allocate(1) == [6] and (pool.count(PageState.CACHED), pool.count(PageState.FREE)) == (6, 1)
    assert pool.allocate(1) == [7] and pool.count(PageState.CACHED) == 6
    pool.release([6])
    assert pool.allocate(2) == [4, 5] and pool.num_free == 5
    assert (pool.count(PageState.CACHED), pool.count(PageState.FREE)) == (4, 1)
    assert pool.allocate(5) == [0, 1, 2, 3, 6]
    pool.check(dict.fromkeys(range(8), 1))


def test_a_page_is_free_after_its_last_holder_and_its_generation_says_so() -> None:
    pool = PagePool(2)
    pages = pool.allocate(2)
    pool.hold(pages[:1])
    pool.release(pages)
    assert (pool.state(pages[0]), pool.state(pages[1])) == (PageState.HELD, PageState.FREE)
    assert (pool.generation(pages[0]), pool.generation(pages[1])) == (0, 1)
    pool.check({pages[0]: 1})
    pool.release(pages[:1])
    assert pool.generation(pages[0]) == 1 and pool.num_free == 2


def test_filling_pages_become_held_or_free_or_quarantined() -> None:
    pool = PagePool(3)
    pages = pool.allocate(3, PageState.FILLING)
    pool.validate(pages[:1])
    pool.move(pages[1:2], PageState.FILLING, PageState.FREE)
    pool.move(pages[2:], PageState.FILLING, PageState.QUARANTINE)
    assert [pool.state(p) for p in pages] == [PageState.HELD, PageState.FREE, PageState.QUARANTINE]
    pool.check({pages[0]: 1})
    assert pool.num_free == 1
    pool.move(pages[2:], PageState.QUARANTINE, PageState.FREE)
    assert pool.num_free == 2


def test_kept_pages_are_held_again_or_evicted_only_when_no_page_is_free() -> None:
    pool = PagePool(4)
    first, second = pool.allocate(2), pool.allocate(1)
    for page in (*first, *second):
        pool.keep(page)
    pool.release(first)
    pool.release(second)
    assert (pool.num_free, pool.count(PageState.FREE), pool.count(PageState.CACHED)) == (4, 1, 3)
    assert pool.allocate(1) == [3] and pool.count(PageState.CACHED) == 3
    pool.hold(second)
    pool.release(second)  # used last: evicted last
    evicted = [pool.allocate(1)[0] for _ in range(3)]
    assert evicted == [first[1], first[0], second[0]]  # of a prefix, the deepest page first
    assert [pool.generation(p) for p in evicted] == [1, 1, 1] and pool.num_free == 0
    pool.release(evicted)  # what was kept once is not kept for ever
    assert pool.count(PageState.FREE) == 3
    pool.check({3: 1})


def test_a_page_that_is_kept_no_more_goes_with_its_last_holder() -> None:
    pool = PagePool(2)
    held, cached = pool.allocate(1), pool.allocate(1)
    for page in (*held, *cached):
        pool.keep(page)
    pool.release(cached)
    for page in (*held, *cached):
        pool.unkeep(page)
    assert pool.state(cached[0]) is PageState.FREE
    pool.release(held)
    assert pool.count(PageState.FREE) == 2
    pool.check({})


def test_illegal_use_is_a_bug() -> None:
    pool = PagePool(2)
    page = pool.allocate(1)
    with pytest.raises(AssertionError):
        pool.allocate(2)
    with pytest.raises(AssertionError):
        pool.move(page, PageState.HELD, PageState.FREE)
    with pytest.raises(AssertionError):
        pool.keep(1)
    with pytest.raises(AssertionError):
        pool.validate(page)
    with pytest.raises(AssertionError):
        pool.check({})
    pool.release(page)
    with pytest.raises(AssertionError):
        pool.release(page)
    with pytest.raises(ValueError, match="at least 1"):
        PagePool(0)


@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "fill", "hold", "keep", "unkeep", "release", "validate"]), st.integers(1, 4))
    )
)
def test_any_use_keeps_the_sum(steps: list[tuple[str, int]]) -> None:
    pool = PagePool(6, num_spare=1)
    held: list[list[int]] = []
    filling: list[list[int]] = []
    for what, n in steps:
        if what == "take" and pool.can_allocate(n):
            free = [page for page in range(6) if pool.state(page) is PageState.FREE]
            held.append(pool.allocate(n))
            if any(set(range(page, page + n)) <= set(free) for page in free):
                assert held[-1] == list(range(held[-1][0], held[-1][0] + n)) and set(held[-1]) <= set(free)
        elif what == "fill" and pool.can_allocate(n):
            filling.append(pool.allocate(n, PageState.FILLING))
        elif what == "hold" and held:
            held.append(held[n % len(held)])
            pool.hold(held[-1])
        elif what in ("keep", "unkeep") and held:
            for page in held[n % len(held)][:n]:
                (pool.keep if what == "keep" else pool.unkeep)(page)
        elif what == "release" and held:
            pool.release(held.pop(n % len(held)))
        elif what == "validate" and filling:
            held.append(filling.pop(n % len(filling)))
            pool.validate(held[-1])
        pool.check(Counter(page for pages in held for page in pages))
        assert pool.count(PageState.FILLING) == sum(map(len, filling))
