"""Planes as a worker builds them from its configuration."""

from __future__ import annotations

import pytest

from pdserve.core.config import WorkerConfig
from pdserve.core.errors import ConfigError
from pdserve.kvtransfer import memfd, planes
from pdserve.kvtransfer.pool import KvPool

from .world import DIGEST, SMALL, run


@pytest.mark.parametrize(
    "config", [None, '{"transports": ["tcp"]}', '{"transports": ["tcp", "shm"]}', '{"transports": ["shm"]}']
)
def test_planes_come_in_the_order_asked(config: str | None) -> None:
    worker = WorkerConfig(kv_transfer_config=config)
    pool = KvPool(SMALL, 2)
    sources = planes.make_sources(worker, pool, DIGEST, "127.0.0.1", None)
    assert tuple(sources) == worker.kv_transfer.transports
    assert (planes.data_address(sources) is None) == ("tcp" not in sources)
    planes.close_sources(sources)

    async def body() -> None:
        sinks = planes.make_sinks(worker, pool, DIGEST, None)
        assert tuple(sinks) == worker.kv_transfer.transports
        for sink in sinks.values():
            await sink.close()

    run(body())
    pool.close()


def test_where_shm_cannot_work_it_is_left_out_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memfd, "_SEALS", 1 << 20)
    pool = KvPool(SMALL, 2)
    sources = planes.make_sources(WorkerConfig(), pool, DIGEST, "127.0.0.1", None)
    assert list(sources) == ["tcp"]
    planes.close_sources(sources)
    with pytest.raises(ConfigError, match="shm"):
        planes.make_sources(
            WorkerConfig(kv_transfer_config='{"transports": ["tcp", "shm"]}'), pool, DIGEST, "127.0.0.1", None
        )
    pool.close()
