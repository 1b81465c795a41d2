"""Memory is taken for exactly the pages that are expected, and what they hold stays."""

from __future__ import annotations

import os

from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.populate import Populator, runs

from .world import LAYOUT, Ref, eventually, run, world


def taken(pool: KvPool) -> int:
    """Pages of the pool for which the system has given memory."""
    return os.fstat(pool.fd).st_blocks * 512 // pool.page_bytes


def test_expected_pages_are_taken_once_and_keep_what_they_hold() -> None:
    pool = KvPool(LAYOUT, 32)  # pages of 64 KiB
    pool.page(3)[:] = bytes([7]) * pool.page_bytes
    populator = Populator(pool)
    populator.expect([9, 3, 4, 31])
    populator.expect([4, 9])
    run(eventually(lambda: taken(pool) >= 4))
    populator.close()
    assert taken(pool) == 4
    assert bytes(pool.page(3)) == bytes([7]) * pool.page_bytes and bytes(pool.page(9)) == bytes(pool.page_bytes)
    populator.expect([1])  # closed: nothing happens
    populator.close()
    assert taken(pool) == 4
    pool.close()


def test_runs_follow_each_other_and_have_a_limit() -> None:
    assert list(runs([1, 2, 3, 5, 8, 9], 2)) == [(1, 2), (3, 1), (5, 1), (8, 2)]
    assert list(runs([], 4)) == [] and list(runs([7], 1)) == [(7, 1)]


def test_a_transfer_says_which_pages_it_will_write() -> None:
    async def body() -> None:
        told: list[int] = []
        async with world(expect=told.extend) as w:
            w.server.offer("t", 3)
            incoming = w.start("t", 3, num_cached=1, first=4)
            w.server.pages_ready("t", 0, [Ref(0), Ref(1), Ref(2)])
            w.complete("t", 3)
            await incoming.result()
        assert told == [5, 6]

    run(body())
