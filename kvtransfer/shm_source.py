"""ShmPageSource: shows its pool to readers on the same host, who copy for themselves.

    reader: HELLO with its token, over a unix socket       source: same user? token known? same model?
            <- MEMORY, and two descriptors that can only be read: the pool, and its `PageTable`
    from then on nothing is said; the end of the socket tells each side that the other is gone, or the token revoked.

What is published is marked in the table: each page, and the transfer for its reader. `withdraw` takes the marks away
and waits for nobody: a reader may be in the middle of a copy. It copies into pages of its own that are FILLING, looks
at the table again afterwards, and fails. A page is freed, and then written, only after `withdraw` has returned: no
reader can take the new bytes for the old ones.

Who holds the descriptors can read the whole pool: readers are processes of the same user, one domain of trust with this
one. What a reader takes is still only what its control stream announced, of its own living transfers: decision 0014.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.core.errors import ConfigError
from pdserve.kvtransfer import memfd, wire
from pdserve.kvtransfer.acceptor import Acceptor
from pdserve.kvtransfer.page_table import PageTable, transfer_tag
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.sockets import has_ended, is_same_user, shut_down
from pdserve.kvtransfer.transport import SourcePageRef

MAX_CONNECTIONS_PER_TOKEN = 4


@dataclass(eq=False)
class _Published:
    """One transfer: its name in the table, and its pages."""

    tag: int
    page_ids: set[int] = field(default_factory=set)


class ShmPageSource:
    """Prefill's end of the shm data plane.

    Args:
        pool: The pool to show.
        identity_digest: Readers must carry the same.

    Raises:
        ConfigError: The system has no memory that can be shown safely.
    """

    def __init__(self, pool: KvPool, identity_digest: bytes) -> None:
        self._digest_prefix = identity_digest[: wire.DIGEST_PREFIX_BYTES]
        self._memory = wire.encode_memory(wire.MemoryFrame(pool.num_pages, pool.page_bytes))
        name = f"pdserve-kv-{secrets.token_hex(16)}"
        with contextlib.ExitStack() as opened:
            try:
                self._table = PageTable(pool.num_pages)
                opened.callback(self._table.close)
                self._shown: list[int] = []
                for fd in (pool.fd, self._table.fd):
                    self._shown.append(memfd.read_only(fd))
                    opened.callback(os.close, self._shown[-1])
                listener = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                listener.bind(f"\0{name}")  # abstract: no file to guard, or to leave behind
                listener.listen(128)
            except OSError as e:
                raise ConfigError(
                    f"--kv-transfer-config: the shm transport does not work here ({e}); leave it out of transports"
                ) from e
            opened.pop_all()
        self._address = f"@{name}"
        self._lock = threading.Lock()  # guards everything below
        self._tokens: dict[bytes, set[socket.socket]] = {}
        self._published: dict[str, _Published] = {}
        self._closed = False
        self._acceptor = Acceptor(listener, self._admit, may_speak=is_same_user)
        self._acceptor.start()

    @property
    def address(self) -> str:
        """See `PageSource`."""
        return self._address

    @property
    def num_connections(self) -> int:
        """Readers that have the descriptors."""
        with self._lock:
            return sum(not has_ended(sock) for socks in self._tokens.values() for sock in socks)

    @property
    def num_refused(self) -> int:
        """Connections that got nothing."""
        return self._acceptor.num_refused

    def new_reader(self) -> bytes:
        """See `PageSource`."""
        token = secrets.token_bytes(wire.TOKEN_BYTES)
        with self._lock:
            self._tokens[token] = set()
        return token

    def drop_reader(self, token: bytes) -> None:
        """See `PageSource`. The reader lets its mappings go when it sees the end; nothing can take them from it."""
        with self._lock:
            for sock in self._tokens.pop(token, ()):
                shut_down(sock)
                sock.close()

    def publish(self, transfer_id: str, token: bytes, pages: Sequence[SourcePageRef]) -> None:
        """See `PageSource`."""
        with self._lock:
            if self._closed:
                return
            if (published := self._published.get(transfer_id)) is None:
                published = self._published[transfer_id] = _Published(transfer_tag(token, transfer_id))
                self._table.grant(published.tag)
            for page in pages:
                if page.page_id not in published.page_ids:
                    published.page_ids.add(page.page_id)
                    self._table.publish(page.page_id, page.generation)

    async def withdraw(self, transfer_id: str) -> None:
        """See `PageSource`; returns at once, see the module."""
        with self._lock:
            if (published := self._published.pop(transfer_id, None)) is not None:
                self._table.revoke(published.tag)
                self._table.withdraw(published.page_ids)

    def close(self) -> None:
        """Ends all connections and withdraws everything. Idempotent."""
        self._acceptor.close()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for socks in self._tokens.values():
                for sock in socks:
                    sock.close()
            self._tokens.clear()
            self._published.clear()
            self._table.close()
            for fd in self._shown:
                os.close(fd)

    def _admit(self, sock: socket.socket, hello: wire.HelloFrame) -> bool:
        with self._lock:
            token = next((t for t in self._tokens if hmac.compare_digest(t, hello.token)), None)
            if token is None or hello.digest_prefix != self._digest_prefix:
                return False
            readers = self._tokens[token]
            for gone in [r for r in readers if has_ended(r)]:
                readers.discard(gone)
                gone.close()
            if len(readers) >= MAX_CONNECTIONS_PER_TOKEN:
                return False
            try:
                socket.send_fds(sock, [self._memory], self._shown)
            except OSError:
                return False  # it left
            readers.add(sock)
            return True
