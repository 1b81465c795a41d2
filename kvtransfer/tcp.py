"""The tcp transport: `TcpPageSource` on prefill, `TcpPageSink` on decode. Blocking sockets in threads, no staging.

Sink invariant: a pull's thread is the only writer of its destinations, and `pull` returns (or raises, also when it is
cancelled) only after that thread is done. So abort is: shut the socket down, wait for the thread, then free. A source
that stalls holds at most MAX_PER_PEER threads; pulls from others go on.
"""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import xxhash

from pdserve.core.errors import TransferError
from pdserve.kvtransfer import wire
from pdserve.kvtransfer.pool import PageMemory
from pdserve.kvtransfer.sockets import Closed, batch_pages, receive_some, send_all, shut_down, tune, wait_at_most
from pdserve.kvtransfer.tasks import submit, until_over
from pdserve.kvtransfer.tcp_source import TcpPageSource
from pdserve.kvtransfer.transport import Capabilities, SourcePageRef

if TYPE_CHECKING:  # it loads gRPC, which pages do not need
    from pdserve.core.tls import Tls

__all__ = ["TcpPageSink", "TcpPageSource"]

MAX_PER_PEER = 4
"""Pulls that run at once from one source, and connections kept for it."""
MAX_PLACES = 256
_Place = tuple[Any, Any, int, str, Any]  # what `getaddrinfo` finds


class _Job:
    """One pull: what its thread and its canceller share."""

    def __init__(self, limit_s: float, idle_s: float) -> None:
        self.num_bytes = 0
        self._limit_s, self._idle_s = limit_s, idle_s
        self._deadline_s = float("inf")
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._cancelled = False

    def begin(self) -> None:
        """Its thread runs: from now on it has its time."""
        self._deadline_s = time.monotonic() + self._limit_s

    def hold(self, sock: socket.socket) -> None:
        """Makes a socket the one that `cancel` ends."""
        with self._lock:
            if self._cancelled:
                raise TransferError("the pull was cancelled", reason="CANCELLED")
            self._sock = sock

    def let_go(self) -> None:
        """The socket is no longer ours to end."""
        with self._lock:
            self._sock = None

    def drop(self, sock: socket.socket) -> None:
        """Closes a socket so that `cancel` cannot hit its descriptor's next owner."""
        self.let_go()
        sock.close()

    @property
    def cancelled(self) -> bool:
        """True once `cancel` was called."""
        return self._cancelled

    def cancel(self) -> None:
        """Makes the thread stop soon; callable from any thread."""
        with self._lock:
            self._cancelled = True
            if self._sock is not None:
                shut_down(self._sock)

    def receive(self, sock: socket.socket, into: list[memoryview]) -> None:
        """Fills buffers, as many as come at once within the idle and the total limit; takes the full ones out."""
        if self._cancelled:
            raise TransferError("the pull was cancelled", reason="CANCELLED")
        if (left_s := self._deadline_s - time.monotonic()) <= 0:
            raise TransferError("the pull is slower than its limit", reason="PULL_TOO_SLOW")
        if left_s < self._idle_s or isinstance(sock, ssl.SSLSocket):
            wait_at_most(sock, min(left_s, self._idle_s))
        self.num_bytes += receive_some(sock, into)

    def receive_all(self, sock: socket.socket, into: memoryview) -> None:
        """Fills one buffer; see `receive`."""
        left = [into]
        while left:
            self.receive(sock, left)


class TcpPageSink:
    """Decode's end of the tcp data plane.

    Args:
        memory: The pool to write into.
        identity_digest: Shown to sources, which must have the same.
        max_threads: Pulls that run at once, from all sources; more wait.
        idle_s: A pull that receives nothing for this long fails, seconds.
        base_s: Time allowed for any pull, seconds.
        min_bytes_per_s: Beyond `base_s` a pull must be at least this fast.
        tls: Sources must be members; None: plain connections.
    """

    capabilities = Capabilities(quiescent_cancel=True, zero_copy=True, device_memory=False)

    def __init__(
        self,
        memory: PageMemory,
        identity_digest: bytes,
        *,
        max_threads: int = 32,
        idle_s: float = 2.0,
        base_s: float = 5.0,
        min_bytes_per_s: float = 50e6,
        tls: Tls | None = None,
    ) -> None:
        self._memory, self._digest = memory, identity_digest
        self._tls = tls
        if tls is not None:
            self.capabilities = replace(self.capabilities, zero_copy=False)  # OpenSSL has a record in between
        self._idle_s, self._base_s, self._min_bytes_per_s = idle_s, base_s, min_bytes_per_s
        self._threads = ThreadPoolExecutor(max_threads, thread_name_prefix="kv-pull")
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, bytes], list[socket.socket]] = {}
        self._places: dict[tuple[str, bytes], _Place] = {}
        self._slots: weakref.WeakValueDictionary[str, asyncio.Semaphore] = weakref.WeakValueDictionary()
        self._jobs: set[_Job] = set()
        self._closed = False

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
        total = 0
        slot = self._slots.setdefault(address, asyncio.Semaphore(MAX_PER_PEER))
        async with slot:
            for at in range(0, len(sources), wire.MAX_GET_PAGES):
                part = slice(at, at + wire.MAX_GET_PAGES)
                total += await self._pull_part(address, token, transfer_id, sources[part], destinations[part])
        return total

    async def _pull_part(
        self,
        address: str,
        token: bytes,
        transfer_id: str,
        sources: Sequence[SourcePageRef],
        destinations: Sequence[int],
    ) -> int:
        place = await self._find(address, token)
        if self._closed:
            raise TransferError("the data plane is closed", reason="SINK_CLOSED")
        limit_s = self._base_s + len(sources) * self._memory.page_bytes / self._min_bytes_per_s
        job = _Job(limit_s, self._idle_s)
        future = submit(self._threads, self._run, job, address, place, token, transfer_id, sources, destinations)
        self._jobs.add(job)

        def stop() -> None:
            job.cancel()
            future.cancel()  # if no thread has taken it yet

        try:
            return await until_over(future, stop)
        finally:
            self._jobs.discard(job)

    async def _find(self, address: str, token: bytes) -> _Place:
        """Looks a source's name up, once for each of its control streams: the system sets that no limit of ours."""
        if (place := self._places.get((address, token))) is not None:
            return place
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._idle_s):
                found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except TimeoutError as e:
            raise TransferError(f"nobody says in time where {host} is", reason="PULL_IDLE") from e
        except (ValueError, OverflowError, OSError) as e:
            raise TransferError(f"data address {address!r}: {e}", reason="BAD_ADDRESS") from e
        except RuntimeError as e:
            raise TransferError(f"no thread to look up {host}: {e}", reason="NO_THREAD") from e
        if len(self._places) >= MAX_PLACES:
            self._places.clear()  # most are of streams that have ended
        place = self._places[address, token] = found[0]
        return place

    async def close(self) -> None:
        """See `PageSink`."""
        self._closed = True
        for job in list(self._jobs):
            job.cancel()
        await asyncio.to_thread(self._threads.shutdown)
        with self._lock:
            for socks in self._idle.values():
                for sock in socks:
                    sock.close()
            self._idle.clear()

    # ---- in the pull's thread ----------------------------------------------------------------------------------------

    def _run(
        self,
        job: _Job,
        address: str,
        place: _Place,
        token: bytes,
        transfer_id: str,
        sources: Sequence[SourcePageRef],
        destinations: Sequence[int],
    ) -> int:
        job.begin()
        ask = wire.encode_get(transfer_id, sources)
        try:
            sock, header = self._ask(job, address, place, token, ask)
            try:
                self._receive_pages(job, sock, header, sources, destinations)
                job.let_go()
            except BaseException:
                job.drop(sock)
                raise
            self._keep(address, token, sock)
        except Closed as e:
            reason = "CANCELLED" if job.cancelled else "PEER_GONE"
            raise TransferError(f"the source at {address} closed the connection", reason=reason) from e
        except TimeoutError as e:
            raise TransferError(f"the source at {address} is silent", reason="PULL_IDLE") from e
        except ssl.SSLError as e:  # after our side of the handshake: the source refuses ours, or we are being cancelled
            reason = "CANCELLED" if job.cancelled else "TLS_REFUSED"
            raise TransferError(f"the source at {address} ended TLS: {e.reason}", reason=reason) from e
        except OSError as e:
            raise TransferError(f"connection to the source at {address}: {e}", reason="PEER_GONE") from e
        return job.num_bytes + len(ask)

    def _ask(
        self, job: _Job, address: str, place: _Place, token: bytes, ask: bytes
    ) -> tuple[socket.socket, memoryview]:
        """Sends the ask and reads the first header; a kept connection that died meanwhile is replaced once."""
        header = memoryview(bytearray(wire.HEADER_BYTES))
        while (sock := self._take(address, token)) is not None:
            try:
                job.hold(sock)
                wait_at_most(sock, self._idle_s)
                send_all(sock, [ask])
                job.receive_all(sock, header)
            except (Closed, ConnectionError, ssl.SSLEOFError):
                job.drop(sock)
            except BaseException:
                job.drop(sock)
                raise
            else:
                return sock, header
        sock = self._connect(job, address, place)
        try:
            send_all(sock, [wire.encode_hello(token, self._digest), ask])
            job.num_bytes += wire.HEADER_BYTES
            job.receive_all(sock, header)
        except BaseException:
            job.drop(sock)
            raise
        return sock, header

    def _connect(self, job: _Job, address: str, place: _Place) -> socket.socket:
        family, kind, proto, _, target = place
        sock = socket.socket(family, kind, proto)
        if self._tls is not None:
            sock = self._tls.connect(sock)
        try:
            tune(sock)
            sock.settimeout(self._idle_s)
            job.hold(sock)
            sock.connect(target)
            job.hold(sock)  # a cancel while it was not connected could not shut it down
            if isinstance(sock, ssl.SSLSocket):
                _shake_hands(sock, address)
            wait_at_most(sock, self._idle_s)
        except BaseException:
            job.drop(sock)
            raise
        return sock

    def _receive_pages(
        self,
        job: _Job,
        sock: socket.socket,
        header: memoryview,
        sources: Sequence[SourcePageRef],
        destinations: Sequence[int],
    ) -> None:
        """Batch by batch: pages and the headers after them come together; each page is verified when its batch is here.

        Pages of a wrong header may be written, for their destinations are this pull's and count for nothing until it
        has succeeded.
        """
        page_bytes = self._memory.page_bytes
        batch = batch_pages(page_bytes)
        _expect(header, sources[0], page_bytes)
        for at in range(0, len(sources), batch):
            part, after = sources[at : at + batch], sources[at + 1 : at + batch + 1]
            pages = [self._memory.page(destination) for destination in destinations[at : at + batch]]
            headers = memoryview(bytearray(wire.HEADER_BYTES * len(part)))
            into = [buffer for i, page in enumerate(pages) for buffer in (page, _header(headers, i))]
            num_checked = 0
            while into:
                job.receive(sock, into)
                for i in range(num_checked, min(len(part) - (len(into) + 1) // 2, len(after))):
                    _expect(_header(headers, i), after[i], page_bytes)
                    num_checked = i + 1
            for source, page in zip(part, pages, strict=True):
                if source.checksum and xxhash.xxh3_64_intdigest(page) != source.checksum:
                    raise TransferError(f"page {source.page_id} arrived corrupt", reason="CORRUPT_PAGE")
        if _frame_or_error(_header(headers, len(part) - 1)) != wire.EndFrame(len(sources)):
            raise TransferError("the source did not end its answer", reason="BAD_FRAME")

    def _take(self, address: str, token: bytes) -> socket.socket | None:
        with self._lock:
            socks = self._idle.get((address, token))
            return socks.pop() if socks else None

    def _keep(self, address: str, token: bytes, sock: socket.socket) -> None:
        """Keeps a connection for the next pull; those that died, or have an old token of the address, are closed."""
        with self._lock:
            for key in [k for k in self._idle if k[0] == address and k[1] != token]:
                for old in self._idle.pop(key):
                    old.close()
            self._close_dead()
            socks = self._idle.setdefault((address, token), [])
            if self._closed or len(socks) >= MAX_PER_PEER:
                sock.close()
            else:
                socks.append(sock)

    def _close_dead(self) -> None:
        """An idle connection has nothing to say: one that can be read has ended."""
        poll = select.poll()
        for socks in self._idle.values():
            for sock in socks:
                poll.register(sock, select.POLLIN)
        dead = {fd for fd, _ in poll.poll(0)}
        for key, socks in list(self._idle.items()):
            for sock in [s for s in socks if s.fileno() in dead]:
                socks.remove(sock)
                sock.close()
            if not socks:
                del self._idle[key]


def _shake_hands(sock: ssl.SSLSocket, address: str) -> None:
    """Proves who the source is; whether it takes us shows at its first answer."""
    try:
        sock.do_handshake()
    except ssl.SSLCertVerificationError as e:
        raise TransferError(f"the source at {address} is no member: {e.verify_message}", reason="TLS_UNTRUSTED") from e
    except (ssl.SSLError, ConnectionError) as e:
        message = f"no TLS with the source at {address}, which may have none (--tls-cert-file): {e}"
        raise TransferError(message, reason="TLS_FAILED") from e


def _header(headers: memoryview, i: int) -> memoryview:
    return headers[i * wire.HEADER_BYTES : (i + 1) * wire.HEADER_BYTES]


def _expect(header: memoryview, source: SourcePageRef, page_bytes: int) -> None:
    """Refuses a header that is not this page's."""
    expected = wire.PageHeader(source.page_id, source.generation, source.checksum, page_bytes)
    if header != wire.encode_page(expected):
        raise TransferError(f"the source sent {_frame_or_error(header)} instead of {expected}", reason="BAD_FRAME")


def _frame_or_error(header: memoryview) -> wire.Frame:
    frame = wire.decode_header(header)
    if isinstance(frame, wire.ErrFrame):
        raise TransferError(f"the source refused: {frame.text}", reason=frame.code.name)
    return frame
