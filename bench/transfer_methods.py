"""The ways of moving pages that `pdserve bench transfer` compares, each behind `Method`."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

from pdserve.bench.transfer_source import (
    Publish,
    Published,
    Withdraw,
    fill,
    make_pool,
    plane_named,
    serve_bare,
    serve_plane,
)
from pdserve.core.errors import PdserveError, TransferError
from pdserve.core.tls import TlsConfig
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.sockets import recv_exactly, tune

START_TIMEOUT_S = 60.0
BARE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """One transfer.

    Attributes:
        page_bytes: Of a page.
        num_pages: Pages.
        scattered: Pages in random order on both sides; else one run of bytes on both.
    """

    page_bytes: int
    num_pages: int
    scattered: bool

    def pages(self, seed: int, num_pool_pages: int) -> list[int]:
        """Page ids, of which there are `num_pool_pages`."""
        if self.scattered:
            return random.Random(seed).sample(range(num_pool_pages), self.num_pages)
        return list(range(self.num_pages))


@dataclass(frozen=True, slots=True)
class Moved:
    """What one transfer took.

    Attributes:
        wall_s: From the first ask to the last byte (verified, where the method verifies), seconds.
        cpu_s: Processor time of both processes, seconds.
        hash_s: Time of the source's checksums, before the transfer, seconds.
        verified: The same with every page verified afterwards, for a method that does not verify by itself; or None.
    """

    wall_s: float
    cpu_s: float
    hash_s: float = 0.0
    verified: Moved | None = None


class Method(Protocol):
    """A way of moving pages; used for one size of page, then closed."""

    async def move(self, case: Case, seed: int) -> Moved:
        """Moves the pages once."""
        ...

    async def close(self) -> None:
        """Ends its processes."""
        ...


class Memcpy:
    """One copy inside this process: what memory allows.

    Args:
        pool: Where pages go.
    """

    def __init__(self, pool: KvPool) -> None:
        self._into, self._from = pool, make_pool(pool.page_bytes, pool.num_pages)
        fill(self._from)

    async def move(self, case: Case, seed: int) -> Moved:
        """See `Method`."""
        sources, targets = case.pages(seed, self._from.num_pages), case.pages(seed + 1, self._into.num_pages)
        began_s, cpu_s = time.perf_counter(), time.process_time()
        if case.scattered:
            for source, target in zip(sources, targets, strict=True):
                self._into.page(target)[:] = self._from.page(source)
        else:
            num_bytes = case.num_pages * case.page_bytes
            self._into.buffer[:num_bytes] = self._from.buffer[:num_bytes]
        return Moved(time.perf_counter() - began_s, time.process_time() - cpu_s)

    async def close(self) -> None:
        """See `Method`."""
        self._from.close()


class BareSockets:
    """`sendall` in one process, `recv_into` here: what plain tcp does for one run of bytes.

    Args:
        pool: Where bytes go.
        timeout_s: Limit of one transfer, seconds.
    """

    def __init__(self, pool: KvPool, timeout_s: float) -> None:
        self._pool = pool
        self._process, self._pipe = start(serve_bare, BARE_BYTES)
        self._timeout_s = timeout_s
        self._sock = socket.create_connection(("127.0.0.1", receive(self._pipe, START_TIMEOUT_S)), timeout_s)
        tune(self._sock)
        self._their_cpu_s = 0.0
        self._ask(8)  # its processor time until now

    async def move(self, case: Case, seed: int) -> Moved:
        """See `Method`; the order of pages makes no difference here."""
        before_s, began_s, cpu_s = self._their_cpu_s, time.perf_counter(), time.process_time()
        took_s = self._ask(case.num_pages * case.page_bytes) - began_s
        return Moved(took_s, time.process_time() - cpu_s + self._their_cpu_s - before_s)

    def _ask(self, num_bytes: int) -> float:
        self._sock.sendall(num_bytes.to_bytes(8, "little"))
        recv_exactly(self._sock, self._pool.buffer[:num_bytes])
        ended_s = time.perf_counter()
        self._their_cpu_s = receive(self._pipe, self._timeout_s)
        return ended_s

    async def close(self) -> None:
        """See `Method`."""
        self._sock.close()
        end(self._process, self._pipe)


class PlaneMethod:
    """A data plane of pdserve between two processes.

    Args:
        name: As for `plane_named`.
        pool: Where pages go.
        integrity: "host": every page has a checksum, verified on arrival; "none".
        timeout_s: Limit of one transfer, seconds.
        files: Of the plane under TLS.
    """

    def __init__(
        self, name: str, pool: KvPool, integrity: str, timeout_s: float, files: TlsConfig | None = None
    ) -> None:
        files = files or TlsConfig()
        self._pool, self._hashed, self._timeout_s = pool, integrity == "host", timeout_s
        self._process, self._pipe = start(serve_plane, name, files, pool.page_bytes, pool.num_pages)
        self._address, self._token = receive(self._pipe, START_TIMEOUT_S)
        self._sink = plane_named(name, files).sink(pool)
        self._num_moved = 0

    async def move(self, case: Case, seed: int) -> Moved:
        """See `Method`."""
        transfer_id = f"bench-{self._num_moved}"
        self._num_moved += 1
        targets = case.pages(seed + 1, self._pool.num_pages)
        self._pipe.send(Publish(transfer_id, case.pages(seed, self._pool.num_pages), self._hashed))
        published: Published = receive(self._pipe, self._timeout_s)
        async with asyncio.timeout(self._timeout_s):
            began_s, cpu_s = time.perf_counter(), time.process_time()
            await self._sink.pull(self._address, self._token, transfer_id, published.pages, targets)
            wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        self._pipe.send(Withdraw(transfer_id))
        their_cpu_s = receive(self._pipe, self._timeout_s) - published.cpu_s
        for page, target in zip(published.pages, targets, strict=True):
            if self._pool.page(target)[:8] != page.page_id.to_bytes(8, "little"):
                raise TransferError(f"page {page.page_id} did not arrive", reason="WRONG_PAGE")
        return Moved(wall_s, cpu_s + their_cpu_s, published.hash_s)

    async def close(self) -> None:
        """See `Method`."""
        await self._sink.close()
        end(self._process, self._pipe)


def start(target: Callable[..., None], *arguments: object, has_children: bool = False) -> tuple[Any, Connection]:
    """Starts a process that ends with the pipe to it.

    Args:
        target: What it does; gets the other end of the pipe, then the arguments.
        arguments: See `target`.
        has_children: It starts processes of its own.

    Returns:
        The process and our end.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=not has_children)
    process.start()
    theirs.close()
    return process, ours


def receive(pipe: Connection, timeout_s: float) -> Any:
    """What the other process says.

    Raises:
        PdserveError: Nothing came in time, or the process ended.
    """
    try:
        if pipe.poll(timeout_s):
            return pipe.recv()
    except EOFError:
        raise PdserveError("a process of the bench ended", reason="PROCESS_ENDED") from None
    raise PdserveError(f"a process of the bench said nothing in {timeout_s:g} s", reason="PROCESS_SILENT")


def end(process: Any, pipe: Connection) -> None:
    """Ends a process by its pipe, or else by force."""
    pipe.close()
    process.join(5.0)
    if process.is_alive():
        process.kill()
        process.join()
