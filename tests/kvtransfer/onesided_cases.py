"""nixl (over tcp and shared memory) and mooncake with a source in another process: death, stops, restarts, poison."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pdserve.kvtransfer import mooncake, nixl, onesided
from pdserve.kvtransfer.onesided import OneSidedSink
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.remote_reads import Library, Read, RemotePool, Run
from pdserve.kvtransfer.transport import SourcePageRef

from .world import LAYOUT, eventually, fill, reason_of, refs, run

NUM_PAGES = 64
POISON = b"\x55" * (NUM_PAGES * LAYOUT.page_bytes)
SCRIPT = Path(__file__).with_name("source_process.py")


@dataclass(frozen=True)
class Plane:
    """A transport and how to make it."""

    transport: str
    options: tuple[tuple[str, str], ...]
    stalls: bool  # a stopped source holds reads up

    def make(self, memory: KvPool) -> Library:
        options = dict(self.options)
        if self.transport == nixl.NAME:
            return nixl.NixlLibrary(memory, options)
        return mooncake.MooncakeLibrary(memory, **options)


PLANES = {
    "nixl-tcp": Plane("nixl", (("UCX_TLS", "tcp"), ("UCX_NET_DEVICES", "lo")), True),
    "nixl-shm": Plane("nixl", (("UCX_TLS", "posix,sysv,cma,self,tcp"), ("UCX_NET_DEVICES", "lo")), False),
    "mooncake": Plane("mooncake", (("host", "127.0.0.1"),), True),
}


@pytest.fixture(scope="module", params=list(PLANES))
def plane(request: pytest.FixtureRequest) -> Plane:
    return PLANES[request.param]


class Source:
    """The other process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        self.address = process.stdout.readline().strip()
        assert self.address, "the source process ended"

    def stop(self) -> None:
        """Returns when it has stopped: a signal alone is only on its way."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def flip(self, page_id: int) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"flip {page_id}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline().strip() == "done"


@contextmanager
def source(plane: Plane) -> Iterator[Source]:
    command = [sys.executable, str(SCRIPT), plane.transport, json.dumps(dict(plane.options)), str(NUM_PAGES)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Source(process)
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()


@pytest.fixture(scope="module")
def shared(plane: Plane) -> Iterator[Source]:
    """A source that outlives the tests."""
    with source(plane) as made:
        yield made


@contextmanager
def stopped(there: Source) -> Iterator[None]:
    """The source does not run meanwhile."""
    there.stop()
    try:
        yield
    finally:
        there.process.send_signal(signal.SIGCONT)


class Gate:
    """A library that holds the sink's thread before it gives on its read number `at`."""

    def __init__(self, library: Library) -> None:
        self.gated, self.at, self.count = library, -1, 0
        self.reached, self.open = threading.Event(), threading.Event()

    def begin(self, source: RemotePool, runs: Sequence[Run]) -> Read:
        if self.count == self.at:
            self.reached.set()
            assert self.open.wait(60)
        self.count += 1
        return self.gated.begin(source, runs)

    def forget(self, source: RemotePool) -> None:
        self.gated.forget(source)

    def close(self) -> None:
        self.gated.close()


@dataclass
class Sink:
    """Our side."""

    sink: OneSidedSink
    gate: Gate
    here: KvPool
    there: KvPool  # what the source holds

    def refs(self, page_ids: Sequence[int]) -> list[SourcePageRef]:
        return refs(self.there, page_ids)

    def start(self, address: str, page_ids: Sequence[int], destinations: Sequence[int]) -> asyncio.Task[int]:
        return asyncio.create_task(self.sink.pull(address, bytes(16), "t", self.refs(page_ids), destinations))

    async def pull(self, address: str, page_ids: Sequence[int], destinations: Sequence[int]) -> None:
        await asyncio.wait_for(self.start(address, page_ids, destinations), 20)
        assert all(self.here.page(d) == self.there.page(s) for s, d in zip(page_ids, destinations, strict=True))

    async def pull_held_at(self, part: int, address: str, count: int) -> asyncio.Task[int]:
        """A pull of pages whose thread waits before part number `part`; `gate.open` lets it go on."""
        self.gate.at = self.gate.count + part
        pull = self.start(address, range(count), range(count))
        assert await asyncio.to_thread(self.gate.reached.wait, 20)
        return pull


@asynccontextmanager
async def sink(plane: Plane, idle_s: float = 20.0) -> AsyncIterator[Sink]:
    here, there = KvPool(LAYOUT, NUM_PAGES), KvPool(LAYOUT, NUM_PAGES)
    fill(there)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onesided, "PART_BYTES", 4 * LAYOUT.page_bytes)
        gate = Gate(plane.make(here))
        made = OneSidedSink(here, plane.transport, gate, idle_s=idle_s)
    try:
        yield Sink(made, gate, here, there)
    finally:
        gate.open.set()
        await asyncio.wait_for(made.close(), 20)


def test_pages_of_any_order_arrive_and_a_changed_one_does_not(plane: Plane, shared: Source) -> None:
    async def body() -> None:
        async with sink(plane) as s:
            pages, destinations = list(range(NUM_PAGES)), list(range(NUM_PAGES))
            random.Random(1).shuffle(pages)
            random.Random(2).shuffle(destinations)
            await s.pull(shared.address, pages, destinations)
            shared.flip(60)
            assert await reason_of(s.start(shared.address, range(56, 64), range(8))) == "CORRUPT_PAGE"
            shared.flip(60)
            await s.pull(shared.address, range(6, 64), range(58))
            assert s.sink.num_quarantined == 0

    run(body(), 60)


def test_a_source_killed_before_or_amid_a_pull_is_an_error_and_others_serve(plane: Plane, shared: Source) -> None:
    async def body() -> None:
        async with sink(plane) as s:
            with source(plane) as mortal:
                pull = await s.pull_held_at(5, mortal.address, NUM_PAGES)
                mortal.process.kill()
                mortal.process.wait()
                s.gate.open.set()
                assert await reason_of(pull) == "PEER_GONE"
                assert await reason_of(s.start(mortal.address, range(4), range(4))) == "PEER_GONE"
                await s.pull(shared.address, range(NUM_PAGES), range(NUM_PAGES))
                assert await reason_of(s.start(mortal.address, range(4), range(4))) == "PEER_GONE"
                await s.pull(shared.address, range(NUM_PAGES), range(NUM_PAGES))
            again = replace(RemotePool.decode(shared.address, plane.transport), instance="a successor at its address")
            if plane.transport == mooncake.NAME:  # NIXL's addresses are new with every process
                await s.pull(again.encode(), range(NUM_PAGES), range(NUM_PAGES))
            await eventually(lambda: s.sink.num_quarantined == 0)

    run(body(), 60)


def test_a_cancelled_pull_from_a_stopped_source_never_writes_after_it_returned(plane: Plane, shared: Source) -> None:
    """The pool is poisoned once the pull has returned; then the source resumes, and answers what it was asked."""

    async def body() -> None:
        async with sink(plane) as s:
            pull = await s.pull_held_at(3, shared.address, 32)
            with stopped(shared):
                s.gate.open.set()
                if plane.stalls:
                    await eventually(lambda: s.gate.count >= 4)  # a read is with the stopped source
                pull.cancel()
                done, _ = await asyncio.wait([pull], timeout=0.5)
                if plane.stalls:
                    assert not done
                    await eventually(lambda: s.sink.num_quarantined == 32)
                if done:
                    s.here.buffer[:] = POISON
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(pull, 20)
            if not done:
                s.here.buffer[:] = POISON
            await s.pull(shared.address, range(8), range(56, 64))  # what was asked before is answered before
            assert bytes(s.here.buffer[: 56 * LAYOUT.page_bytes]) == POISON[: 56 * LAYOUT.page_bytes]
            await eventually(lambda: s.sink.num_quarantined == 0)

    run(body(), 60)


def test_a_stopped_source_is_told_as_late_and_its_death_ends_the_quarantine(plane: Plane, shared: Source) -> None:
    if not plane.stalls:
        pytest.skip("the kernel copies, whether the source runs or not")

    async def body() -> None:
        async with sink(plane) as s:
            told = asyncio.Event()
            s.sink.on_overdue(lambda transfer_id, address, error: told.set())
            with source(plane) as mortal:
                await s.pull(mortal.address, range(4), range(4))
                mortal.stop()
                s.sink._idle_s = 0.05
                pull = s.start(mortal.address, range(8), range(8))
                await asyncio.wait_for(told.wait(), 20)
                s.sink._idle_s = 20.0
                await eventually(lambda: s.sink.num_quarantined == 8)
                assert not pull.done()
                await s.pull(shared.address, range(4), range(10, 14))
                mortal.process.kill()
                assert await reason_of(pull) == "PULL_IDLE"
            await eventually(lambda: s.sink.num_quarantined == 0)

    run(body(), 60)


def test_closing_waits_for_a_pull_that_is_outstanding(plane: Plane, shared: Source) -> None:
    async def body() -> None:
        async with sink(plane) as s:
            await s.pull(shared.address, range(4), range(4))
            with stopped(shared):
                pull = s.start(shared.address, range(8), range(8))
                await eventually(lambda: s.gate.count >= 2)
                closing = asyncio.create_task(s.sink.close())
                done, _ = await asyncio.wait([closing], timeout=0.3)
                assert not (done and plane.stalls)
            await asyncio.wait_for(closing, 20)
            if plane.stalls:
                assert await reason_of(pull) == "SINK_CLOSED"
            else:
                await asyncio.wait([pull])

    run(body(), 60)
