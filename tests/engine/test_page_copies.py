"""Copies of a step: which memory, in which order, before what is computed."""

from __future__ import annotations

from pdserve.engine.page_copies import PageCopies
from pdserve.engine.step import PageCopy, PageCopyKind


def test_copies_go_between_the_memories_in_their_order() -> None:
    pool, host = bytearray(b"aabbcc"), bytearray(b"xxyy")
    copies = PageCopies(2, memoryview(pool), memoryview(host))
    copies.apply(
        [
            PageCopy(0, 1, PageCopyKind.SWAP_OUT),  # before the page is written again
            PageCopy(2, 0, PageCopyKind.COPY),
            PageCopy(1, 1, PageCopyKind.SWAP_IN),  # what the first copy brought out
        ]
    )
    assert (pool, host) == (b"ccaacc", b"xxaa")


def test_without_a_host_pool_pages_are_copied_within_the_pool() -> None:
    pool = bytearray(b"aabb")
    PageCopies(2, memoryview(pool)).apply([PageCopy(0, 1, PageCopyKind.COPY)])
    assert pool == b"aaaa"
