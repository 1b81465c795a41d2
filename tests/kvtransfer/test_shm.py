"""The shm data plane: what is read, reuse in the middle of a copy, dead and stopped sources, no leaks."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdserve.kvtransfer import shm
from pdserve.kvtransfer.page_copy import PageCopy
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.shm import ShmPageSink, ShmPageSource
from pdserve.kvtransfer.transport import SourcePageRef

from .world import DIGEST, LAYOUT, SMALL, eventually, fill, reason_of, refs, run

NUM_PAGES = 64


class HookedPool(KvPool):
    """Calls `before_copy` when a reader is about to copy into pages, having looked at the table."""

    before_copy: Callable[[int], None] = staticmethod(lambda page_id: None)


def hooked(pool: HookedPool) -> type[PageCopy]:
    """Copies page by page, and calls the pool's hook before each."""

    class Hooked(PageCopy):
        def copy(self, first: int, count: int, *, past_caches: bool, briefly: bool) -> None:
            for i in range(first, first + count):
                pool.before_copy(self.into_ids[i])
                super().copy(i, 1, past_caches=past_caches, briefly=briefly)

    return Hooked


@dataclass
class Pair:
    """A source, a sink and their pools."""

    source: ShmPageSource
    sink: ShmPageSink
    there: KvPool
    here: HookedPool
    token: bytes

    def refs(self, page_ids: list[int] | range, generation: int = 1, *, checksums: bool = True) -> list[SourcePageRef]:
        return refs(self.there, page_ids, generation, checksums=checksums)

    async def pull(self, pages: list[SourcePageRef], destinations: list[int] | range) -> int:
        return await self.sink.pull(self.source.address, self.token, "t", pages, destinations)


@asynccontextmanager
async def pair(idle_s: float = 10.0, *, inline_bytes: int = shm.INLINE_BYTES) -> AsyncIterator[Pair]:
    there, here = KvPool(LAYOUT, NUM_PAGES), HookedPool(LAYOUT, NUM_PAGES)
    fill(there)
    source, sink = ShmPageSource(there, DIGEST), ShmPageSink(here, DIGEST, idle_s=idle_s, inline_bytes=inline_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shm, "PageCopy", hooked(here))
        try:
            yield Pair(source, sink, there, here, source.new_reader())
        finally:
            await sink.close()
            source.close()
            there.close()
            here.close()


def num_mappings() -> int:
    """Pools and tables mapped into this process."""
    return Path("/proc/self/maps").read_text().count("memfd:pdserve-kv")


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize(
    ("page_ids", "destinations"),
    [
        (range(40), range(3, 43)),
        (range(39, -1, -1), range(40)),
        ([5, 6, 7, 2, 3, 60, 61, 9], [10, 11, 12, 13, 14, 1, 0, 63]),
    ],
)
def test_pages_arrive_over_one_link(
    page_ids: list[int] | range, destinations: list[int] | range, checksums: bool
) -> None:
    async def body() -> None:
        async with pair() as p:
            pages = p.refs(page_ids, checksums=checksums)
            p.source.publish("t", p.token, pages)
            assert await p.pull(pages, destinations) == len(pages) * LAYOUT.page_bytes
            for page_id, destination in zip(page_ids, destinations, strict=True):
                assert p.here.page(destination) == p.there.page(page_id)
            written = {destination * LAYOUT.page_bytes for destination in destinations}
            for at in range(0, len(p.here.buffer), LAYOUT.page_bytes):
                assert at in written or not any(p.here.buffer[at : at + LAYOUT.page_bytes])
            await asyncio.gather(*(p.pull(pages[i : i + 2], destinations[i : i + 2]) for i in range(0, 8, 2)))
            assert p.source.num_connections == p.sink.num_links == 1
            assert await p.pull([], []) == 0

    run(body())


def test_what_may_not_be_read_is_refused_and_nothing_is_written() -> None:
    async def body() -> None:
        async with pair() as p:
            pages = p.refs(range(4))
            p.source.publish("t", p.token, pages[:3])
            beyond = SourcePageRef(NUM_PAGES, 1, 0)
            for asked in (pages, p.refs(range(1), generation=2), p.refs(range(1), generation=0), [beyond]):
                assert await reason_of(p.pull(asked, range(len(asked)))) == "ERR_STALE"
            for token in (b"x" * 16, bytes(16)):
                assert await reason_of(p.sink.pull(p.source.address, token, "t", pages[:1], [0])) == "PEER_GONE"
            stranger = ShmPageSink(p.here, bytes(32))
            assert await reason_of(stranger.pull(p.source.address, p.token, "t", pages[:1], [0])) == "PEER_GONE"
            await stranger.close()
            for destinations in ([0, NUM_PAGES], [-1, 0]):
                with pytest.raises(IndexError):
                    await p.pull(pages[:2], destinations)
            await p.source.withdraw("t")
            await p.source.withdraw("t")
            assert await reason_of(p.pull(pages[:1], [0])) == "ERR_STALE"
            assert not any(p.here.buffer)
            assert await reason_of(p.sink.pull("127.0.0.1:1", p.token, "t", pages[:1], [0])) == "BAD_ADDRESS"
            assert await reason_of(p.sink.pull("@nobody", p.token, "t", pages[:1], [0])) == "PEER_GONE"

    run(body())


def test_a_dropped_token_ends_its_link_and_lets_the_mappings_go() -> None:
    async def body() -> None:
        gc.collect()  # of earlier tests
        before = num_mappings()
        async with pair() as p:
            mapped = num_mappings()
            pages = p.refs(range(2))
            p.source.publish("t", p.token, pages)
            await p.pull(pages, [0, 1])
            assert num_mappings() == mapped + 2
            p.source.drop_reader(p.token)
            await eventually(lambda: p.sink.num_links == 0 and num_mappings() == mapped)
            assert await reason_of(p.pull(pages, [0, 1])) == "PEER_GONE"
            token = p.source.new_reader()
            p.source.publish("u", token, pages)
            await p.sink.pull(p.source.address, token, "u", pages, [4, 5])
            assert p.here.page(5) == p.there.page(1)
        assert num_mappings() == before

    run(body())


def test_a_page_of_two_transfers_outlives_the_first() -> None:
    async def body() -> None:
        async with pair() as p:
            pages = p.refs(range(3))
            p.source.publish("t", p.token, pages)
            p.source.publish("u", p.token, pages[1:])
            p.source.publish("u", p.token, pages[1:])  # told twice
            await p.source.withdraw("t")
            assert await reason_of(p.pull(pages[1:], [0, 1])) == "ERR_STALE"
            address, token = p.source.address, p.token
            await p.sink.pull(address, token, "u", pages[1:], [0, 1])
            assert await reason_of(p.sink.pull(address, token, "u", pages, [0, 1, 2])) == "ERR_STALE"
            await p.source.withdraw("u")
            assert await reason_of(p.sink.pull(address, token, "u", pages[1:], [0, 1])) == "ERR_STALE"

    run(body())


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("published_anew", [True, False])
def test_a_page_that_is_reused_in_the_middle_of_a_copy_fails_it(
    checksums: bool, published_anew: bool, inline: bool
) -> None:
    """The reader has looked at the table and copied page 0; then all of it is withdrawn and written over."""

    async def body() -> None:
        async with pair(inline_bytes=shm.INLINE_BYTES if inline else 0) as p:
            pages = p.refs([0, 9, 20], checksums=checksums)
            p.source.publish("t", p.token, pages)
            loop_thread = threading.get_ident()

            def reuse(page_id: int) -> None:
                assert (threading.get_ident() == loop_thread) == inline
                if page_id == 5:
                    with pytest.raises(StopIteration):  # it waits for nobody
                        p.source.withdraw("t").send(None)
                    for page in pages:
                        p.there.page(page.page_id)[:] = b"\xaa" * LAYOUT.page_bytes
                    if published_anew:
                        p.source.publish("u", p.token, [SourcePageRef(page.page_id, 2, 0) for page in pages])

            p.here.before_copy = reuse  # type: ignore[method-assign]
            assert await reason_of(p.pull(pages, [3, 5, 7])) == "ERR_STALE"

    run(body())


def test_a_page_that_changed_after_it_was_hashed_is_corrupt() -> None:
    async def body() -> None:
        async with pair() as p:
            pages = p.refs(range(3))
            p.source.publish("t", p.token, pages)
            p.there.page(1)[5] ^= 1
            assert await reason_of(p.pull(pages, [0, 1, 2])) == "CORRUPT_PAGE"
            p.there.page(1)[5] ^= 1
            await p.pull(pages, [0, 1, 2])

    run(body())


def test_a_cancelled_pull_ends_only_when_its_thread_writes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        monkeypatch.setattr(shm, "UNCHECKED_CHUNK_BYTES", LAYOUT.page_bytes)
        async with pair(inline_bytes=0) as p:
            pages = p.refs(range(32), checksums=False)
            p.source.publish("t", p.token, pages)
            entered, gate = threading.Event(), threading.Event()

            def wait(page_id: int) -> None:
                if page_id == 4:
                    entered.set()
                    assert gate.wait(20)

            p.here.before_copy = wait  # type: ignore[method-assign]
            pull = asyncio.create_task(p.pull(pages, range(32)))
            await asyncio.to_thread(entered.wait, 20)
            for _ in range(3):
                pull.cancel()
                await asyncio.wait([pull], timeout=0.02)
                assert not pull.done()
            gate.set()
            with pytest.raises(asyncio.CancelledError):
                await pull
            poison = b"\xee" * len(p.here.buffer)
            p.here.buffer[:] = poison
            p.here.before_copy = lambda page_id: None  # type: ignore[method-assign]
            token = p.source.new_reader()
            p.source.publish("u", token, pages[:1])
            await p.sink.pull(p.source.address, token, "u", pages[:1], [63])  # all threads have had a turn
            assert p.here.buffer[: 63 * LAYOUT.page_bytes] == poison[: 63 * LAYOUT.page_bytes]

    run(body())


def test_close_ends_pulls_that_run_or_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        monkeypatch.setattr(shm, "UNCHECKED_CHUNK_BYTES", LAYOUT.page_bytes)
        async with pair(inline_bytes=0) as p:
            pages = p.refs(range(2), checksums=False)
            p.source.publish("t", p.token, pages)
            entered, gate = threading.Event(), threading.Event()

            def wait(page_id: int) -> None:
                entered.set()
                assert gate.wait(20)

            p.here.before_copy = wait  # type: ignore[method-assign]
            pulls = [asyncio.create_task(p.pull([pages[0], pages[1]], [2 * i + 1, 2 * i])) for i in range(8)]
            await asyncio.to_thread(entered.wait, 20)
            closing = asyncio.create_task(p.sink.close())
            await eventually(lambda: p.sink._closed)
            gate.set()
            await closing
            for pull in pulls:
                assert await reason_of(pull) == "CANCELLED"
            assert await reason_of(p.pull(pages, [0, 1])) == "SINK_CLOSED"
            await p.sink.close()

    run(body())


# ---- other processes -----------------------------------------------------------------------------------------------

SOURCE = """
import sys
from pdserve.core.layout import KVLayout
from pdserve.kvtransfer.page_table import table_bytes
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.shm import ShmPageSource
from pdserve.kvtransfer.transport import SourcePageRef
pool = KvPool(KVLayout.from_json(sys.argv[1]), 8)
for i in range(8):
    pool.page(i)[:] = bytes([i + 1]) * pool.page_bytes
source = ShmPageSource(pool, bytes(range(32)))
token = source.new_reader()
source.publish("t", token, [SourcePageRef(i, 1, 0) for i in range(8)])
print(source.address, token.hex(), flush=True)
sys.stdin.readline()
"""


@contextmanager
def source_process() -> Iterator[tuple[subprocess.Popen[str], str, bytes]]:
    command = [sys.executable, "-c", SOURCE, LAYOUT.to_json()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            address, token = process.stdout.readline().split()
            yield process, address, bytes.fromhex(token)
        finally:
            process.kill()


def test_a_killed_source_fails_pulls_and_leaves_nothing_mapped() -> None:
    async def body() -> None:
        gc.collect()  # of earlier tests
        async with pair() as p:
            pages, mapped, before = [SourcePageRef(i, 1, 0) for i in range(8)], num_mappings(), num_descriptors()
            with source_process() as (process, address, token):
                await p.sink.pull(address, token, "t", pages, range(8))
                assert [p.here.page(i)[0] for i in range(8)] == list(range(1, 9))
                killed = threading.Event()

                def kill(page_id: int) -> None:
                    if page_id == 3 and not killed.is_set():
                        process.kill()
                        process.wait(10)
                        killed.set()

                p.here.before_copy = kill  # type: ignore[method-assign]
                dead = await reason_of(p.sink.pull(address, token, "t", pages[:2], [1, 3]))
                assert dead == "PEER_GONE" and killed.is_set()
                await eventually(lambda: p.sink.num_links == 0 and num_mappings() == mapped)
                assert await reason_of(p.sink.pull(address, token, "t", pages, range(8))) == "PEER_GONE"
            assert num_descriptors() <= before + 1  # what the event loop may keep

    run(body())


def test_a_stopped_source_serves_what_it_published_and_answers_no_new_reader() -> None:
    async def body() -> None:
        async with pair() as p:
            pages = [SourcePageRef(i, 1, 0) for i in range(8)]
            with source_process() as (process, address, token):
                await p.sink.pull(address, token, "t", pages[:1], [0])
                process.send_signal(signal.SIGSTOP)
                await asyncio.to_thread(os.waitpid, process.pid, os.WUNTRACED)  # it stands still now
                await p.sink.pull(address, token, "t", pages, range(8))
                assert p.here.page(7)[0] == 8
                other = ShmPageSink(p.here, DIGEST, idle_s=0.3)
                assert await reason_of(other.pull(address, token, "t", pages, range(8))) == "PULL_IDLE"
                assert other.num_links == 0
                await other.close()

    run(body())


def test_a_thousand_restarts_leave_no_mapping_and_no_descriptor() -> None:
    async def body() -> None:
        gc.collect()  # of earlier tests
        here = KvPool(SMALL, 4)
        sink = ShmPageSink(here, DIGEST)
        counts = list[tuple[int, int]]()
        for i in range(1000):
            there = KvPool(SMALL, 2)
            there.page(1)[:] = struct.pack("I", i) * (SMALL.page_bytes // 4)
            source = ShmPageSource(there, DIGEST)
            token, pages = source.new_reader(), refs(there, [1])
            source.publish("t", token, pages)
            await sink.pull(source.address, token, "t", pages, [2])
            assert here.page(2) == there.page(1)
            source.close()
            there.close()
            del there, source
            if i in (10, 999):
                await eventually(lambda: num_mappings() <= 1)
                counts.append((num_mappings(), num_descriptors()))
        assert counts[0] == counts[1]
        await sink.close()
        here.close()

    run(body(), limit_s=60)
