"""TcpPageSource: serves pages of a pool over tcp, straight from pool memory to socket (with TLS: to OpenSSL).

Strangers are the `Acceptor`'s business: none gets a thread or a buffer. Each authenticated connection has one thread.
Invariant: while a thread sends pages of a transfer it is in that transfer's `readers`; `withdraw` takes the transfer
out of the table, shuts its readers' sockets down and returns when there is none left. A shut-down socket makes its
thread leave, whatever the peer does, so no time limit ever frees a page. A reader leaves the set before it sends END,
so a finished pull is never cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.core.errors import ConfigError, TransferError
from pdserve.core.net import advertised_address
from pdserve.kvtransfer import wire
from pdserve.kvtransfer.acceptor import Acceptor
from pdserve.kvtransfer.pool import PageMemory
from pdserve.kvtransfer.sockets import Closed, batch_pages, recv_exactly, send_all, shut_down, tune, wait_at_most
from pdserve.kvtransfer.transport import SourcePageRef

if TYPE_CHECKING:  # it loads gRPC, which pages do not need
    from pdserve.core.tls import Tls

MAX_CONNECTIONS = 256
MAX_CONNECTIONS_PER_TOKEN = 16
STUCK_READER_S = 5.0
_BUSY = wire.encode_err(wire.ErrCode.ERR_BUSY, "too many connections are open")

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Published:
    """One transfer's table."""

    token: bytes
    pages: dict[int, SourcePageRef] = field(default_factory=dict)
    readers: set[socket.socket] = field(default_factory=set)
    left: Future[None] = field(default_factory=Future)  # withdrawn, and no reader is left


class TcpPageSource:
    """Prefill's end of the tcp data plane.

    Args:
        memory: The pool to serve.
        identity_digest: Readers must carry the same.
        host: Address to listen on.
        port: Port; 0 picks a free one.
        advertise_address: host:port that readers are told; None: what is listened on.
        send_idle_s: A reader that takes nothing for this long loses its connection, seconds.
        tls: Readers must be members; None: plain connections.

    Raises:
        ConfigError: The port cannot be listened on.
    """

    def __init__(
        self,
        memory: PageMemory,
        identity_digest: bytes,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise_address: str | None = None,
        send_idle_s: float = 5.0,
        tls: Tls | None = None,
    ) -> None:
        self._memory, self._digest_prefix = memory, identity_digest[: wire.DIGEST_PREFIX_BYTES]
        self._send_idle_s = send_idle_s
        try:
            listener = socket.create_server((host, port), backlog=128)
        except OSError as e:
            raise ConfigError(f"--data-port {port}: cannot listen on {host}: {e.strerror}") from e
        self._acceptor = Acceptor(listener, self._admit, tls)
        self._address = advertise_address or advertised_address(host, listener.getsockname()[1])
        self._lock = threading.RLock()  # guards everything below
        self._tokens: dict[bytes, set[socket.socket]] = {}
        self._published: dict[str, _Published] = {}
        self._leaving: dict[str, _Published] = {}
        self._closing = False
        self._threads: set[threading.Thread] = set()
        self._acceptor.start()

    @property
    def address(self) -> str:
        """See `PageSource`."""
        return self._address

    @property
    def num_refused(self) -> int:
        """Connections that did not become a reader's."""
        return self._acceptor.num_refused

    @property
    def num_connections(self) -> int:
        """Authenticated connections."""
        with self._lock:
            return sum(len(socks) for socks in self._tokens.values())

    def new_reader(self) -> bytes:
        """See `PageSource`."""
        token = secrets.token_bytes(wire.TOKEN_BYTES)
        with self._lock:
            self._tokens[token] = set()
        return token

    def drop_reader(self, token: bytes) -> None:
        """See `PageSource`."""
        with self._lock:
            for sock in self._tokens.pop(token, ()):
                shut_down(sock)

    def publish(self, transfer_id: str, token: bytes, pages: Sequence[SourcePageRef]) -> None:
        """See `PageSource`."""
        with self._lock:
            published = self._published.setdefault(transfer_id, _Published(token))
            published.pages.update((p.page_id, p) for p in pages)

    async def withdraw(self, transfer_id: str) -> None:
        """See `PageSource`."""
        with self._lock:
            published = self._published.pop(transfer_id, None) or self._leaving.get(transfer_id)
            if published is None or not published.readers:
                return
            self._leaving[transfer_id] = published
            for sock in published.readers:
                shut_down(sock)
            left = asyncio.wrap_future(published.left)
        while not (await asyncio.wait([left], timeout=STUCK_READER_S))[0]:
            _log.error("a reader of transfer %s does not leave: its pages stay leased", transfer_id)

    def close(self) -> None:
        """Ends all connections and threads. Idempotent."""
        with self._lock:
            self._closing = True
            for token in list(self._tokens):
                self.drop_reader(token)
            threads = list(self._threads)
        self._acceptor.close()
        for thread in threads:
            thread.join()

    # ---- readers -----------------------------------------------------------------------------------------------------

    def _admit(self, sock: socket.socket, hello: wire.HelloFrame) -> bool:
        """Gives a connection with a valid token its thread."""
        with self._lock:
            token = next((t for t in self._tokens if hmac.compare_digest(t, hello.token)), None)
            if token is None or hello.digest_prefix != self._digest_prefix or self._closing:
                return False
            if len(self._tokens[token]) >= MAX_CONNECTIONS_PER_TOKEN or len(self._threads) >= MAX_CONNECTIONS:
                with contextlib.suppress(OSError):  # it may be gone
                    sock.send(_BUSY)
                _log.warning("a reader of the KV data plane was refused: %d connections are open", len(self._threads))
                return False
            thread = threading.Thread(target=self._serve, args=(sock, token), name="kv-serve", daemon=True)
            try:
                tune(sock)
                thread.start()
            except (OSError, RuntimeError) as e:  # the peer is gone; or the system gives no more threads
                _log.warning("a reader of the KV data plane was refused: %s", e)
                return False
            self._tokens[token].add(sock)
            self._threads.add(thread)
            return True

    def _serve(self, sock: socket.socket, token: bytes) -> None:
        header = bytearray(wire.HEADER_BYTES)
        try:
            while True:
                wait_at_most(sock, None)  # an idle connection waits for the next ask; `drop_reader` ends it
                recv_exactly(sock, memoryview(header))
                wait_at_most(sock, self._send_idle_s)
                get = wire.decode_header(header)
                if not isinstance(get, wire.GetHeader):
                    return
                body = bytearray(get.body_bytes)
                recv_exactly(sock, memoryview(body))
                self._answer(sock, token, *wire.decode_get_body(get, body))
        except (OSError, Closed, TransferError):
            return  # the peer left, stalled, was dropped or does not speak the protocol: it sees the connection end
        finally:
            with self._lock:
                self._tokens.get(token, set()).discard(sock)
                self._threads.discard(threading.current_thread())
                sock.close()

    def _answer(self, sock: socket.socket, token: bytes, transfer_id: str, asks: list[tuple[int, int]]) -> None:
        with self._lock:
            published = self._published.get(transfer_id)
            pages = _lookup(published, token, asks)
            if published is not None and pages is not None:
                published.readers.add(sock)
        if published is None or pages is None:
            text = "transfer unknown or ended" if published is None else "page not published in this generation"
            send_all(sock, [wire.encode_err(wire.ErrCode.ERR_STALE, text)])
            return
        try:
            batch = batch_pages(self._memory.page_bytes)
            for at in range(0, len(pages), batch):
                send_all(sock, [part for page in pages[at : at + batch] for part in self._frame(page)])
        finally:
            with self._lock:
                published.readers.discard(sock)
                if not published.readers and self._leaving.pop(transfer_id, None) is not None:
                    published.left.set_result(None)
        send_all(sock, [wire.encode_end(len(pages))])

    def _frame(self, page: SourcePageRef) -> tuple[bytes, memoryview]:
        """A page's header and its bytes."""
        header = wire.PageHeader(page.page_id, page.generation, page.checksum, self._memory.page_bytes)
        return wire.encode_page(header), self._memory.page(page.page_id)


def _lookup(published: _Published | None, token: bytes, asks: list[tuple[int, int]]) -> list[SourcePageRef] | None:
    """All asked pages, or None when one of them may not be read."""
    if published is None or published.token != token:
        return None
    pages = []
    for page_id, generation in asks:
        page = published.pages.get(page_id)
        if page is None or page.generation != generation:
            return None
        pages.append(page)
    return pages
