"""The tcp data plane: refusals, corruption, dead and stopped peers, quiescent cancel."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass

import pytest

from pdserve.kvtransfer import wire
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.sockets import shut_down
from pdserve.kvtransfer.tcp import MAX_PER_PEER, TcpPageSink, TcpPageSource
from pdserve.kvtransfer.transport import SourcePageRef

from .world import DIGEST, LAYOUT, eventually, fill, reason_of, refs, run

NUM_PAGES = 64


@dataclass
class Pair:
    """A source, a sink and their pools."""

    source: TcpPageSource
    sink: TcpPageSink
    there: KvPool
    here: KvPool
    token: bytes

    def refs(self, page_ids: range, generation: int = 1) -> list[SourcePageRef]:
        return refs(self.there, page_ids, generation)


@asynccontextmanager
async def pair(idle_s: float = 10.0) -> AsyncIterator[Pair]:
    there, here = KvPool(LAYOUT, NUM_PAGES), KvPool(LAYOUT, NUM_PAGES)
    fill(there)
    source, sink = TcpPageSource(there, DIGEST), TcpPageSink(here, DIGEST, idle_s=idle_s)
    try:
        yield Pair(source, sink, there, here, source.new_reader())
    finally:
        await sink.close()
        source.close()
        there.close()
        here.close()


def test_pages_arrive_over_one_reused_connection_with_little_overhead() -> None:
    async def body() -> None:
        async with pair() as p:
            pages = p.refs(range(40))
            p.source.publish("t", p.token, pages)
            wired = 0
            for at in range(0, 40, 10):
                part = pages[at : at + 10]
                wired += await p.sink.pull(p.source.address, p.token, "t", part, range(at + 3, at + 13))
            assert all(p.here.page(i + 3) == p.there.page(i) for i in range(40))
            assert 40 * LAYOUT.page_bytes < wired <= 40 * LAYOUT.page_bytes * 1.02
            assert p.source.num_connections == 1
            await p.source.withdraw("t")
            assert p.source.num_connections == 1  # a finished pull's connection is not cut
            assert await reason_of(p.sink.pull(p.source.address, p.token, "t", pages[:1], [0])) == "ERR_STALE"

    run(body())


def test_what_may_not_be_read_is_refused_and_nothing_is_written() -> None:
    async def body() -> None:
        async with pair() as p:
            other = p.source.new_reader()
            pages = p.refs(range(4))
            p.source.publish("t", p.token, pages[:3])
            asks = {
                "unknown transfer": (p.token, "u", pages[:1]),
                "unpublished page": (p.token, "t", pages),
                "another generation": (p.token, "t", p.refs(range(1), generation=2)),
                "another reader's transfer": (other, "t", pages[:1]),
            }
            for token, transfer_id, ask in asks.values():
                got = await reason_of(p.sink.pull(p.source.address, token, transfer_id, ask, range(len(ask))))
                assert got == "ERR_STALE"
            for token in (b"x" * 16, bytes(16)):
                assert await reason_of(p.sink.pull(p.source.address, token, "t", pages[:1], [0])) == "PEER_GONE"
            p.source.drop_reader(p.token)
            assert await reason_of(p.sink.pull(p.source.address, p.token, "t", pages[:1], [0])) == "PEER_GONE"
            assert not any(p.here.buffer)

    run(body())


@pytest.mark.parametrize("wrong", ["version before", "version after", "another model"])
def test_a_reader_of_another_version_or_model_is_refused_before_it_asks(wrong: str) -> None:
    async def body() -> None:
        async with pair() as p:
            pages = p.refs(range(2))
            p.source.publish("t", p.token, pages)
            hello = bytearray(wire.encode_hello(p.token, bytes(32) if wrong == "another model" else DIGEST))
            hello[4] += {"version before": -1, "version after": 1}.get(wrong, 0)
            host, port = p.source.address.split(":")
            with socket.create_connection((host, int(port)), timeout=10) as reader:
                reader.sendall(hello + wire.encode_get("t", pages))
                with suppress(ConnectionResetError):  # closed with our bytes unread
                    assert reader.recv(1) == b""
            assert p.source.num_refused == 1 and p.source.num_connections == 0

    run(body())


def test_a_thread_that_cannot_start_costs_its_reader_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with pair() as p:
            pages = p.refs(range(2))
            p.source.publish("t", p.token, pages)

            def no_thread(thread: threading.Thread) -> None:
                if thread.name == "kv-serve":
                    raise RuntimeError("can't start new thread")
                start(thread)

            start = threading.Thread.start
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", no_thread)
                assert await reason_of(p.sink.pull(p.source.address, p.token, "t", pages, [0, 1])) == "PEER_GONE"
            assert p.source.num_connections == 0
            await p.sink.pull(p.source.address, p.token, "t", pages, [0, 1])

    run(body())


def test_a_source_that_stalls_does_not_hold_up_pulls_from_another() -> None:
    async def body() -> None:
        async with pair(idle_s=30) as p:
            with socket.create_server(("127.0.0.1", 0), backlog=64) as mute:
                address = f"127.0.0.1:{mute.getsockname()[1]}"
                ask = [SourcePageRef(0, 1, 0)]
                stalled = [asyncio.create_task(p.sink.pull(address, p.token, "s", ask, [i])) for i in range(40)]
                for _ in range(MAX_PER_PEER):
                    (await asyncio.to_thread(mute.accept))[0].detach()
                pages = p.refs(range(2))
                p.source.publish("t", p.token, pages)
                await asyncio.wait_for(p.sink.pull(p.source.address, p.token, "t", pages, [50, 51]), 10)
                assert not any(pull.done() for pull in stalled)
                for pull in stalled:
                    pull.cancel()
                await asyncio.gather(*stalled, return_exceptions=True)

    run(body())


def test_connections_to_a_source_that_is_gone_are_not_kept() -> None:
    async def body() -> None:
        async with pair() as p:
            for i in range(3):
                there = KvPool(LAYOUT, 4)
                other = TcpPageSource(there, DIGEST)
                token, pages = other.new_reader(), refs(there, range(2))
                other.publish("t", token, pages)
                await p.sink.pull(other.address, token, "t", pages, [0, 1])
                other.close()
                there.close()
                assert len(p.sink._idle) == 1, i

    run(body())


def test_a_kept_connection_that_died_is_replaced() -> None:
    """Idle for long, cut by something between the two: the next pull must not pay for it."""

    async def body() -> None:
        async with pair() as p:
            pages = p.refs(range(4))
            p.source.publish("t", p.token, pages)
            await p.sink.pull(p.source.address, p.token, "t", pages[:2], [0, 1])
            for kept in p.sink._idle[(p.source.address, p.token)]:
                shut_down(kept)
            await eventually(lambda: p.source.num_connections == 0)
            await p.sink.pull(p.source.address, p.token, "t", pages[2:], [2, 3])
            assert all(p.here.page(i) == p.there.page(i) for i in range(4))

    run(body())


def test_a_page_that_changed_after_it_was_hashed_is_corrupt() -> None:
    async def body() -> None:
        async with pair() as p:
            pages = p.refs(range(3))
            p.source.publish("t", p.token, pages)
            p.there.page(1)[5] ^= 1
            assert await reason_of(p.sink.pull(p.source.address, p.token, "t", pages, [0, 1, 2])) == "CORRUPT_PAGE"
            again = p.refs(range(2, 3))
            p.source.publish("t", p.token, again)
            await p.sink.pull(p.source.address, p.token, "t", again, [9])  # the sink is well afterwards
            assert p.here.page(9) == p.there.page(2)

    run(body())


@contextmanager
def scripted_source(answer: bytes) -> Iterator[str]:
    """A peer that answers every ask with these bytes and then closes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.settimeout(10)
                sock.recv(4096)
                sock.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def test_a_peer_that_breaks_the_protocol_is_a_typed_error() -> None:
    async def body() -> None:
        async with pair() as p:
            page = p.refs(range(1))
            header = wire.encode_page(wire.PageHeader(0, 1, page[0].checksum, LAYOUT.page_bytes))
            long = wire.encode_page(wire.PageHeader(0, 1, page[0].checksum, 2**31))
            raw = bytes(p.there.page(0))
            cases = {
                b"": "PEER_GONE",
                header + raw[:100]: "PEER_GONE",
                bytes(64): "BAD_FRAME",
                long: "BAD_FRAME",
                wire.encode_end(1): "BAD_FRAME",
                header + raw + wire.encode_end(7): "BAD_FRAME",
                header + raw + header: "BAD_FRAME",
                wire.encode_err(wire.ErrCode.ERR_BUSY, "later"): "ERR_BUSY",
            }
            for answer, reason in cases.items():
                with scripted_source(answer) as address:
                    assert await reason_of(p.sink.pull(address, p.token, "t", page, [0])) == reason
            assert await reason_of(p.sink.pull("127.0.0.1:1", p.token, "t", page, [0])) == "PEER_GONE"
            assert await reason_of(p.sink.pull("nonsense", p.token, "t", page, [0])) == "BAD_ADDRESS"

    run(body())


# A source in a process of its own, which sends `sent` whole pages and a half one, says so, and waits.
HALF_SOURCE = """
import socket, sys
from pdserve.kvtransfer import wire
page_bytes, sent = int(sys.argv[1]), int(sys.argv[2])
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
sock, _ = listener.accept()
def read(n):
    data = b""
    while len(data) < n:
        data += sock.recv(n - len(data))
    return data
read(64)
get = wire.decode_header(read(64))
_, asks = wire.decode_get_body(get, read(get.body_bytes))
for i, (page_id, generation) in enumerate(asks):
    header = wire.encode_page(wire.PageHeader(page_id, generation, 0, page_bytes))
    if i < sent:
        sock.sendall(header + bytes([0xAA]) * page_bytes)
        continue
    if i == sent:
        sock.sendall(header + bytes([0xAA]) * (page_bytes // 2))
        print("half", flush=True)
        sys.stdin.readline()
        sock.sendall(bytes([0xAA]) * (page_bytes - page_bytes // 2))
        continue
    sock.sendall(header + bytes([0xAA]) * page_bytes)
sock.sendall(wire.encode_end(len(asks)))
sys.stdin.readline()
"""


@contextmanager
def half_source(sent: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-c", HALF_SOURCE, str(LAYOUT.page_bytes), str(sent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, f"127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


async def said_half(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert (await asyncio.to_thread(process.stdout.readline)).strip() == "half"


def test_a_peer_killed_mid_page_fails_the_pull() -> None:
    async def body() -> None:
        async with pair() as p:
            with half_source(sent=2) as (process, address):
                ask = [SourcePageRef(i, 1, 0) for i in range(8)]
                pull = asyncio.create_task(p.sink.pull(address, p.token, "t", ask, range(8)))
                await said_half(process)
                process.kill()
                assert await reason_of(pull) == "PEER_GONE"

    run(body())


def test_a_stopped_peer_fails_the_pull_by_the_idle_limit() -> None:
    async def body() -> None:
        async with pair(idle_s=0.3) as p:
            with half_source(sent=2) as (process, address):
                ask = [SourcePageRef(i, 1, 0) for i in range(8)]
                pull = asyncio.create_task(p.sink.pull(address, p.token, "t", ask, range(8)))
                assert process.stdout is not None
                await asyncio.to_thread(process.stdout.readline)  # "half", or nothing where the limit came first
                process.send_signal(signal.SIGSTOP)
                assert await reason_of(pull) == "PULL_IDLE"

    run(body())


def test_a_cancelled_pull_never_writes_again_though_the_peer_resumes() -> None:
    async def body() -> None:
        async with pair(idle_s=20) as p:
            with half_source(sent=2) as (process, address):
                ask = [SourcePageRef(i, 1, 0) for i in range(32)]
                pull = asyncio.create_task(p.sink.pull(address, p.token, "t", ask, range(32)))
                await said_half(process)
                pull.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await pull
                p.here.buffer[:] = b"\x55" * len(p.here.buffer)  # freed: somebody else's now
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
                await asyncio.to_thread(process.wait, 10)  # it ran on to its end, or into the closed connection
                assert p.here.buffer == b"\x55" * len(p.here.buffer)
                assert await reason_of(p.sink.pull("127.0.0.1:1", p.token, "t", ask[:1], [0])) == "PEER_GONE"

    run(body())


class GatedPool(KvPool):
    """A pool whose page `at` can be read only once the gate is open."""

    at = -1

    def __init__(self) -> None:
        super().__init__(LAYOUT, NUM_PAGES)
        self.entered, self.gate = threading.Event(), threading.Event()

    def page(self, page_id: int) -> memoryview:
        if page_id == self.at:
            self.entered.set()
            assert self.gate.wait(20)
        return super().page(page_id)


@asynccontextmanager
async def reader_of(pool: KvPool, ask: list[SourcePageRef]) -> AsyncIterator[tuple[TcpPageSource, socket.socket]]:
    """A source with a reader that has sent its ask; only `withdraw` may end the read, no time limit."""
    source = TcpPageSource(pool, DIGEST, send_idle_s=3600)
    token = source.new_reader()
    source.publish("t", token, ask)
    host, port = source.address.split(":")
    with socket.create_connection((host, int(port)), timeout=10) as reader:
        reader.sendall(wire.encode_hello(token, DIGEST) + wire.encode_get("t", ask))
        yield source, reader
    await asyncio.to_thread(source.close)
    pool.close()


def test_withdraw_returns_only_when_no_thread_reads_a_page() -> None:
    async def body() -> None:
        pool = GatedPool()
        ask, pool.at = refs(pool, range(NUM_PAGES)), 5
        async with reader_of(pool, ask) as (source, _):
            assert await asyncio.to_thread(pool.entered.wait, 10)
            withdrawals = [asyncio.create_task(source.withdraw("t")) for _ in range(2)]
            done, _ = await asyncio.wait(withdrawals, timeout=0.2)
            assert not done
            pool.gate.set()
            await asyncio.gather(*withdrawals)
            await source.withdraw("t")

    run(body())


def test_withdraw_ends_a_read_whose_reader_stalls() -> None:
    async def body() -> None:
        pool = KvPool(LAYOUT, NUM_PAGES)
        async with reader_of(pool, refs(pool, range(NUM_PAGES)) * 8) as (source, reader):  # more than any buffer holds
            assert len(reader.recv(64)) > 0  # the read is in flight, and we take no more of it
            await asyncio.wait_for(source.withdraw("t"), 10)

    run(body())


def test_cancel_before_the_thread_began_and_close_end_everything() -> None:
    async def body() -> None:
        async with pair() as p:
            pages = p.refs(range(8))
            p.source.publish("t", p.token, pages)
            pulls = [
                asyncio.create_task(p.sink.pull(p.source.address, p.token, "t", pages, range(8))) for _ in range(40)
            ]
            await asyncio.sleep(0)
            for pull in pulls[::2]:
                pull.cancel()
            done = await asyncio.gather(*pulls, return_exceptions=True)
            assert all(isinstance(d, asyncio.CancelledError | int) for d in done)
            assert all(isinstance(d, int) for d in done[1::2])
            await p.sink.close()
            assert await reason_of(p.sink.pull(p.source.address, p.token, "t", pages, range(8))) == "SINK_CLOSED"

    run(body())


def test_close_between_two_reads_says_so() -> None:
    async def body() -> None:
        async with pair() as p:
            p.sink._memory = here = GatedPool()
            pages, here.at = p.refs(range(2)), 1
            p.source.publish("t", p.token, pages)
            pull = asyncio.create_task(p.sink.pull(p.source.address, p.token, "t", pages, [0, 1]))
            assert await asyncio.to_thread(here.entered.wait, 10)
            closing = asyncio.create_task(p.sink.close())
            await eventually(lambda: p.sink._closed)
            here.gate.set()
            assert await reason_of(pull) == "CANCELLED"
            await closing

    run(body())
