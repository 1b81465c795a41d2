"""The pool's memory."""

from __future__ import annotations

import os

import pytest

from pdserve.core.errors import ConfigError
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


@pytest.mark.parametrize("num_pages", [1 << 40, 1 << 62, 10**30])
def test_memory_that_nobody_has_is_refused(num_pages: int) -> None:
    with pytest.raises(
        ConfigError, match=r"KV pool: cannot have \d+ bytes .*; lower --kv-cache-memory-bytes or --num-pages"
    ):
        KvPool(LAYOUT, num_pages)
