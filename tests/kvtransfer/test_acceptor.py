"""The door of the tcp data plane: who has not said a hello costs next to nothing and holds nobody up."""

from __future__ import annotations

import errno
import socket
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest

from pdserve.kvtransfer import acceptor, wire

from .test_tcp import pair
from .world import DIGEST, eventually, run


def test_strangers_get_no_thread_and_are_closed() -> None:
    async def body() -> None:
        async with pair() as p:
            host, port = p.source.address.split(":")
            before = threading.active_count()
            mute = [socket.create_connection((host, int(port)), timeout=10) for _ in range(100)]
            loud = socket.create_connection((host, int(port)), timeout=10)
            loud.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(100))
            with suppress(ConnectionResetError):  # closed with our bytes unread
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

    run(body())
