"""OneSidedSink with a library that does what the test says: who waits for whom, and what is not given up too early."""

from __future__ import annotations

import asyncio
import ctypes
import json
import math
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.errors import TransferError
from pdserve.kvtransfer import onesided
from pdserve.kvtransfer.onesided import MAX_PER_PEER, WINDOW, OneSidedSink
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.remote_reads import LocalMemory, OneSidedSource, ReadState, RemotePool, Run, Runs
from pdserve.kvtransfer.transport import SourcePageRef

from .world import SMALL, eventually, fill, reason_of, refs, run

NUM_PAGES = 64


@dataclass(eq=False)
class ScriptedRead:
    """A read that ends when the test says so."""

    source: RemotePool
    runs: Sequence[Run]
    state: ReadState = ReadState.PENDING
    after: ReadState = ReadState.PENDING

    def end(self, state: ReadState = ReadState.DONE, *, copy: bool = True) -> None:
        if copy:
            for r in self.runs:
                ctypes.memmove(r.local, r.remote, r.num_bytes)
        self.state = state

    def poll(self) -> ReadState:
        return self.state


@dataclass
class ScriptedLibrary:
    """Keeps what it was asked; `at_once` ends each read where it begins."""

    at_once: bool = False
    refuse: str = ""
    reads: list[ScriptedRead] = field(default_factory=list)
    forgotten: list[RemotePool] = field(default_factory=list)
    closed: bool = False

    def begin(self, source: RemotePool, runs: Sequence[Run]) -> ScriptedRead:
        if self.refuse:
            raise TransferError("scripted", reason=self.refuse)
        assert not self.closed
        read = ScriptedRead(source, runs)
        if self.at_once:
            read.end()
        self.reads.append(read)
        return read

    def forget(self, source: RemotePool) -> None:
        assert not any(r.source == source and r.state is ReadState.PENDING for r in self.reads)
        self.forgotten.append(source)

    def close(self) -> None:
        assert not any(r.state is ReadState.PENDING for r in self.reads)
        self.closed = True

    @property
    def pending(self) -> list[ScriptedRead]:
        return [r for r in self.reads if r.state is ReadState.PENDING]


@dataclass
class Pair:
    """A sink, its library, and the pool of a source."""

    sink: OneSidedSink
    scripted: ScriptedLibrary
    there: KvPool
    here: KvPool
    remote: RemotePool
    overdue: list[tuple[str, str]] = field(default_factory=list)

    def refs(self, page_ids: Sequence[int]) -> list[SourcePageRef]:
        return refs(self.there, page_ids)

    def start(
        self, page_ids: Sequence[int], destinations: Sequence[int], *, instance: str = "a", transfer_id: str = "t"
    ) -> asyncio.Task[int]:
        address = replace(self.remote, instance=instance).encode()
        return asyncio.create_task(self.sink.pull(address, bytes(16), transfer_id, self.refs(page_ids), destinations))


@asynccontextmanager
async def pair(idle_s: float = 30.0, pages_per_part: int = 4, at_once: bool = False) -> AsyncIterator[Pair]:
    there, here = KvPool(SMALL, NUM_PAGES), KvPool(SMALL, NUM_PAGES)
    fill(there)
    memory = LocalMemory(there)
    library = ScriptedLibrary(at_once=at_once)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onesided, "PART_BYTES", pages_per_part * SMALL.page_bytes)
        sink = OneSidedSink(here, "scripted", library, idle_s=idle_s, base_s=60.0)
    p = Pair(sink, library, there, here, RemotePool("scripted", "a", "", memory.base, NUM_PAGES, SMALL.page_bytes))
    sink.on_overdue(lambda transfer_id, address, error: p.overdue.append((transfer_id, error.reason)))
    try:
        yield p
    finally:
        for read in library.pending:
            read.end(copy=False)
        await asyncio.wait_for(sink.close(), 10)
        assert library.closed and sink.num_quarantined == 0


async def begun(p: Pair, count: int) -> None:
    await eventually(lambda: len(p.scripted.reads) >= count)


@given(st.permutations(range(NUM_PAGES)), st.permutations(range(NUM_PAGES)), st.integers(0, NUM_PAGES))
@settings(max_examples=20, deadline=None)
def test_pages_of_any_order_arrive_where_they_belong(there: list[int], here: list[int], count: int) -> None:
    async def body() -> None:
        async with pair(at_once=True) as p:
            assert await p.start(there[:count], here[:count]) == count * SMALL.page_bytes
            for source, destination in zip(there[:count], here[:count], strict=True):
                assert p.here.page(destination) == p.there.page(source)
            assert not any(any(p.here.page(i)) for i in here[count:])

    run(body())


def test_neighbours_on_both_sides_are_one_run_and_parts_come_a_window_at_a_time() -> None:
    async def body() -> None:
        async with pair(pages_per_part=4) as p:
            pull = p.start([9, 8, 7, 6, *range(20, 30)], [19, 18, 17, 16, *range(30, 40)])
            await begun(p, WINDOW)
            assert len(p.scripted.reads) == WINDOW
            assert [len(r.runs) for r in p.scripted.reads] == [1, 1]
            for _ in range(4):
                p.scripted.pending[0].end()
                await eventually(lambda: len(p.scripted.pending) == WINDOW or pull.done() or len(p.scripted.reads) == 4)
            await eventually(lambda: pull.done() or bool([r.end() for r in p.scripted.pending]))
            assert await pull == 14 * SMALL.page_bytes

    run(body())


def test_what_cannot_be_safe_is_refused_before_anything_is_read() -> None:
    async def body() -> None:
        async with pair() as p:
            page = p.refs([1])
            whole = p.remote.encode()
            cases = {
                "NO_CHECKSUM": (whole, [SourcePageRef(1, 1, 0)]),
                "ERR_STALE": (whole, [SourcePageRef(NUM_PAGES, 1, 5)]),
                "PAGE_BYTES": (replace(p.remote, page_bytes=SMALL.page_bytes * 2).encode(), page),
                "BAD_ADDRESS": ("127.0.0.1:80", page),
            }
            for reason, (address, ask) in cases.items():
                assert await reason_of(asyncio.create_task(p.sink.pull(address, b"", "t", ask, [0]))) == reason
            assert p.scripted.reads == []
            p.scripted.refuse = "PEER_GONE"
            assert await reason_of(p.start([1], [1])) == "PEER_GONE"
            p.scripted.refuse = ""
            pull = p.start([1], [1])
            await begun(p, 1)
            assert p.scripted.forgotten == [p.remote]  # what failed is found anew
            p.scripted.reads[0].end()
            await pull

    run(body())


def test_a_stale_or_corrupt_page_fails_its_pull_once_nothing_writes() -> None:
    async def body() -> None:
        async with pair(pages_per_part=1) as p:
            pull = p.start([0, 1, 2], [0, 1, 2])
            await begun(p, 2)
            first, second = p.scripted.reads
            p.there.page(0)[3] ^= 1  # after it was hashed
            first.end()
            await eventually(lambda: p.sink.num_quarantined == 3)
            assert not pull.done()
            count = len(p.scripted.reads)  # the last may have begun while the first was hashed
            second.end()
            for read in p.scripted.reads[2:]:
                read.end()
            assert await reason_of(pull) == "CORRUPT_PAGE"
            assert len(p.scripted.reads) == count

    run(body())


def test_parts_are_hashed_while_others_are_read_and_the_pull_waits_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with pair(pages_per_part=1) as p:
            hashing, go_on = threading.Event(), threading.Event()
            first_wrong = p.sink._first_wrong

            def held(part: onesided._Part) -> int | None:
                hashing.set()
                assert go_on.wait(10)
                return first_wrong(part)

            monkeypatch.setattr(p.sink, "_first_wrong", held)
            pull = p.start([0, 1, 2], [0, 1, 2])
            await begun(p, 2)
            p.scripted.reads[0].end()
            await begun(p, 3)
            await eventually(hashing.is_set)
            p.scripted.reads[1].end()
            monkeypatch.undo()  # the last is hashed where it arrived
            p.scripted.reads[2].end()
            done, _ = await asyncio.wait([pull], timeout=0.05)
            assert not done
            go_on.set()
            assert await pull == 3 * SMALL.page_bytes

    run(body())


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=40), st.integers(1, 45))
def test_runs_are_the_pages_in_their_order_and_no_two_can_be_one(pages: list[tuple[int, int]], per_part: int) -> None:
    source = RemotePool("scripted", "a", "", (1 << 64) - 31 * 4096, 31, 4096)
    there, here = (np.array(ids, np.uint64) for ids in zip(*pages, strict=True))
    parts = Runs.of_pages(source, 1 << 40, there, here, per_part)
    assert len(parts) == -(-len(pages) // per_part)
    for number, runs in enumerate(parts):
        expected = pages[number * per_part : (number + 1) * per_part]
        found = [(run.remote + at, run.local + at) for run in runs for at in range(0, run.num_bytes, 4096)]
        assert found == [(source.base + remote * 4096, (1 << 40) + local * 4096) for remote, local in expected]
        ends = [(run.remote + run.num_bytes, run.local + run.num_bytes) for run in runs]
        assert not any(end == (run.remote, run.local) for end, run in zip(ends, list(runs)[1:], strict=False))
        assert [*runs[:2]] == [runs[i] for i in range(min(2, len(runs)))]
    [whole] = Runs.of_pages(source, 1 << 40, there, here)
    assert sum(run.num_bytes for run in whole) == len(pages) * 4096


def test_a_cancelled_pull_returns_only_when_its_reads_have_ended() -> None:
    async def body() -> None:
        async with pair() as p:
            pull = p.start(range(8), range(8))
            await begun(p, 2)
            for _ in range(3):  # however often
                pull.cancel()
                done, _ = await asyncio.wait([pull], timeout=0.05)
                assert not done
            await eventually(lambda: p.sink.num_quarantined == 8)
            p.scripted.reads[0].end()
            done, _ = await asyncio.wait([pull], timeout=0.05)
            assert not done
            p.scripted.reads[1].end(ReadState.FAILED, copy=False)
            with pytest.raises(asyncio.CancelledError):
                await pull
            await eventually(lambda: p.sink.num_quarantined == 0)
            assert p.overdue == []

    run(body())


def test_a_late_pull_is_told_at_once_and_ends_with_its_reads() -> None:
    async def body() -> None:
        async with pair(idle_s=0.05) as p:
            pull = p.start([1, 2], [1, 2], transfer_id="late")
            await eventually(lambda: p.overdue == [("late", "PULL_IDLE")])
            p.sink._idle_s = 30.0
            await eventually(lambda: p.sink.num_quarantined == 2)
            assert not pull.done()
            assert await reason_of(p.start([3], [3])) == "PEER_STALLED"
            other = p.start([4], [4], instance="b")
            await begun(p, 2)
            p.scripted.reads[1].end()
            await other
            p.scripted.reads[0].end()
            assert await reason_of(pull) == "PULL_IDLE"
            again = p.start([3], [3])
            await begun(p, 3)
            p.scripted.reads[2].end()
            await again

    run(body())


def test_a_lost_source_is_found_anew_after_all_its_reads_have_ended() -> None:
    async def body() -> None:
        async with pair() as p:
            pulls = [p.start([i], [i]) for i in range(2)]
            await begun(p, 2)
            p.scripted.reads[0].end(ReadState.FAILED, copy=False)
            assert await reason_of(pulls[0]) == "PEER_GONE"
            third = p.start([5], [5])
            done, _ = await asyncio.wait([third], timeout=0.05)
            assert not done and len(p.scripted.reads) == 2 and p.scripted.forgotten == []
            p.scripted.reads[1].end(ReadState.FAILED, copy=False)
            assert await reason_of(pulls[1]) == "PEER_GONE"
            await begun(p, 3)
            assert p.scripted.forgotten == [p.remote]
            p.scripted.reads[2].end()
            await third

    run(body())


def test_pages_of_a_read_with_an_unknown_end_stay_in_quarantine() -> None:
    async def body() -> None:
        async with pair() as p:
            pull = p.start([1, 2, 3], [1, 2, 3])
            await begun(p, 1)
            p.scripted.reads[0].end(ReadState.UNKNOWN, copy=False)
            await eventually(lambda: p.sink.num_quarantined == 3)
            pull.cancel()
            done, _ = await asyncio.wait([pull], timeout=0.1)
            assert not done
            assert await reason_of(p.start([4], [4])) == "PEER_STALLED"
            p.sink._active[0].stuck.clear()  # only the end of the process does this
            with pytest.raises(asyncio.CancelledError):
                await pull

    run(body())


def test_few_pulls_of_a_source_run_at_once_and_a_waiting_one_ends_at_once() -> None:
    async def body() -> None:
        async with pair() as p:
            pulls = [p.start([i], [i]) for i in range(MAX_PER_PEER + 2)]
            other = p.start([9], [9], instance="b")
            await begun(p, MAX_PER_PEER + 1)
            pulls[-1].cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(pulls[-1], 10)
            assert len(p.scripted.reads) == MAX_PER_PEER + 1
            for read in p.scripted.pending:
                read.end()
            await begun(p, MAX_PER_PEER + 2)
            p.scripted.reads[-1].end()
            await asyncio.gather(other, *pulls[:-1])

    run(body())


def test_close_waits_for_every_read() -> None:
    async def body() -> None:
        async with pair() as p:
            pulls = [p.start([i], [i]) for i in range(MAX_PER_PEER + 1)]
            await begun(p, MAX_PER_PEER)
            closing = asyncio.create_task(p.sink.close())
            assert await reason_of(pulls[-1]) == "SINK_CLOSED"
            done, _ = await asyncio.wait([closing], timeout=0.05)
            assert not done and not p.scripted.closed
            assert await reason_of(p.start([20], [20])) == "SINK_CLOSED"
            for read in p.scripted.pending:
                read.end()
            for pull in pulls[:-1]:
                assert await reason_of(pull) == "SINK_CLOSED"
            await asyncio.wait_for(closing, 10)
            assert p.scripted.closed

    run(body())


def test_sources_that_are_not_used_any_more_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onesided, "MAX_PEERS", 3)

    async def body() -> None:
        async with pair(at_once=True) as p:
            for instance in ("a", "b", "c", "a", "d"):
                await p.start([1], [1], instance=instance)
            assert [pool.instance for pool in p.scripted.forgotten] == ["b"]

    run(body())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_library_that_breaks_fails_requests_and_frees_no_page(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        here, library, told = KvPool(SMALL, NUM_PAGES), ScriptedLibrary(), list[str]()
        sink = OneSidedSink(here, "scripted", library)
        sink.on_overdue(lambda transfer_id, address, error: told.append(error.reason))
        memory = LocalMemory(here)
        address = RemotePool("scripted", "a", "", memory.base, NUM_PAGES, SMALL.page_bytes).encode()
        page = [SourcePageRef(1, 1, 5)]
        pull = asyncio.create_task(sink.pull(address, b"", "t", page, [2]))
        await eventually(lambda: len(library.reads) == 1)
        library.reads[0].poll = None  # type: ignore[assignment]  # calling it is not what a library may do
        await eventually(lambda: told == ["SINK_FAILED"])
        assert sink.num_quarantined == NUM_PAGES, "what else it writes nobody knows"
        assert "takes nothing new until it is restarted" in caplog.text
        assert not pull.done()
        with pytest.raises(TransferError) as e:
            await sink.pull(address, b"", "t", page, [3])
        assert e.value.reason == "SINK_CLOSED"
        sink._active[0].future.set_result(0)  # only the end of the process does this
        await pull
        await asyncio.to_thread(sink._thread.join, 10)  # its exception is this test's

    run(body())


@dataclass
class BreakingLibrary(ScriptedLibrary):
    """Holds its first read back until `go`, and breaks as it begins the third."""

    entered: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)

    def begin(self, source: RemotePool, runs: Sequence[Run]) -> ScriptedRead:
        if not self.reads:
            self.entered.set()
            assert self.go.wait(20)
        if len(self.reads) == 2:
            raise RuntimeError("scripted")
        return super().begin(source, runs)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_library_that_breaks_between_two_parts_frees_no_page_and_strands_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(onesided, "PART_BYTES", SMALL.page_bytes)

    async def body() -> None:
        here, library, told = KvPool(SMALL, NUM_PAGES), BreakingLibrary(), list[str]()
        sink = OneSidedSink(here, "scripted", library)
        sink.on_overdue(lambda transfer_id, address, error: told.append(transfer_id))
        remote = RemotePool("scripted", "a", "", LocalMemory(here).base, NUM_PAGES, SMALL.page_bytes)

        def start(name: str, *pages: int) -> asyncio.Task[int]:
            refs = [SourcePageRef(page, 1, 5) for page in pages]
            return asyncio.create_task(sink.pull(remote.encode(), b"", name, refs, pages))

        first = start("first", 0)
        await eventually(library.entered.is_set)
        cancelled, broken, behind = start("cancelled", 1), start("broken", 2, 3), start("behind", 4)
        await eventually(lambda: len(sink._inbox) == 3)
        cancelled.cancel()
        await asyncio.sleep(0)
        library.go.set()
        assert await reason_of(behind) == "SINK_FAILED"
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(cancelled, 10)
        await eventually(lambda: sorted(told) == ["broken", "first"])
        assert not first.done() and not broken.done(), "their pages may be written"
        for pull in sink._active:
            pull.future.set_result(0)  # only the end of the process does this
        await asyncio.gather(first, broken)
        await asyncio.to_thread(sink._thread.join, 10)  # its exception is this test's

    run(body())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_library_that_breaks_with_nothing_outstanding_holds_nobody_up() -> None:
    async def body() -> None:
        library = ScriptedLibrary()
        sink = OneSidedSink(KvPool(SMALL, NUM_PAGES), "scripted", library)
        library.close = None  # type: ignore[assignment]  # calling it is not what a library may do
        await asyncio.wait_for(sink.close(), 10)
        await asyncio.to_thread(sink._thread.join, 10)  # its exception is this test's

    run(body())


ENDS = st.sampled_from([ReadState.DONE, ReadState.DONE, ReadState.DONE, ReadState.FAILED])
PULLS = st.lists(st.tuples(st.integers(1, 6), st.one_of(st.none(), st.integers(0, 6))), min_size=1, max_size=8)


@given(PULLS, st.lists(st.tuples(st.integers(0, 99), ENDS), min_size=60, max_size=60))
@settings(max_examples=25, deadline=None)
def test_no_pull_ends_before_its_reads(pulls: list[tuple[int, int | None]], ends: list[tuple[int, ReadState]]) -> None:
    """Pulls of 1-6 parts, cancelled after so many reads of any, whose reads end in any order and way."""

    async def body() -> None:
        async with pair(pages_per_part=1) as p:
            tasks = {}
            for i, (count, _) in enumerate(pulls):
                pages = range(i * 6, i * 6 + count)
                tasks[p.start(pages, pages, instance="ab"[i % 2])] = {
                    p.sink._local.base + d * SMALL.page_bytes for d in pages
                }

            def check() -> bool:
                writing = {run.local for read in p.scripted.pending for run in read.runs}
                for task, destinations in tasks.items():
                    assert not (task.done() and destinations & writing)
                return all(task.done() for task in tasks)

            for number, (which, state) in enumerate(ends):
                for task, (_, cancel_after) in zip(tasks, pulls, strict=True):
                    if cancel_after == number:
                        task.cancel()
                await eventually(lambda: check() or bool(p.scripted.pending))
                if pending := p.scripted.pending:
                    pending[which % len(pending)].end(state, copy=state is ReadState.DONE)
            async with asyncio.timeout(10):
                while not check():
                    for read in p.scripted.pending:
                        read.end()
                    await asyncio.sleep(0.001)
            for task in tasks:
                assert task.cancelled() or task.exception() is None or isinstance(task.exception(), TransferError)

    run(body())


@given(st.one_of(st.text(), st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps)))
@settings(max_examples=50, deadline=None)
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(TransferError) as e:
        RemotePool.decode(text, "nixl")
    assert e.value.reason == "BAD_ADDRESS"


def test_an_address_survives_the_wire_and_a_wrong_one_does_not() -> None:
    pool = RemotePool("nixl", "i", "metadata", 1 << 47, 12, 4096)
    assert RemotePool.decode(pool.encode(), "nixl") == pool
    fields = json.loads(pool.encode())
    bases = [{"base": base} for base in (-1, 1 << 64, math.inf)]
    wrong = [*bases, {"num_pages": 0}, {"page_bytes": "x"}, {"transport": "tcp"}, {"more": 1}]
    for change in wrong:
        with pytest.raises(TransferError) as e:
            RemotePool.decode(json.dumps(fields | change), "nixl")
        assert e.value.reason == "BAD_ADDRESS"
    with pytest.raises(TransferError):
        RemotePool.decode(json.dumps({k: v for k, v in fields.items() if k != "peer"}), "nixl")
    with pytest.raises(TransferError):
        RemotePool.decode(" " * 100_000 + pool.encode(), "nixl")


def test_a_one_sided_source_gives_each_reader_a_token_and_closes_once() -> None:
    closes = list[int]()
    source = OneSidedSource(RemotePool("nixl", "i", "m", 1, 1, 1), lambda: closes.append(threading.get_ident()))
    assert len({source.new_reader() for _ in range(8)}) == 8
    source.close()
    source.close()
    assert len(closes) == 1
