"""Planes as a worker builds them from its configuration."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from pdserve.core.config import WorkerConfig
from pdserve.core.engine_worker import EngineWorker
from pdserve.core.errors import ConfigError, TransferError
from pdserve.decode_service.worker import DecodeWorker
from pdserve.engine.config import EngineConfig
from pdserve.kvtransfer import memfd, planes
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.shm import ShmPageSink
from pdserve.kvtransfer.transport import SourcePageRef
from pdserve.prefill_service.worker import PrefillWorker

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
        sinks = await planes.open_sinks(worker, pool, DIGEST, None)
        assert tuple(sinks) == worker.kv_transfer.transports
        for sink in sinks.values():
            await sink.close()

    run(body())
    pool.close()


def test_sinks_made_before_one_that_is_refused_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[ShmPageSink]()

    def make_shm(*args: Any, **options: Any) -> ShmPageSink:
        made.append(ShmPageSink(*args, **options))
        return made[-1]

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ConfigError("no tcp today")

    async def body() -> None:
        with pytest.raises(ConfigError, match="no tcp today"):
            await planes.open_sinks(WorkerConfig(), pool, DIGEST, None)
        with pytest.raises(TransferError) as e:
            await made[0].pull("", b"", "t", [SourcePageRef(0, 1, 1)], [0])
        assert e.value.reason == "SINK_CLOSED"

    monkeypatch.setattr(planes, "ShmPageSink", make_shm)
    monkeypatch.setattr(planes, "TcpPageSink", refuse)
    pool = KvPool(SMALL, 2)
    run(body())
    assert len(made) == 1
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


@pytest.mark.parametrize("make_worker", [PrefillWorker, DecodeWorker])
@pytest.mark.parametrize("name", ["nixl", "mooncake"])
def test_a_library_that_is_not_there_is_told_before_the_model_is_loaded(
    name: str, make_worker: type[EngineWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    context: Any = SimpleNamespace(worker=WorkerConfig(kv_transfer_config=f'{{"transports": ["{name}"]}}'), tls=None)
    worker: Any = make_worker
    with pytest.raises(ConfigError, match=rf"transport {name} needs the package .*\[server,{name}\]"):
        run(worker(EngineConfig(model="/no/such/model")).start(context))


@pytest.mark.parametrize("make_worker", [PrefillWorker, DecodeWorker])
def test_a_plane_in_the_clear_is_refused_before_the_model_is_loaded(make_worker: type[EngineWorker]) -> None:
    context: Any = SimpleNamespace(
        worker=WorkerConfig(kv_transfer_config='{"transports": ["nixl", "tcp"]}'), tls=SimpleNamespace(required=True)
    )
    worker: Any = make_worker
    with pytest.raises(ConfigError, match="--require-tls: nixl would send pages in the clear"):
        run(worker(EngineConfig(model="/no/such/model")).start(context))
