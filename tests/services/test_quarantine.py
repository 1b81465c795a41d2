"""A decode worker with pages in quarantine."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from pdserve.core.clock import MonotonicClock
from pdserve.core.config import WorkerConfig
from pdserve.core.request import Role
from pdserve.engine.fake import FakeRunner
from pdserve.kvtransfer import planes
from pdserve.kvtransfer.arrival import Stages
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.transport import PageSink
from pdserve.v1 import common_pb2
from tests.kvtransfer.world import SMALL
from tests.services.test_pair import prompt_of, run
from tests.services.world import Pair, pair, until
from tests.support.silent_sink import SilentSink


def test_a_late_pull_fails_its_request_at_once_and_holds_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    sinks = list[SilentSink]()

    async def open_sinks(*_: object) -> dict[str, PageSink]:
        sinks.append(SilentSink())
        return {"tcp": sinks[0]}

    monkeypatch.setattr(planes, "open_sinks", open_sinks)

    async def scenario(both: Pair) -> None:
        await both.submit("r", prompt_of(100))
        await until(lambda: both.to_decode.of("r").failed is not None, "the failure")
        failed = both.to_decode.of("r").failed
        assert failed is not None and failed.reason == "PULL_IDLE"
        assert both.decode.metric("pdserve_kv_quarantined_pages") > 0
        assert not both.decode.worker.ready() and both.prefill.worker.ready()
        assert both.decode.handler.load().num_free_pages < 512
        sinks[0].release.set()
        await both.decode.all_free()
        assert both.decode.worker.ready()

    run(scenario, worker=WorkerConfig(kv_transfer_config='{"max_quarantined_pages": 0}'))


def test_a_dead_engine_ends_the_process_though_a_pull_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = SilentSink()

    async def open_sinks(*_: object) -> dict[str, PageSink]:
        return {"tcp": sink}

    monkeypatch.setattr(planes, "open_sinks", open_sinks)

    def explode(*_: object) -> None:
        raise ValueError("the device fell off")

    async def scenario() -> None:
        async with pair(decode_role=Role.MIXED) as both:
            await both.submit("r", prompt_of(100))
            await until(lambda: both.to_decode.of("r").failed is not None, "the failure")
            monkeypatch.setattr(FakeRunner, "execute", explode)
            await both.to_decode.send(submit=both.submission("m", prompt_of(10), common_pb2.ROLE_MIXED))
            await until(lambda: bool(both.decode.failures), "the process to end")
            assert both.decode.failures[0].reason == "ENGINE_FAILED"
            assert sink.num_quarantined > 0, "the pull had ended, and this shows nothing"
            sink.release.set()

    asyncio.run(scenario())


def test_a_stage_that_has_no_page_left_takes_the_worker_out() -> None:
    """Its library broke: nothing of that layout comes in any more, though few pages are lost."""

    async def scenario() -> None:
        pool, theirs = KvPool(SMALL, 64), replace(SMALL, page_size=16)
        sink, max_bytes = SilentSink(), 4 * theirs.page_bytes
        stages = Stages(
            pool, SMALL, lambda *_: sink, MonotonicClock(), converts=frozenset({"page_size"}), max_bytes=max_bytes
        )
        await stages.hold("tcp", theirs)
        sink.num_quarantined = 3
        assert stages.num_quarantined == 3
        sink.num_quarantined = 4
        assert stages.num_quarantined == 64
        await stages.close()
        pool.close()

    asyncio.run(scenario())
