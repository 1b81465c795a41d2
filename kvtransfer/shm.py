"""ShmPageSink: copies pages of a source on the same host straight from its pool into this one, once.

Life of a link to a source: connect, show the token, map what it shows (`_Link.open`) -> any number of pulls -> its
socket ends: the source died, or ended the control stream -> the link is dropped, and with the last running pull its
mappings.

A pull is a seqlock read: the table says that the pages are published -> copy and verify -> it says so still, and the
source lives; else the pull fails, and what it wrote into its FILLING pages is of no use to anybody. A copy waits for
nobody, so a cancelled pull ends within one chunk, and then nothing writes into its destinations any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import xxhash
from numpy.typing import NDArray

from pdserve.core.errors import TransferError
from pdserve.kvtransfer import memfd, wire
from pdserve.kvtransfer.page_table import Claim, PageTableView, claim, table_bytes
from pdserve.kvtransfer.pool import PageMemory
from pdserve.kvtransfer.runs import contiguous_runs
from pdserve.kvtransfer.shm_source import ShmPageSource
from pdserve.kvtransfer.sockets import has_ended, is_same_user, receive_descriptors
from pdserve.kvtransfer.tasks import settled, submit
from pdserve.kvtransfer.transport import Capabilities, SourcePageRef

__all__ = ["ShmPageSink", "ShmPageSource"]

CHUNK_BYTES = 1 << 20
"""Copied in one go at most where checksums are verified: they find it in the cache."""
UNCHECKED_CHUNK_BYTES = 8 << 20
"""The same without checksums: a cancel waits for it."""
NO_ROOM_PAUSE_S = 0.01


class _Link:
    """What one source shows to one of its readers.

    Attributes:
        sock: Says nothing; ends when the source does.
        pages: Its pool, `[num_pages, page_bytes]` uint8, read only.
        table: What of it may be trusted.
    """

    def __init__(self, sock: socket.socket, pages: NDArray[np.uint8], table: PageTableView) -> None:
        self.sock, self.pages, self.table = sock, pages, table
        self._lock = threading.Lock()
        self._closed, self._num_users = False, 0

    @classmethod
    async def open(cls, address: str, hello: bytes, page_bytes: int, timeout_s: float) -> _Link:
        """Connects.

        Args:
            address: "@" and the name of the source's abstract socket.
            hello: HELLO frame.
            page_bytes: What a page must have.
            timeout_s: For the answer, seconds.

        Raises:
            TransferError: Peer gone, silent, not known, or not one of ours; reason says which.
        """
        if not address.startswith("@"):
            raise TransferError(f"data address {address!r} is no local socket", reason="BAD_ADDRESS")
        with contextlib.ExitStack() as received, contextlib.ExitStack() as opened:
            try:
                sock = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                sock.setblocking(False)
                await _connect(sock, f"\0{address[1:]}", timeout_s)
                if not is_same_user(sock):
                    raise TransferError(f"the source at {address} runs as another user", reason="PEER_FOREIGN")
                sock.sendall(hello)  # 64 bytes: there is room
                await asyncio.wait_for(_readable(sock), timeout_s)
                raw, fds = receive_descriptors(sock, wire.HEADER_BYTES, 2)
            except TimeoutError as e:
                raise TransferError(f"the source at {address} is silent", reason="PULL_IDLE") from e
            except OSError as e:
                raise TransferError(f"connection to the source at {address}: {e}", reason="PEER_GONE") from e
            for fd in fds:
                received.callback(os.close, fd)  # a mapping needs none
            if not raw:
                raise TransferError(f"the source at {address} closed the connection", reason="PEER_GONE")
            link = cls(sock, *_mapped(wire.decode_header(raw), fds, page_bytes))
            opened.pop_all()
            return link

    def is_over(self) -> bool:
        """True once the source is gone or has ended the connection."""
        with self._lock:
            return self._closed or has_ended(self.sock)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keeps `pages` and `table` mapped, also when the link is closed meanwhile."""
        with self._lock:
            self._num_users += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_users -= 1
                self._let_go()

    def close(self) -> None:
        """Ends the connection; the mappings go with the last user."""
        with self._lock:
            self._closed = True
            self.sock.close()
            self._let_go()

    def _let_go(self) -> None:
        """Does not wait until nobody refers to this object: an error's traceback may, for long."""
        if self._closed and self._num_users == 0:
            self.pages, self.table = np.empty((0, 0), np.uint8), PageTableView(bytes(table_bytes(1)))


class ShmPageSink:
    """Decode's end of the shm data plane.

    Args:
        memory: The pool to write into.
        identity_digest: Shown to sources, which must have the same.
        max_threads: Pulls that copy at once; more wait.
        idle_s: A source that does not answer a new connection for this long fails the pull, seconds.
    """

    capabilities = Capabilities(quiescent_cancel=True, zero_copy=True, device_memory=False)

    def __init__(
        self, memory: PageMemory, identity_digest: bytes, *, max_threads: int = 4, idle_s: float = 2.0
    ) -> None:
        self._memory, self._digest, self._idle_s = memory, identity_digest, idle_s
        self._threads = ThreadPoolExecutor(max_threads, thread_name_prefix="kv-copy")
        self._links: dict[tuple[str, bytes], asyncio.Task[_Link]] = {}
        self._cancels: set[threading.Event] = set()
        self._closed = False

    @property
    def num_links(self) -> int:
        """Sources connected, or being connected."""
        return len(self._links)

    async def pull(
        self,
        address: str,
        token: bytes,
        transfer_id: str,
        sources: Sequence[SourcePageRef],
        destinations: Sequence[int],
    ) -> int:
        """See `PageSink`."""
        assert len(sources) == len(destinations)
        if not sources:
            return 0
        link = await self._link(address, token)
        if self._closed:
            raise TransferError("the data plane is closed", reason="SINK_CLOSED")
        cancelled = threading.Event()
        wanted = claim(token, transfer_id, sources)
        future = submit(self._threads, self._run, cancelled, link, wanted, sources, destinations)
        self._cancels.add(cancelled)
        waiter = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(waiter)
        except asyncio.CancelledError:
            cancelled.set()
            future.cancel()  # if no thread has taken it yet
            await settled(waiter)
            raise
        finally:
            self._cancels.discard(cancelled)

    async def close(self) -> None:
        """See `PageSink`."""
        self._closed = True
        for cancelled in list(self._cancels):
            cancelled.set()
        await asyncio.to_thread(self._threads.shutdown)
        openings = list(self._links.values())
        for key in list(self._links):
            self._drop(key)
        if openings:
            await asyncio.wait(openings)

    # ---- links -------------------------------------------------------------------------------------------------------

    async def _link(self, address: str, token: bytes) -> _Link:
        key = (address, token)
        if self._closed:
            raise TransferError("the data plane is closed", reason="SINK_CLOSED")
        if (opening := self._links.get(key)) is None:
            for old in [k for k in self._links if k[0] == address]:
                self._drop(old)  # of an earlier control stream
            hello = wire.encode_hello(token, self._digest)
            link = _Link.open(address, hello, self._memory.page_bytes, self._idle_s)
            opening = self._links[key] = asyncio.get_running_loop().create_task(link)
            opening.add_done_callback(partial(self._on_opened, key))
        return await asyncio.shield(opening)

    def _on_opened(self, key: tuple[str, bytes], opening: asyncio.Task[_Link]) -> None:
        failed = opening.cancelled() or opening.exception() is not None
        if self._links.get(key) is not opening:  # dropped meanwhile
            if not failed:
                opening.result().close()
        elif failed:
            del self._links[key]
        else:
            asyncio.get_running_loop().add_reader(opening.result().sock, self._drop, key)

    def _drop(self, key: tuple[str, bytes]) -> None:
        """Forgets a link that is over or of no use; pulls over it fail. What is being opened is closed then."""
        opening = self._links.pop(key)
        if opening.done() and not opening.cancelled() and opening.exception() is None:
            asyncio.get_running_loop().remove_reader(opening.result().sock)
            opening.result().close()

    # ---- in the pull's thread ----------------------------------------------------------------------------------------

    def _run(
        self,
        cancelled: threading.Event,
        link: _Link,
        wanted: Claim,
        sources: Sequence[SourcePageRef],
        destinations: Sequence[int],
    ) -> int:
        with link.in_use():
            self._copy(cancelled, link, wanted, sources, destinations)
        return len(sources) * self._memory.page_bytes

    def _copy(
        self,
        cancelled: threading.Event,
        link: _Link,
        wanted: Claim,
        sources: Sequence[SourcePageRef],
        destinations: Sequence[int],
    ) -> None:
        """Lets no variable refer to a mapping: see `_Link`."""
        _check(link, wanted)
        page_bytes, checked = self._memory.page_bytes, any(page.checksum for page in sources)
        max_pages = max(1, (CHUNK_BYTES if checked else UNCHECKED_CHUNK_BYTES) // page_bytes)
        for at, count in contiguous_runs(wanted.ids, destinations, max_pages):
            if cancelled.is_set():
                raise TransferError("the pull was cancelled", reason="CANCELLED")
            target = np.frombuffer(self._memory.run(destinations[at], count), np.uint8).reshape(count, page_bytes)
            first = sources[at].page_id
            np.copyto(target, link.pages[first : first + count])
            if not checked:
                continue
            for page, row in zip(sources[at : at + count], target, strict=True):
                if page.checksum and xxhash.xxh3_64_intdigest(row.data) != page.checksum:
                    _check(link, wanted)
                    raise TransferError(f"page {page.page_id} arrived corrupt", reason="CORRUPT_PAGE")
        _check(link, wanted)


def _check(link: _Link, wanted: Claim) -> None:
    """What was copied before this call may be trusted, and what is copied now may be."""
    if not link.table.grants(wanted):
        raise TransferError("transfer unknown or ended, or a page not published in this generation", reason="ERR_STALE")
    if link.is_over():
        raise TransferError("the source is gone, or has ended the control stream", reason="PEER_GONE")


def _mapped(frame: wire.Frame, fds: Sequence[int], page_bytes: int) -> tuple[NDArray[np.uint8], PageTableView]:
    """Maps what a source showed.

    Raises:
        TransferError: BAD_FRAME or BAD_MEMORY: it is not a pool of such pages.
    """
    if not isinstance(frame, wire.MemoryFrame) or len(fds) != 2:
        raise TransferError(f"the source sent {frame} and {len(fds)} descriptors", reason="BAD_FRAME")
    if frame.page_bytes != page_bytes:
        raise TransferError(f"pages have {frame.page_bytes} bytes there, {page_bytes} here", reason="BAD_MEMORY")
    pool = memfd.map_foreign(fds[0], frame.num_pages * page_bytes)
    table = memfd.map_foreign(fds[1], table_bytes(frame.num_pages))
    return np.frombuffer(pool, np.uint8).reshape(frame.num_pages, page_bytes), PageTableView(table)


async def _connect(sock: socket.socket, name: str, timeout_s: float) -> None:
    """Connects; where the source has no room for one more it tries again, for nothing tells when there is some."""
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                sock.connect(name)
                return
            except BlockingIOError:
                await asyncio.sleep(NO_ROOM_PAUSE_S)


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(sock, _set, ready)
    try:
        await ready
    finally:
        loop.remove_reader(sock)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
