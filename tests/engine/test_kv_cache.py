"""Pool memory."""

from __future__ import annotations

import multiprocessing

import pytest

from pdserve.core.errors import ConfigError
from pdserve.core.layout import KVLayout
from pdserve.engine.kv_cache import PlainPool

LAYOUT = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=4, page_size=2, dtype="float32")


def test_a_forked_process_writes_no_page_of_its_parent() -> None:
    pool = PlainPool(LAYOUT, 3)
    pool.buffer[:4] = b"mine"

    def child() -> None:
        assert pool.buffer[:4] == b"mine"
        pool.buffer[:4] = b"hers"

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(30)
    process.kill()
    assert process.exitcode == 0
    assert pool.buffer[:4] == b"mine"


@pytest.mark.parametrize("num_pages", [1 << 54, 1 << 62])
def test_memory_that_is_not_there_is_refused(num_pages: int) -> None:
    with pytest.raises(ConfigError, match=r"bytes for KV pages; lower --kv-cache-memory-bytes"):
        PlainPool(LAYOUT, num_pages)
