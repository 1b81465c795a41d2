"""PagePool: one state per page, all-or-nothing allocation, generations, and a check that can fail."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.page_pool import PagePool, PageState


def test_pages_come_in_runs_and_come_back_as_runs() -> None:
    pool = PagePool(8)
    first, second = pool.allocate(3), pool.allocate(4)
    assert (first, second) == ([0, 1, 2], [3, 4, 5, 6])
    assert not pool.can_allocate(2) and pool.can_allocate(1)
    pool.release(first)
    pool.release(second)
    assert pool.allocate(4) == second
    pool.check()


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


def test_cached_pages_are_held_again_or_freed() -> None:
    pool = PagePool(2)
    pages = pool.allocate(2)
    pool.release(pages, keep=True)
    assert pool.num_free == 0 and pool.count(PageState.CACHED) == 2
    pool.hold(pages[:1])
    pool.move(pages[1:], PageState.CACHED, PageState.FREE)
    pool.check({pages[0]: 1})


def test_illegal_use_is_a_bug() -> None:
    pool = PagePool(2)
    page = pool.allocate(1)
    with pytest.raises(AssertionError):
        pool.allocate(2)
    with pytest.raises(AssertionError):
        pool.move(page, PageState.HELD, PageState.FREE)
    with pytest.raises(AssertionError):
        pool.validate(page)
    with pytest.raises(AssertionError):
        pool.check({})
    pool.release(page)
    with pytest.raises(AssertionError):
        pool.release(page)
    with pytest.raises(ValueError, match="at least 1"):
        PagePool(0)


@given(st.lists(st.tuples(st.sampled_from(["take", "fill", "hold", "release", "validate"]), st.integers(1, 4))))
def test_any_use_keeps_the_sum(steps: list[tuple[str, int]]) -> None:
    pool = PagePool(6)
    held: list[list[int]] = []
    filling: list[list[int]] = []
    for what, n in steps:
        if what == "take" and pool.can_allocate(n):
            held.append(pool.allocate(n))
        elif what == "fill" and pool.can_allocate(n):
            filling.append(pool.allocate(n, PageState.FILLING))
        elif what == "hold" and held:
            held.append(held[n % len(held)])
            pool.hold(held[-1])
        elif what == "release" and held:
            pool.release(held.pop(n % len(held)))
        elif what == "validate" and filling:
            held.append(filling.pop(n % len(filling)))
            pool.validate(held[-1])
        pool.check(Counter(page for pages in held for page in pages))
        assert pool.count(PageState.FILLING) == sum(map(len, filling))
