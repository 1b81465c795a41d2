"""A system that gives no more threads: the pull fails at once, and nothing of it is ever done later."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import xxhash

from pdserve.core.errors import TransferError
from pdserve.kvtransfer.mooncake import _MooncakeRead
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.remote_reads import ReadState, Run
from pdserve.kvtransfer.shm import ShmPageSink
from pdserve.kvtransfer.tasks import submit
from pdserve.kvtransfer.transport import SourcePageRef

from .test_staging import SmallWorld
from .world import DIGEST, SMALL, fill, run, sink_over, source_over


@contextmanager
def no_threads(monkeypatch: pytest.MonkeyPatch, name: str, besides: int = 0) -> Iterator[None]:
    """No thread of this name can be started meanwhile, besides some."""
    start, left = threading.Thread.start, [None] * besides

    def refused(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            if not left:
                raise RuntimeError("can't start new thread")
            left.pop()
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        yield


def test_what_no_thread_could_take_is_not_done_later(monkeypatch: pytest.MonkeyPatch) -> None:
    done = list[str]()
    with ThreadPoolExecutor(1, thread_name_prefix="few") as threads:
        with no_threads(monkeypatch, "few"), pytest.raises(TransferError, match="can't start new thread") as e:
            submit(threads, done.append, "refused")
        assert e.value.reason == "NO_THREAD"
        submit(threads, done.append, "taken").result(10)
    assert done == ["taken"]


def test_what_a_thread_took_all_the_same_is_waited_for() -> None:
    class Slow(ThreadPoolExecutor):
        """Another thread takes the work between its being queued and the refusal."""

        def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
            super().submit(*args, **kwargs)
            assert began.wait(10)
            raise RuntimeError("can't start new thread")

    began, go_on = threading.Event(), threading.Event()

    def work() -> str:
        began.set()
        assert go_on.wait(10)
        return "done"

    with Slow(1) as threads:
        future = submit(threads, work)
        assert not future.done()
        go_on.set()
        assert future.result(10) == "done"


def test_what_is_cancelled_before_it_began_is_not_done() -> None:
    gate, done = threading.Event(), list[str]()
    with ThreadPoolExecutor(1) as threads:
        submit(threads, gate.wait, 10)
        second = submit(threads, done.append, "second")
        assert second.cancel()
        gate.set()
    assert done == []


@pytest.mark.parametrize(("plane", "thread"), [("tcp", "kv-pull"), ("tcp", "asyncio"), ("shm", "kv-copy")])
def test_a_pull_without_a_thread_never_writes(plane: str, thread: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        there, here = KvPool(SMALL, 4), KvPool(SMALL, 4)
        fill(there)
        source = source_over(plane, there)
        sink = ShmPageSink(here, DIGEST, inline_bytes=0) if plane == "shm" else sink_over(plane, here)
        token = source.new_reader()
        pages = [SourcePageRef(i, 1, xxhash.xxh3_64_intdigest(there.page(i))) for i in range(4)]
        source.publish("t", token, pages)
        with no_threads(monkeypatch, thread), pytest.raises(TransferError) as e:
            await sink.pull(source.address, token, "t", pages[:1], [0])
        assert e.value.reason == "NO_THREAD"
        await sink.pull(source.address, token, "t", pages[1:2], [1])
        assert not any(here.page(0)), "a refused pull wrote into pages that were free"
        assert here.page(1) == there.page(1)
        await sink.close()
        source.close()

    run(body())


def test_a_conversion_without_a_thread_never_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        w = SmallWorld(8)
        w.threads.shutdown()
        w.stage._threads = w.threads = ThreadPoolExecutor(1, thread_name_prefix="kv-convert")
        with no_threads(monkeypatch, "kv-convert"), pytest.raises(TransferError) as e:
            await w.pull()
        assert e.value.reason == "NO_THREAD"
        assert w.stage.num_free_slots == 8
        await asyncio.get_running_loop().run_in_executor(w.threads, int)  # what was queued before is over
        assert all(w.is_poison(page) for page in range(4)), "a refused conversion wrote into pages that were free"
        w.threads.shutdown()

    run(body())


def test_a_mooncake_read_without_a_thread_ends_when_its_other_runs_have(monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        """Begins a batch when it may; batches go on until they are told to end."""

        may_begin, status, num_begun = threading.Event(), 0, 0

        def batch_transfer_async_read(self, *_: object) -> int:
            assert self.may_begin.wait(10)
            self.num_begun += 1
            return self.num_begun

        def transfer_check_status(self, _: int) -> int:
            return self.status

    engine = Engine()
    with ThreadPoolExecutor(4, thread_name_prefix="few") as threads, no_threads(monkeypatch, "few", besides=1):
        read = _MooncakeRead(engine, "peer", [Run(i, i, 1) for i in range(40)], threads)
        assert read.poll() is ReadState.PENDING
        engine.may_begin.set()
        next(iter(read._submitting)).result(10)
        assert read.poll() is ReadState.PENDING, "what one thread began still writes"
        begun = engine.num_begun
        engine.status = 1
        assert read.poll() is ReadState.FAILED
        assert 0 < engine.num_begun == begun < 40, "what no thread took was begun later"
