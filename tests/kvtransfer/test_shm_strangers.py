"""The shm data plane and strangers: who gets nothing, what a reader can do with what it got, what a source may show."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pdserve.core.errors import ConfigError
from pdserve.kvtransfer import acceptor, memfd, shm_source, sockets, wire
from pdserve.kvtransfer.page_table import table_bytes
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.shm import ShmPageSink, ShmPageSource
from pdserve.kvtransfer.transport import SourcePageRef

from .test_shm import NUM_PAGES, num_descriptors, pair
from .world import DIGEST, LAYOUT, SMALL, eventually, reason_of, run


def connect(address: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(10)
    sock.connect(f"\0{address[1:]}")
    return sock


def ask(address: str, hello: bytes) -> tuple[bytes, list[int]]:
    with connect(address) as sock:
        sock.sendall(hello)
        try:
            return sockets.receive_descriptors(sock, 64, 2)
        except ConnectionResetError:  # closed with our bytes unread
            return b"", []


def test_a_stranger_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with pair() as p:
            good = wire.encode_hello(p.token, DIGEST)
            address = p.source.address
            for bad in (
                wire.encode_hello(bytes(16), DIGEST),
                wire.encode_hello(p.token, bytes(32)),
                bytes(64),
                b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(100),
                wire.encode_end(1),
            ):
                assert await asyncio.to_thread(ask, address, bad) == (b"", [])
            threads = threading.active_count()
            mute = [connect(address) for _ in range(100)]
            await eventually(lambda: p.source.num_refused >= 5 + 100 - 64)
            pages = p.refs(range(2))
            p.source.publish("t", p.token, pages)
            await p.pull(pages, [0, 1])  # served beside a hundred that say nothing
            assert p.source.num_connections == 1
            assert threading.active_count() <= threads + 1  # the one that copies
            for sock in mute:
                sock.close()
            monkeypatch.setattr(os, "geteuid", lambda: 4242)
            assert await asyncio.to_thread(ask, address, good) == (b"", [])
            other = ShmPageSink(p.here, DIGEST)  # and a reader gives its token to no other user's source
            assert await reason_of(other.pull(address, p.token, "t", pages, [0, 1])) == "PEER_FOREIGN"
            await other.close()

    run(body())


def test_one_token_has_few_connections_and_ended_ones_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "HELLO_TIMEOUT_S", 20.0)

    async def body() -> None:
        async with pair() as p:
            await asyncio.to_thread(ask, p.source.address, bytes(64))  # its thread runs now
            hello, before = wire.encode_hello(p.token, DIGEST), num_descriptors()
            socks = [connect(p.source.address) for _ in range(shm_source.MAX_CONNECTIONS_PER_TOKEN + 1)]
            for sock in socks:
                await asyncio.to_thread(sock.sendall, hello)
                raw, fds = await asyncio.to_thread(sockets.receive_descriptors, sock, 64, 2)
                assert (not raw and not fds) == (sock is socks[-1])
                for fd in fds:
                    os.close(fd)
            for sock in socks:
                sock.close()
            for _ in range(20):
                raw, fds = await asyncio.to_thread(ask, p.source.address, hello)
                assert raw
                for fd in fds:
                    os.close(fd)
            p.source.drop_reader(p.token)
            await eventually(lambda: num_descriptors() <= before)

    run(body())


def test_what_a_reader_gets_cannot_be_written_or_cut_short() -> None:
    async def body() -> None:
        async with pair() as p:
            raw, fds = await asyncio.to_thread(ask, p.source.address, wire.encode_hello(p.token, DIGEST))
            assert wire.decode_header(raw) == wire.MemoryFrame(NUM_PAGES, LAYOUT.page_bytes)
            content = bytes(p.there.buffer)
            for fd in fds:
                again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)  # a process of the same user may do that
                for descriptor in (fd, again):
                    with pytest.raises(OSError):
                        os.pwrite(descriptor, b"x", 0)
                    with pytest.raises(OSError):
                        os.ftruncate(descriptor, 0)
                    with pytest.raises(OSError):
                        mmap.mmap(descriptor, os.fstat(fd).st_size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
                    with pytest.raises(OSError):
                        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
                os.close(again)
                os.close(fd)
            assert bytes(p.there.buffer) == content
            p.there.page(0)[0] ^= 1  # who made it still can

    run(body())


def test_where_memory_cannot_be_sealed_shm_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memfd, "_SEALS", 1 << 20)
    pool, before = KvPool(SMALL, 2), num_descriptors()
    with pytest.raises(ConfigError, match=r"--kv-transfer-config.*leave it out"):
        ShmPageSource(pool, DIGEST)
    assert num_descriptors() <= before
    pool.close()


@contextmanager
def scripted_source(answer: bytes, fds: list[int]) -> Iterator[str]:
    """A source that answers its reader with this."""
    name = f"pdserve-test-{os.urandom(8).hex()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0{name}")
        listener.listen()

        def serve() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.settimeout(10)
                sock.recv(64)
                if answer:
                    socket.send_fds(sock, [answer], fds)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"@{name}"
        thread.join()


def test_a_source_that_shows_something_else_is_a_typed_error() -> None:
    async def body() -> None:
        async with pair() as p:
            good, _ = memfd.create("pdserve-test", 3 * LAYOUT.page_bytes)
            table, _ = memfd.create("pdserve-test", table_bytes(3))
            open_ended = os.memfd_create("pdserve-test", os.MFD_CLOEXEC)  # could be cut short while it is read
            os.ftruncate(open_ended, 3 * LAYOUT.page_bytes)
            pipe = os.pipe()
            frame = wire.encode_memory(wire.MemoryFrame(3, LAYOUT.page_bytes))
            cases: list[tuple[bytes, list[int], str]] = [
                (b"", [], "PEER_GONE"),
                (frame, [], "BAD_FRAME"),
                (frame, [good], "BAD_FRAME"),
                (frame[:20], [good, table], "BAD_FRAME"),
                (bytes(64), [good, table], "BAD_FRAME"),
                (wire.encode_end(1), [good, table], "BAD_FRAME"),
                (frame, [table, good], "BAD_MEMORY"),
                (frame, [open_ended, table], "BAD_MEMORY"),
                (frame, [pipe[0], table], "BAD_MEMORY"),
                (wire.encode_memory(wire.MemoryFrame(0, LAYOUT.page_bytes)), [good, table], "BAD_MEMORY"),
                (wire.encode_memory(wire.MemoryFrame(2**32 - 1, LAYOUT.page_bytes)), [good, table], "BAD_MEMORY"),
                (wire.encode_memory(wire.MemoryFrame(3, 1)), [good, table], "BAD_MEMORY"),
                (frame, [good, table], "ERR_STALE"),  # as it should be, but nothing is published
            ]
            page, before = [SourcePageRef(1, 1, 0)], None
            for answer, fds, reason in cases:
                with scripted_source(answer, fds) as address:
                    assert await reason_of(p.sink.pull(address, p.token, "t", page, [0])) == reason, (fds, reason)
                await eventually(lambda: p.sink.num_links == 0)
                before = before or num_descriptors()
                assert num_descriptors() <= before, reason  # other tests may have left some that end now
            for fd in (good, table, open_ended, *pipe):
                os.close(fd)

    run(body())
