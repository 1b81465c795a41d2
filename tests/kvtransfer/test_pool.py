"""The pool's memory."""

from __future__ import annotations

import os

import pytest

from pdserve.kvtransfer.pool import KvPool

from .world import LAYOUT


def test_the_pool_is_shared_memory_of_the_stated_size() -> None:
    pool = KvPool(LAYOUT, 3)
    assert os.fstat(pool.fd).st_size == len(pool.buffer) == 3 * LAYOUT.page_bytes
    pool.page(2)[:] = b"\1" * LAYOUT.page_bytes
    assert sum(pool.buffer) == LAYOUT.page_bytes
    for wrong in (-1, 3):
        with pytest.raises(IndexError):
            pool.page(wrong)
    view = pool.page(1)
    pool.close()
    pool.close()
    view[0] = 1  # a tensor over the pool may outlive it
