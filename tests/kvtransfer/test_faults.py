"""Faults through both control planes: lost, corrupt and stalled pages, silent peers, abort under a writer."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence

import pytest

from pdserve.core.clock import MonotonicClock
from pdserve.core.errors import TransferError
from pdserve.kvtransfer.fake import FakePageSink, FakePageSource, PageFate
from pdserve.kvtransfer.handoff import TransferState
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.transport import Capabilities, Overdue, PageSink, PageSource, SourcePageRef

from .world import Ref, run, world


class Faulty:
    """Makes a fake source and a fake sink whose pages meet a fate."""

    def __init__(self, fate: Callable[[str, SourcePageRef], PageFate]) -> None:
        self.fate, self.sources = fate, list[FakePageSource]()

    def source_of(self, pool: KvPool) -> PageSource:
        self.sources.append(FakePageSource(pool))
        return self.sources[0]

    def sink_of(self, pool: KvPool) -> PageSink:
        sink = FakePageSink(pool, self.sources, MonotonicClock())
        sink.fate = self.fate
        return sink


@pytest.mark.parametrize(
    ("fate", "reason"), [(PageFate(lost=True), "PULL_IDLE"), (PageFate(corrupt=True), "CORRUPT_PAGE")]
)
def test_one_bad_page_fails_its_transfer_only(fate: PageFate, reason: str) -> None:
    async def body() -> None:
        bad = Faulty(lambda transfer_id, page: fate if (transfer_id, page.page_id) == ("bad", 2) else PageFate())
        async with world(source_of=bad.source_of, sink_of=bad.sink_of) as w:
            incoming = {}
            for first, transfer_id in ((0, "bad"), (4, "good")):
                w.server.offer(transfer_id, 3)
                incoming[transfer_id] = w.start(transfer_id, 3, first=first)
                w.server.pages_ready(transfer_id, 0, [Ref(1), Ref(2), Ref(3)])
                w.complete(transfer_id, 3)
            with pytest.raises(TransferError) as e:
                await incoming["bad"].result()
            assert e.value.reason == reason
            await incoming["good"].result()
            assert w.decode.page(5) == w.prefill.page(2)
            assert await w.listener.end_of("bad") == (TransferState.FAILED, reason)
            assert await w.listener.end_of("good") == (TransferState.COMPLETE, "COMPLETE")

    run(body())


def test_abort_of_a_stalled_pull_returns_and_tells_prefill() -> None:
    async def body() -> None:
        began = asyncio.Event()

        def stall(transfer_id: str, page: SourcePageRef) -> PageFate:
            began.set()
            return PageFate(delay_s=math.inf if page.page_id == 2 else 0)

        stalled = Faulty(stall)
        async with world(source_of=stalled.source_of, sink_of=stalled.sink_of) as w:
            w.server.offer("t", 3)
            incoming = w.start("t", 3)
            w.server.pages_ready("t", 0, [Ref(1), Ref(2), Ref(3)])
            await began.wait()
            await incoming.abort("CLIENT_CANCELLED")
            assert incoming.state is TransferState.ABORTED
            assert await w.listener.end_of("t") == (TransferState.ABORTED, "CLIENT_CANCELLED")

    run(body())


class SlowToStop:
    """A sink whose writer goes on for a while after it was cancelled, until `release`."""

    capabilities = Capabilities(quiescent_cancel=False, zero_copy=True, device_memory=False)
    late: Overdue

    def __init__(self) -> None:
        self.began, self.cancelled, self.release = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.writing, self.address = False, ""

    async def pull(
        self,
        address: str,
        token: bytes,
        transfer_id: str,
        sources: Sequence[SourcePageRef],
        destinations: Sequence[int],
    ) -> int:
        self.writing, self.address = True, address
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()
            await self.release.wait()
            self.writing = False
        return 0

    @property
    def num_quarantined(self) -> int:
        return 2 * (self.writing and self.cancelled.is_set())

    def on_overdue(self, callback: Overdue) -> None:
        self.late = callback

    async def close(self) -> None:
        self.release.set()


@pytest.mark.parametrize("end", ["abort", "closed by prefill", "stream lost", "overdue", "finished"])
def test_no_end_is_told_while_a_writer_still_runs(end: str) -> None:
    async def body() -> None:
        sink = SlowToStop()
        async with world(sink_of=lambda pool: sink) as w:
            w.server.offer("t", 2)
            incoming = w.start("t", 2)
            w.server.pages_ready("t", 0, [Ref(1)])
            await sink.began.wait()
            waits = [asyncio.create_task(incoming.result())]
            if end == "abort":
                waits += [asyncio.create_task(incoming.abort()), asyncio.create_task(incoming.abort())]
            elif end == "closed by prefill":
                w.server.close("t", "ENGINE_FAILED")
            elif end == "stream lost":
                await w.grpc_server.stop(None)
            elif end == "overdue":
                sink.late("t", sink.address, TransferError("too slow", reason="PULL_IDLE"))
            else:
                w.complete("t", 2, finished=True)
            await sink.cancelled.wait()
            error = await incoming.failure()  # told at once
            assert (error is None) == (end == "finished")
            assert w.client.num_quarantined == 2 and w.client.num_open == 1
            assert sink.writing and not any(task.done() for task in waits)
            sink.release.set()
            done = await asyncio.gather(*waits, return_exceptions=True)
            assert not sink.writing
            assert isinstance(done[0], TransferError) == (end != "finished")
            if end == "overdue":
                assert await w.listener.end_of("t") == (TransferState.FAILED, "PULL_IDLE")

    run(body())


def test_a_peer_that_falls_silent_is_taken_for_dead() -> None:
    async def body() -> None:
        async with world(heartbeat_s=3600, peer_timeout_s=0.5) as w:
            w.server.offer("t", 2)
            incoming = w.start("t", 2)
            with pytest.raises(TransferError) as e:
                await incoming.result()
            assert e.value.reason == "PEER_SILENT"
            assert await w.listener.end_of("t") == (TransferState.FAILED, "PEER_LOST")

    run(body())


def test_a_process_that_stood_still_takes_nobody_for_dead() -> None:
    """Both sides are of this process: while it stands still no sign of life can come."""

    async def body() -> None:
        async with world(heartbeat_s=0.05, peer_timeout_s=0.6) as w:
            w.server.offer("t", 1)
            incoming = w.start("t", 1)
            await w.listener.until(lambda: w.listener.opened == ["t"])
            time.sleep(1.0)  # noqa: ASYNC251  nothing runs: that is the fault
            w.server.pages_ready("t", 0, [Ref(6)])
            w.complete("t", 1)
            await incoming.result()
            assert w.decode.page(0) == w.prefill.page(6)

    run(body())


def test_heartbeats_keep_a_long_prompt_waiting() -> None:
    async def body() -> None:
        async with world(heartbeat_s=0.1, peer_timeout_s=1.0) as w:
            w.server.offer("t", 1)
            incoming = w.start("t", 1)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(incoming.result(), 2.5)  # more than twice the limit of a silent peer
            w.server.pages_ready("t", 0, [Ref(6)])
            w.complete("t", 1)
            await incoming.result()
            assert w.decode.page(0) == w.prefill.page(6)

    run(body())


@pytest.mark.parametrize("plane", ["tcp", "shm"])
def test_many_transfers_at_once_end_right_or_aborted(plane: str) -> None:
    async def body() -> None:
        async with world(num_pages=256, offered=(plane,), wanted=(plane,)) as w:
            incoming = []
            for i in range(64):
                w.server.offer(f"t{i}", 4)
                incoming.append(w.start(f"t{i}", 4, first=4 * i))
            for i in range(64):
                w.server.pages_ready(f"t{i}", 0, [Ref((4 * i + 7) % 256), Ref((4 * i + 8) % 256)])
            aborts = [asyncio.create_task(t.abort()) for t in incoming[::2]]
            for i in range(64):
                w.server.pages_ready(f"t{i}", 2, [Ref((4 * i + 9) % 256), Ref((4 * i + 10) % 256)])
                w.complete(f"t{i}", 4)
            await asyncio.gather(*aborts)
            for i in range(1, 64, 2):
                assert (await incoming[i].result()).num_pages == 4
                for k in range(4):
                    assert w.decode.page(4 * i + k) == w.prefill.page((4 * i + 7 + k) % 256)
            await w.listener.until(lambda: len(w.listener.ended) == 64)
            assert w.server.num_leases == 0 and w.client.num_open == 0

    run(body())
