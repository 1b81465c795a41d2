"""What strangers do to the door of a data plane: they say nothing or nonsense, leave, or come in crowds."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import selectors
import socket
import ssl
import struct
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import xxhash

from pdserve.cli.authority import Authority
from pdserve.core.errors import TransferError
from pdserve.core.tls import Tls
from pdserve.kvtransfer import acceptor, tcp_source, wire
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.shm import ShmPageSink, ShmPageSource
from pdserve.kvtransfer.tcp import TcpPageSink
from pdserve.kvtransfer.transport import SourcePageRef
from tests.support.certificates import client_hello, member, num_descriptors

from .test_tcp import Pair, pair
from .test_tcp_tls import tls_pair
from .world import DIGEST, SMALL, eventually, fill, run

AUTHORITY = Authority.new()


def connect(address: str, words: bytes = b"") -> socket.socket:
    host, port = address.split(":")
    sock = socket.create_connection((host, int(port)), timeout=10)
    sock.sendall(words)
    return sock


def reset(sock: socket.socket) -> None:
    """Ends a connection so that the other end hears of a reset, not of an end."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


async def serves(p: Pair) -> None:
    """A reader gets its pages."""
    pages = p.refs(range(2))
    p.source.publish("t", p.token, pages)
    await p.sink.pull(p.source.address, p.token, "t", pages, [0, 1])
    assert p.here.page(1) == p.there.page(1)


class Leaving(Tls):
    """The stranger that waits leaves at the moment in which its handshake would begin."""

    stranger: socket.socket | None = None

    def accept(self, sock: socket.socket) -> ssl.SSLSocket:
        if self.stranger is not None:
            reset(self.stranger)
            self.stranger = None
        return super().accept(sock)


def test_a_stranger_that_resets_as_its_handshake_begins_harms_nobody(tmp_path: Path) -> None:
    """Its descriptor is the next one's at once."""

    async def body() -> None:
        tls = Leaving(member(tmp_path, AUTHORITY))
        async with tls_pair(tls, tls) as p:
            for _ in range(4):
                host, port = p.source.address.split(":")
                tls.stranger = stranger = socket.socket()
                stranger.connect((host, int(port)))
                stranger.sendall(client_hello())
                await eventually(lambda: tls.stranger is None)
            await serves(p)
            assert p.source.num_refused == 4
            await eventually(lambda: p.source._acceptor.num_strangers == 0)

    run(body())


@pytest.mark.parametrize("secured", [False, True])
def test_strangers_that_reset_at_any_moment_harm_nobody(tmp_path: Path, secured: bool) -> None:
    async def body() -> None:
        tls = Tls(member(tmp_path, AUTHORITY))
        async with tls_pair(tls, tls) if secured else pair() as p:
            for words in (b"", b"\x16", client_hello(), wire.encode_hello(bytes(16), DIGEST), bytes(64)) * 30:
                reset(connect(p.source.address, words))
            await serves(p)

    run(body())


def test_who_has_spoken_already_is_heard_before_the_next_one_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crowd that has begun handshakes, and another that says nothing, leave a member its turn."""
    monkeypatch.setattr(acceptor, "HELLO_TIMEOUT_S", 20.0)

    async def body() -> None:
        tls = Tls(member(tmp_path, AUTHORITY))
        async with tls_pair(tls, tls) as p:
            door, gate = p.source._acceptor, threading.Event()
            shaking = [connect(p.source.address, client_hello()[:50]) for _ in range(acceptor.MAX_STRANGERS)]
            await eventually(lambda: [s.stage for s in [*door._strangers]] == [acceptor._Stage.SHAKING] * 64)
            go_on, waits = door._go_on, threading.Event()

            def waiting(stranger: acceptor._Stranger) -> None:
                waits.set()
                assert gate.wait(20)
                go_on(stranger)

            monkeypatch.setattr(door, "_go_on", waiting)
            shaking[-1].sendall(b"x")
            assert await asyncio.to_thread(waits.wait, 20)
            one, mute = connect(p.source.address, client_hello()), connect(p.source.address)
            gate.set()
            await eventually(lambda: p.source.num_refused == 2)
            assert one.getsockname() in [s.sock.getpeername() for s in [*door._strangers]]
            for sock in (*shaking, one, mute):
                sock.close()

    run(body())


def test_a_system_that_watches_no_more_sockets_costs_the_stranger_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with pair() as p:
            await serves(p)  # its thread has begun
            door, refusals = p.source._acceptor, [errno.ENOSPC, errno.ENOMEM]
            register = door._selector.register

            def short(sock: socket.socket, events: int, data: object) -> selectors.SelectorKey:
                if refusals:
                    raise OSError(refusals.pop(), "no more watches")
                return register(sock, events, data)

            monkeypatch.setattr(door._selector, "register", short)
            refused = [connect(p.source.address) for _ in range(2)]
            await eventually(lambda: p.source.num_refused == 2)
            await serves(p)
            for sock in refused:
                sock.close()

    run(body())


def test_a_crowd_before_the_local_socket_makes_a_reader_wait_not_fail() -> None:
    async def body() -> None:
        pool, here, gate = KvPool(SMALL, 2), KvPool(SMALL, 2), threading.Event()
        fill(pool)
        source, sink = ShmPageSource(pool, DIGEST), ShmPageSink(here, DIGEST, idle_s=20)
        source._acceptor._may_speak = lambda _: gate.wait(20)  # its thread has something else to do
        crowd = list[socket.socket]()
        with pytest.raises(BlockingIOError):
            while True:
                crowd.append(socket.socket(socket.AF_UNIX))
                crowd[-1].setblocking(False)
                crowd[-1].connect(f"\0{source.address[1:]}")
        token = source.new_reader()
        pages = [SourcePageRef(0, 1, xxhash.xxh3_64_intdigest(pool.page(0)))]
        source.publish("t", token, pages)
        pull = asyncio.create_task(sink.pull(source.address, token, "t", pages, [1]))
        await asyncio.wait([pull], timeout=0.05)
        assert not pull.done()
        gate.set()
        await pull
        assert here.page(1) == pool.page(0)
        for sock in crowd:
            sock.close()
        await sink.close()
        source.close()

    run(body())


def test_a_reader_without_room_for_descriptors_says_so_and_leaves_none_open() -> None:
    async def body() -> None:
        pool, here = KvPool(SMALL, 2), KvPool(SMALL, 2)
        source, sink = ShmPageSource(pool, DIGEST), ShmPageSink(here, DIGEST)
        token, pages = source.new_reader(), [SourcePageRef(0, 1, 0)]
        source.publish("t", token, pages)
        before = num_descriptors()
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        for besides in (0, 3):  # no socket can be made; or the answer's descriptors have no room
            used = max(int(fd) for fd in os.listdir("/proc/self/fd"))  # noqa: PTH208
            with contextlib.ExitStack() as held:
                resource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, limits[1]))
                held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
                spare = []
                with contextlib.suppress(OSError):
                    while True:
                        spare.append(os.dup(0))
                for fd in spare[besides:]:
                    held.callback(os.close, fd)
                for fd in spare[:besides]:
                    os.close(fd)
                with pytest.raises(TransferError, match=r"[Tt]oo many") as e:
                    await sink.pull(source.address, token, "t", pages, [1])
                assert e.value.reason == "PEER_GONE"
        await sink.pull(source.address, token, "t", pages, [1])
        await sink.close()
        source.close()
        await eventually(lambda: num_descriptors() <= before + 1)  # what the event loop may keep

    run(body())


@pytest.mark.parametrize("secured", [False, True])
def test_a_member_that_finds_no_place_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secured: bool
) -> None:
    async def body() -> None:
        tls = Tls(member(tmp_path, AUTHORITY)) if secured else None
        async with tls_pair(tls, tls) as p:
            await serves(p)  # and keeps its connection
            monkeypatch.setattr(tcp_source, "MAX_CONNECTIONS", 1)
            other = TcpPageSink(p.here, DIGEST, tls=tls)
            for _ in range(20):
                with pytest.raises(TransferError, match="too many connections") as e:
                    await other.pull(p.source.address, p.token, "t", p.refs(range(2)), [2, 3])
                assert e.value.reason == "ERR_BUSY"
            await other.close()
            await serves(p)

    run(body())


def test_strangers_get_no_thread_and_are_closed() -> None:
    async def body() -> None:
        async with pair() as p:
            host, port = p.source.address.split(":")
            before = threading.active_count()
            mute = [socket.create_connection((host, int(port)), timeout=10) for _ in range(100)]
            loud = socket.create_connection((host, int(port)), timeout=10)
            loud.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(100))
            with contextlib.suppress(ConnectionResetError):  # closed with our bytes unread
                assert loud.recv(1) == b""
            assert threading.active_count() <= before + 1
            pages = p.refs(range(2))
            p.source.publish("t", p.token, pages)
            await p.sink.pull(p.source.address, p.token, "t", pages, [0, 1])
            for sock in (*mute, loud):
                sock.close()

    run(body())


def test_the_oldest_stranger_speaks_while_it_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """One look at the sockets reports both; the data plane outlives it."""
    monkeypatch.setattr(acceptor, "HELLO_TIMEOUT_S", 20.0)

    async def body() -> None:
        async with pair() as p:
            host, port = p.source.address.split(":")
            strangers = [socket.create_connection((host, int(port)), timeout=10) for _ in range(4)]
            await eventually(lambda: len(p.source._acceptor._strangers) == 4)
            with p.source._lock:  # the accepting thread waits here with the hello that comes now
                strangers[-1].sendall(wire.encode_hello(p.token, DIGEST))
                await eventually(lambda: len(p.source._acceptor._strangers) == 3)
                monkeypatch.setattr(acceptor, "MAX_STRANGERS", 2)
                strangers.append(socket.create_connection((host, int(port)), timeout=10))
                strangers[0].sendall(b"x")
            pages = p.refs(range(2))
            p.source.publish("t", p.token, pages)
            await p.sink.pull(p.source.address, p.token, "t", pages, [0, 1])
            assert p.source.num_refused >= 1
            for sock in strangers:
                sock.close()

    run(body())


def test_without_descriptors_the_accepting_thread_rests_and_then_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with pair() as p:
            accept, refusals, rests = socket.socket.accept, [errno.EMFILE, errno.ENFILE], list[float]()

            def short_of_descriptors(listener: socket.socket) -> tuple[socket.socket, object]:
                if refusals:
                    raise OSError(refusals.pop(), "Too many open files")
                return accept(listener)

            monkeypatch.setattr(socket.socket, "accept", short_of_descriptors)
            monkeypatch.setattr(acceptor, "time", SimpleNamespace(sleep=rests.append, monotonic=time.monotonic))
            pages = p.refs(range(2))
            p.source.publish("t", p.token, pages)
            await p.sink.pull(p.source.address, p.token, "t", pages, [0, 1])
            assert len(rests) == 2


def test_a_name_that_is_not_found_in_time_fails_its_pull_and_holds_up_no_cancel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body() -> None:
        async with pair(idle_s=0.2) as p:
            gate, look_up, num_asked = threading.Event(), socket.getaddrinfo, list[None]()

            def slow(*words: object, **more: object) -> object:
                num_asked.append(None)
                assert gate.wait(20)
                return look_up(*words, **more)  # type: ignore[arg-type]

            monkeypatch.setattr(socket, "getaddrinfo", slow)
            pages = p.refs(range(2))
            p.source.publish("t", p.token, pages)
            with pytest.raises(TransferError, match=r"where 127\.0\.0\.1 is") as e:
                await p.sink.pull(p.source.address, p.token, "t", pages, [0, 1])
            assert e.value.reason == "PULL_IDLE"
            p.sink._idle_s = 20
            pull = asyncio.create_task(p.sink.pull(p.source.address, p.token, "t", pages, [0, 1]))
            await eventually(lambda: len(num_asked) == 2)
            pull.cancel()
            await asyncio.wait([pull], timeout=5)
            assert pull.cancelled()
            gate.set()
            for _ in range(3):
                await p.sink.pull(p.source.address, p.token, "t", pages, [0, 1])
            assert len(num_asked) == 3, "a name is looked up once"

    run(body())
