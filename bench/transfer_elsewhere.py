"""Ways of moving pages that are measured in a process of their own: transfer libraries, bare and under pdserve.

NIXL and Mooncake bring C++ libraries and threads that the other methods must not have beside them, and UCX reads its
variables once per process.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import xxhash

from pdserve.bench.transfer_libraries import LIBRARIES
from pdserve.bench.transfer_methods import START_TIMEOUT_S, Case, Method, Moved, PlaneMethod, end, receive, start
from pdserve.bench.transfer_source import Publish, Published, Withdraw, make_pool, serve_plane
from pdserve.core.errors import PdserveError, TransferError
from pdserve.core.tls import TlsConfig
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.remote_reads import RemotePool


class BareMethod:
    """A library used directly, and what verifying the pages takes when they are there.

    Args:
        name: In `LIBRARIES`.
        pool: Where pages go.
        timeout_s: Limit of what the source is asked for, seconds; the library's own limit holds for a read.
    """

    def __init__(self, name: str, pool: KvPool, timeout_s: float) -> None:
        self._pool, self._timeout_s, library = pool, timeout_s, LIBRARIES[name]
        self._process, self._pipe = start(serve_plane, name, TlsConfig(), pool.page_bytes, pool.num_pages)
        address, _ = receive(self._pipe, START_TIMEOUT_S)
        self._reader = library.bare(pool, RemotePool.decode(address, library.transport))

    async def move(self, case: Case, seed: int) -> Moved:
        """See `Method`. What it moved comes with the same as `verified`: every page hashed after the last has come."""
        self._pipe.send(Publish("bare", case.pages(seed, self._pool.num_pages), True))
        published: Published = receive(self._pipe, self._timeout_s)
        targets = case.pages(seed + 1, self._pool.num_pages)
        pairs = sorted(zip(published.pages, targets, strict=True), key=lambda pair: pair[0].page_id)
        sources, into = [page.page_id for page, _ in pairs], [target for _, target in pairs]
        began_s, cpu_s = time.perf_counter(), time.process_time()
        self._reader.read(sources, into)
        read_s, read_cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        wrong = [p.page_id for p, t in pairs if xxhash.xxh3_64_intdigest(self._pool.page(t)) != p.checksum]
        verified_s, verified_cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        self._pipe.send(Withdraw("bare"))
        their_cpu_s = receive(self._pipe, self._timeout_s) - published.cpu_s
        if wrong:
            raise TransferError(f"page {wrong[0]} did not arrive", reason="WRONG_PAGE")
        for target in into:
            self._pool.page(target)[:8] = bytes(8)  # the next run must bring it again
        return Moved(read_s, read_cpu_s + their_cpu_s, 0.0, Moved(verified_s, verified_cpu_s + their_cpu_s))

    async def close(self) -> None:
        """See `Method`."""
        self._reader.close()
        end(self._process, self._pipe)


class Elsewhere:
    """A library's method in a process of its own, which writes to a file what it would write to stderr.

    The file is named where the method fails, and else removed.

    Args:
        name: In `LIBRARIES`.
        bare: The library used directly; else pdserve's plane over it, which verifies every page.
        pool: Its like is made there.
        timeout_s: Limit of one transfer, seconds.
    """

    def __init__(self, name: str, bare: bool, pool: KvPool, timeout_s: float) -> None:
        self._timeout_s, self._started = timeout_s, False
        descriptor, path = tempfile.mkstemp(prefix=f"pdserve-bench-{name}-", suffix=".log")
        os.close(descriptor)
        self._log, self._failed = Path(path), False
        self._process, self._pipe = start(
            serve_method, path, name, bare, pool.page_bytes, pool.num_pages, timeout_s, has_children=True
        )

    async def move(self, case: Case, seed: int) -> Moved:
        """See `Method`; the first waits until the process is there."""
        if not self._started:
            self._answer(2 * START_TIMEOUT_S)
            self._started = True
        self._pipe.send((case, seed))
        moved: Moved = self._answer(3 * self._timeout_s)
        return moved

    def _answer(self, timeout_s: float) -> Any:
        try:
            answer = receive(self._pipe, timeout_s)
            if isinstance(answer, PdserveError):
                raise answer
        except PdserveError as e:
            self._failed = True
            raise PdserveError(f"{e.message} (what it wrote is in {self._log})", reason=e.reason) from e
        return answer

    async def close(self) -> None:
        """See `Method`."""
        end(self._process, self._pipe)
        if not self._failed:
            self._log.unlink()


def write_errors_to(path: str) -> None:
    """Has this process, its libraries and the processes that it starts write to a file what they write to stderr."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def serve_method(
    connection: Connection, log: str, name: str, bare: bool, page_bytes: int, num_pages: int, timeout_s: float
) -> None:
    """Makes a method, says None when it is there, then moves what it is asked to until the pipe ends.

    It says a `PdserveError` instead of what it cannot do.
    """
    write_errors_to(log)
    os.environ.update(LIBRARIES[name].environment)
    asyncio.run(_serve(connection, name, bare, make_pool(page_bytes, num_pages), timeout_s))


async def _serve(connection: Connection, name: str, bare: bool, pool: KvPool, timeout_s: float) -> None:
    method: Method
    try:
        method = BareMethod(name, pool, timeout_s) if bare else PlaneMethod(name, pool, "host", timeout_s)
    except PdserveError as e:
        connection.send(e)
        return
    try:
        connection.send(None)
        while True:
            try:
                case, seed = connection.recv()
            except EOFError:
                return
            try:
                answer: Moved | PdserveError = await method.move(case, seed)
            except PdserveError as e:
                answer = e
            connection.send(answer)
    finally:
        await method.close()
