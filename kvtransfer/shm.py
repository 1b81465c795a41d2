"""ShmPageSink: copies pages of a source on the same host straight from its pool into this one, once.

Life of a link to a source: connect, show the token, map what it shows (`_Link.open`) -> any number of pulls -> its
socket ends: the source died, or ended the control stream -> the link is dropped, and with the last running pull its
mappings.

A pull is a seqlock read: the table says that the pages are published -> copy and verify -> it says so still, and the
source lives; else the pull fails, and what it wrote into its FILLING pages is of no use to anybody. A copy waits for
nobody, so a cancelled pull ends within one chunk, and then nothing writes into its destinations any more. A small one
is copied where it was asked for, in the event loop: another thread would begin later than that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import xxhash

from pdserve.core.errors import TransferError
from pdserve.kvtransfer import memfd, wire
from pdserve.kvtransfer.page_copy import PageCopy
from pdserve.kvtransfer.page_table import Claim, PageTableView, claim, table_bytes
from pdserve.kvtransfer.pool import PageMemory
from pdserve.kvtransfer.shm_source import ShmPageSource
from pdserve.kvtransfer.sockets import has_ended, is_same_user, receive_descriptors
from pdserve.kvtransfer.tasks import submit, until_over
from pdserve.kvtransfer.transport import Capabilities, SourcePageRef

__all__ = ["ShmPageSink", "ShmPageSource"]

CHUNK_BYTES = 1 << 20
"""Copied in one go at most where checksums are verified: they find it in the cache."""
UNCHECKED_CHUNK_BYTES = 8 << 20
"""The same without checksums: a cancel waits for it."""
INLINE_BYTES = 1 << 20
"""Pulls of at most so much are copied in the event loop: some 0.2 ms, or 1.5 where nobody has written the pages yet."""
NO_ROOM_PAUSE_S = 0.01


class _Link:
    """What one source shows to one of its readers.

    Attributes:
        sock: Says nothing; ends when the source does.
        base: Address of its page 0, mapped read only.
        table: What of it may be trusted.
    """

    def __init__(self, sock: socket.socket, pool: mmap.mmap, table: PageTableView) -> None:
        self.sock, self._pool, self.table = sock, pool, table
        self.base = int(np.frombuffer(pool, np.uint8).ctypes.data)
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
        """Keeps pool and `table` mapped, also when the link is closed meanwhile."""
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
            self._pool.close()
            self.base, self.table = 0, PageTableView(bytes(table_bytes(1)))


@dataclass(frozen=True, slots=True)
class _Pull:
    """One pull: what to copy, and whether it is still wanted."""

    link: _Link
    wanted: Claim
    sources: Sequence[SourcePageRef]
    destinations: Sequence[int]
    cancelled: threading.Event = field(default_factory=threading.Event)

    def check(self) -> None:
        """What was copied before this call may be trusted, and what is copied now may be; `sources` exist."""
        if not self.link.table.grants(self.wanted):
            text = "transfer unknown or ended, or a page not published in this generation"
            raise TransferError(text, reason="ERR_STALE")
        if self.link.is_over():
            raise TransferError("the source is gone, or has ended the control stream", reason="PEER_GONE")


class ShmPageSink:
    """Decode's end of the shm data plane.

    Args:
        memory: The pool to write into.
        identity_digest: Shown to sources, which must have the same.
        max_threads: Pulls that copy at once; more wait.
        idle_s: A source that does not answer a new connection for this long fails the pull, seconds.
        inline_bytes: Pulls of at most so many bytes are copied in the event loop.
    """

    capabilities = Capabilities(quiescent_cancel=True, zero_copy=True, device_memory=False)

    def __init__(
        self,
        memory: PageMemory,
        identity_digest: bytes,
        *,
        max_threads: int = 4,
        idle_s: float = 2.0,
        inline_bytes: int = INLINE_BYTES,
    ) -> None:
        self._memory, self._digest, self._idle_s = memory, identity_digest, idle_s
        self._inline_bytes = inline_bytes
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
        pull = _Pull(link, claim(token, transfer_id, sources), sources, destinations)
        if len(sources) * self._memory.page_bytes <= self._inline_bytes:
            return self._run(pull, briefly=True)
        future = submit(self._threads, self._run, pull, False)

        def stop() -> None:
            pull.cancelled.set()
            future.cancel()  # if no thread has taken it yet

        self._cancels.add(pull.cancelled)
        try:
            return await until_over(future, stop)
        finally:
            self._cancels.discard(pull.cancelled)

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
        return opening.result() if opening.done() else await asyncio.shield(opening)

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

    # ---- in the pull's thread, or in the event loop ------------------------------------------------------------------

    def _run(self, pull: _Pull, briefly: bool) -> int:
        with pull.link.in_use():
            pull.check()
            self._copy(pull, briefly)
            pull.check()
        return len(pull.sources) * self._memory.page_bytes

    def _copy(self, pull: _Pull, briefly: bool) -> None:
        page_bytes, num_pages = self._memory.page_bytes, self._memory.num_pages
        if not 0 <= min(pull.destinations) <= max(pull.destinations) < num_pages:
            raise IndexError(f"pages {min(pull.destinations)} to {max(pull.destinations)} of {num_pages}")
        pool = self._memory.run(0, num_pages)  # it stays mapped as long as this lives
        into = ctypes.addressof(ctypes.c_char.from_buffer(pool))
        pages = PageCopy(into, pull.destinations, pull.link.base, pull.wanted.ids, page_bytes)
        checked = any(page.checksum for page in pull.sources)
        at_once = max(1, (CHUNK_BYTES if checked else UNCHECKED_CHUNK_BYTES) // page_bytes)
        for first in range(0, len(pull.sources), at_once):
            if pull.cancelled.is_set():
                raise TransferError("the pull was cancelled", reason="CANCELLED")
            count = min(at_once, len(pull.sources) - first)
            pages.copy(first, count, past_caches=not (checked or briefly), briefly=briefly)
            if checked:
                self._verify(pull, first, count, pool)

    def _verify(self, pull: _Pull, first: int, count: int, pool: memoryview) -> None:
        """Compares pages that have come with their checksums."""
        page_bytes, these = self._memory.page_bytes, slice(first, first + count)
        for page, destination in zip(pull.sources[these], pull.destinations[these], strict=True):
            at = destination * page_bytes
            if page.checksum and xxhash.xxh3_64_intdigest(pool[at : at + page_bytes]) != page.checksum:
                pull.check()
                raise TransferError(f"page {page.page_id} arrived corrupt", reason="CORRUPT_PAGE")


def _mapped(frame: wire.Frame, fds: Sequence[int], page_bytes: int) -> tuple[mmap.mmap, PageTableView]:
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
    return pool, PageTableView(table)


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
