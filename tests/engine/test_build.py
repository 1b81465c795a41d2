"""An engine put together from its configuration."""

from __future__ import annotations

import pytest

from pdserve.core.errors import ConfigError
from pdserve.engine.build import build_core
from pdserve.engine.config import EngineConfig
from pdserve.engine.kv_cache import PoolMemory


@pytest.mark.parametrize("num_pages", [2**31 - 1, 2**30])
def test_more_pages_than_the_machine_has_memory_are_refused_before_they_are_made(num_pages: int) -> None:
    """Shared memory of any size is given out, and its process killed when it is used."""

    def make_pool(*_: object) -> PoolMemory:
        raise AssertionError("it was made")

    config = EngineConfig(runner="fake", page_size=512, num_pages=num_pages)
    with pytest.raises(ConfigError, match=rf"--num-pages is {num_pages}; .* this machine has \d+: it must be at m"):
        build_core(config, make_pool)
