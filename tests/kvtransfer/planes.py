"""The data planes that the fault suite runs on: another one is one more line of `PLANES`."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdserve.cli.authority import Authority
from pdserve.core.clock import MonotonicClock
from pdserve.core.tls import Tls, TlsConfig
from pdserve.kvtransfer import mooncake, nixl, tcp_source
from pdserve.kvtransfer.fake import FakePageSink, FakePageSource
from pdserve.kvtransfer.onesided import OneSidedSink
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.remote_reads import Library
from pdserve.kvtransfer.shm import ShmPageSink, ShmPageSource
from pdserve.kvtransfer.tcp import TcpPageSink, TcpPageSource
from pdserve.kvtransfer.transport import PageSink, PageSource
from tests.support.certificates import member

from .world import DIGEST

IDLE_S, PATIENT_S = 1.0, 10.0
"""Idle limits of pulls, where a plane has one: for a test that waits for it to pass, and for all others."""


@dataclass(frozen=True)
class Plane:
    """Both ends of one data plane. What a cancel promises is said by the sink's own capabilities.

    Attributes:
        name: As in --kv-transfer-config.
        source: Makes prefill's end over a pool, on a port (0: any).
        sink: Makes decode's end over a pool; gets the sources of this process and the idle limit.
        halt: In the process of the source: from now on calls a function in the middle of the first page of each batch
            that is sent, in the thread that sends it. None: no thread of the source takes part in a copy.
        crosses_processes: Its ends may be in two processes.
        sees_asks: The source, or its table, says of each ask whether it may be. False: readers help themselves, and
            only the checksums of what they bring speak.
    """

    name: str
    source: Callable[[KvPool, int], PageSource]
    sink: Callable[[KvPool, Sequence[PageSource], float], PageSink]
    halt: Callable[[Callable[[object], None]], None] | None = None
    crosses_processes: bool = True
    sees_asks: bool = True


def _halt_tcp(inside: Callable[[object], None]) -> None:
    send_all = tcp_source.send_all

    def halting(sock: object, buffers: Sequence[bytes | memoryview]) -> None:
        if len(buffers) < 2:  # not pages with their headers
            send_all(sock, buffers)  # type: ignore[arg-type]
            return
        header, page, *others = buffers
        middle = len(page) // 2
        send_all(sock, [header, page[:middle]])  # type: ignore[arg-type]
        inside(sock)
        send_all(sock, [page[middle:], *others])  # type: ignore[arg-type]

    tcp_source.send_all = halting


CERTIFICATES = "PDSERVE_TEST_CERTIFICATES"


@functools.cache
def a_member() -> Tls:
    """A member of one authority; a peer in another process finds the files by the environment."""
    if CERTIFICATES not in os.environ:
        os.environ[CERTIFICATES] = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, os.environ[CERTIFICATES])
        return Tls(member(Path(os.environ[CERTIFICATES]), Authority.new()))
    cert, key, ca = (str(Path(os.environ[CERTIFICATES]) / name) for name in ("tls.crt", "tls.key", "ca.crt"))
    return Tls(TlsConfig(tls_cert_file=cert, tls_key_file=key, tls_ca_file=ca))


UCX = {"UCX_TLS": "tcp"}
HOST = "127.0.0.1"
LIBRARY_PLANE = "PDSERVE_TEST_LIBRARY_PLANE"
"""Names the one plane of a library that this process may load: their C++ parts clash with others."""


def of_library(
    name: str,
    source: Callable[[KvPool], PageSource],
    library: Callable[[KvPool], Library],
) -> list[Plane]:
    """A one-sided plane, in the process that is there for it."""
    if os.environ.get(LIBRARY_PLANE) != name:
        return []

    def sink(pool: KvPool, *_: object) -> PageSink:
        return OneSidedSink(pool, name, library(pool), idle_s=3 * IDLE_S)

    return [Plane(name, lambda pool, _: source(pool), sink, sees_asks=False)]


PLANES = (
    Plane(
        "tcp",
        lambda pool, port: TcpPageSource(pool, DIGEST, port=port),
        lambda pool, _, idle_s: TcpPageSink(pool, DIGEST, idle_s=idle_s),
        _halt_tcp,
    ),
    Plane(
        "tcp with tls",
        lambda pool, port: TcpPageSource(pool, DIGEST, port=port, tls=a_member()),
        lambda pool, _, idle_s: TcpPageSink(pool, DIGEST, idle_s=idle_s, tls=a_member()),
        _halt_tcp,
    ),
    Plane(
        "shm",
        lambda pool, _: ShmPageSource(pool, DIGEST),
        # Small transfers in the event loop, large ones in threads.
        lambda pool, _, idle_s: ShmPageSink(pool, DIGEST, idle_s=idle_s, inline_bytes=4 * pool.page_bytes),
    ),
    Plane(
        "fake",
        lambda pool, _: FakePageSource(pool),
        lambda pool, sources, _: FakePageSink(
            pool, [s for s in sources if isinstance(s, FakePageSource)], MonotonicClock()
        ),
        crosses_processes=False,
    ),
    *of_library("nixl", lambda pool: nixl.make_source(pool, UCX), lambda pool: nixl.NixlLibrary(pool, UCX)),
    *of_library(
        "mooncake",
        lambda pool: mooncake.make_source(pool, host=HOST),
        lambda pool: mooncake.MooncakeLibrary(pool, host=HOST),
    ),
)
REMOTE_PLANES = tuple(plane for plane in PLANES if plane.crosses_processes)


def planes(chosen: Sequence[Plane]) -> pytest.MarkDecorator:
    """Runs a test on each of these planes."""
    return pytest.mark.parametrize("plane", [pytest.param(plane, id=plane.name) for plane in chosen])


def plane_named(name: str) -> Plane:
    """The plane of that name."""
    return next(plane for plane in PLANES if plane.name == name)
