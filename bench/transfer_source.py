"""The other process of `pdserve bench transfer`: serves a pool by one data plane, or sends bytes by a bare socket."""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import xxhash

from pdserve.bench.transfer_libraries import LIBRARIES
from pdserve.core.layout import KVLayout
from pdserve.core.tls import Tls, TlsConfig
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.shm import ShmPageSink, ShmPageSource
from pdserve.kvtransfer.sockets import Closed, recv_exactly, tune
from pdserve.kvtransfer.tcp import TcpPageSink, TcpPageSource
from pdserve.kvtransfer.transport import PageSink, PageSource, SourcePageRef

IDENTITY = bytes(32)
GENERATION = 1
TOKEN_BYTES = 512
"""Of one token in the pools of this bench: one layer, one head of 64, float32, keys and values."""


@dataclass(frozen=True, slots=True)
class Plane:
    """How the two ends of a data plane are made over a pool."""

    source: Callable[[KvPool], PageSource]
    sink: Callable[[KvPool], PageSink]


PLANES = {
    "shm": Plane(lambda pool: ShmPageSource(pool, IDENTITY), lambda pool: ShmPageSink(pool, IDENTITY)),
    "tcp": Plane(lambda pool: TcpPageSource(pool, IDENTITY), lambda pool: TcpPageSink(pool, IDENTITY)),
}


TLS_PLANE = "tcp+tls"
"""Measured where files are given."""


def plane_named(name: str, files: TlsConfig) -> Plane:
    """A plane of `PLANES`, the one under TLS, or one over a library."""
    if (library := LIBRARIES.get(name)) is not None:
        return Plane(library.source, library.sink)
    if name != TLS_PLANE:
        return PLANES[name]
    tls = Tls(files)
    return Plane(lambda pool: TcpPageSource(pool, IDENTITY, tls=tls), lambda pool: TcpPageSink(pool, IDENTITY, tls=tls))


@dataclass(frozen=True, slots=True)
class Publish:
    """Ask: serve these pages as a transfer. Answer: `Published`."""

    transfer_id: str
    page_ids: Sequence[int]
    hashed: bool


@dataclass(frozen=True, slots=True)
class Published:
    """Pages that can be pulled.

    Attributes:
        pages: As a watermark names them.
        hash_s: Time that hashing them took, seconds.
        cpu_s: Processor time that the process has used so far, seconds.
    """

    pages: Sequence[SourcePageRef]
    hash_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Ask: end a transfer. Answer: seconds of processor time that the process has used so far."""

    transfer_id: str


def make_pool(page_bytes: int, num_pages: int) -> KvPool:
    """A pool of pages of a given size.

    Args:
        page_bytes: A multiple of TOKEN_BYTES.
        num_pages: Pages.
    """
    layout = KVLayout.uniform(
        num_layers=1, num_kv_heads=1, head_dim=64, page_size=page_bytes // TOKEN_BYTES, dtype="float32"
    )
    return KvPool(layout, num_pages)


def fill(pool: KvPool) -> None:
    """Writes bytes that no other page has, so that a misplaced page shows."""
    block = secrets.token_bytes(pool.page_bytes)
    for page_id in range(pool.num_pages):
        page = pool.page(page_id)
        page[:] = block
        page[:8] = page_id.to_bytes(8, "little")


def serve_plane(connection: Connection, plane: str, files: TlsConfig, page_bytes: int, num_pages: int) -> None:
    """Sends address and token, then answers asks until the pipe ends."""
    pool = make_pool(page_bytes, num_pages)
    fill(pool)
    source = plane_named(plane, files).source(pool)
    token = source.new_reader()
    connection.send((source.address, token))
    while True:
        try:
            ask = connection.recv()
        except EOFError:
            return
        if isinstance(ask, Publish):
            began = time.perf_counter()
            refs = [SourcePageRef(i, GENERATION, _hash(pool, i) if ask.hashed else 0) for i in ask.page_ids]
            hash_s = time.perf_counter() - began
            source.publish(ask.transfer_id, token, refs)
            connection.send(Published(refs, hash_s, time.process_time()))
        else:
            cpu_s = time.process_time()  # ending a transfer is not moving pages
            asyncio.run(source.withdraw(ask.transfer_id))
            connection.send(cpu_s)


def serve_bare(connection: Connection, num_bytes: int) -> None:
    """The best that plain sockets do: one `sendall` of as many bytes as were asked for, from one buffer."""
    data = memoryview(bytearray(secrets.token_bytes(1 << 20)) * (num_bytes >> 20))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection.send(listener.getsockname()[1])
        sock, _ = listener.accept()
    with sock:
        tune(sock)
        ask = memoryview(bytearray(8))
        while True:
            try:
                recv_exactly(sock, ask)
            except (Closed, OSError):
                return  # the bench has what it wants
            sock.sendall(data[: int.from_bytes(ask, "little")])
            connection.send(time.process_time())


def _hash(pool: KvPool, page_id: int) -> int:
    return xxhash.xxh3_64_intdigest(pool.page(page_id))
