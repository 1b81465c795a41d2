"""Acceptor: the door of a data plane. One thread, in which nothing blocks, for all who have not said hello.

| stage of a stranger | what it costs us beside its descriptor |
| --- | --- |
| MUTE: has not finished a plain hello, nor begun a TLS handshake | 64 bytes |
| SHAKING: has begun a TLS handshake | a TLS object; its keys when it goes on |
| MEMBER: has shown a member's certificate | the same |
| SENT_AWAY: was told why; what it still sends is thrown away, so that it can read the answer | the same |

Nobody stays longer than HELLO_TIMEOUT_S, nor more than MAX_STRANGERS: then the one that has shown least goes, the
oldest of those. A stranger never gets a thread, a buffer of its size or a second message.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from pdserve.core.errors import TransferError
from pdserve.kvtransfer import wire

if TYPE_CHECKING:  # it loads gRPC, which pages do not need
    from pdserve.core.tls import Tls

MAX_STRANGERS = 64
HELLO_TIMEOUT_S = 2.0
NO_DESCRIPTOR_PAUSE_S = 0.1
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_TLS_HANDSHAKE = b"\x16"  # the first byte of a TLS connection; ours begin with another one
_WANTS_TLS = wire.encode_err(wire.ErrCode.ERR_TLS, "this source wants TLS (--tls-cert-file)")
_NO_MEMBER = wire.encode_err(wire.ErrCode.ERR_TLS, "the certificate is no member's (--tls-peer-name)")

_log = logging.getLogger(__name__)


class _Stage(IntEnum):
    """What a stranger has shown, in the order in which they make room."""

    SENT_AWAY = 0
    MUTE = 1
    SHAKING = 2
    MEMBER = 3


@dataclass(eq=False)
class _Stranger:
    """A connection that has not said a hello yet."""

    sock: socket.socket
    deadline_s: float
    stage: _Stage = _Stage.MUTE
    received: bytearray = field(default_factory=bytearray)


class Acceptor:
    """Listens, and passes on the connections whose hello is one.

    Args:
        listener: Listens already; closed by `close`.
        admit: Called in the acceptor's thread with a connection and its hello; takes the connection, or returns False.
        tls: Connections must be members'; None: plain ones.
        may_speak: Says, in that thread too, whether a new connection is listened to at all; None: every one.

    Attributes:
        num_refused: Connections that were not passed on, or not taken.
    """

    def __init__(
        self,
        listener: socket.socket,
        admit: Callable[[socket.socket, wire.HelloFrame], bool],
        tls: Tls | None = None,
        may_speak: Callable[[socket.socket], bool] | None = None,
    ) -> None:
        self._listener, self._admit, self._tls, self._may_speak = listener, admit, tls, may_speak
        self._listener.setblocking(False)
        self.num_refused = 0
        self._closing = self._is_short = False
        self._strangers: dict[_Stranger, None] = {}  # in the order of their coming
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._loop, name="kv-accept", daemon=True)

    def start(self) -> None:
        """Begins; call once."""
        self._thread.start()

    @property
    def num_strangers(self) -> int:
        """Connections that have not said hello."""
        return len(self._strangers)

    def close(self) -> None:
        """Ends the thread and all strangers. Idempotent."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join()
        for sock in (self._wake, self._woken, self._listener):
            sock.close()

    # ---- in the thread ----------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        with self._selector:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._selector.register(self._woken, selectors.EVENT_READ)
            while not self._closing:
                timeout = 0.5 if self._strangers else None
                for key, _ in self._selector.select(timeout):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data in self._strangers:  # else it was refused a moment ago, to make room
                        self._hear(key.data)
                now = time.monotonic()
                for stranger in [s for s in self._strangers if s.deadline_s <= now]:
                    self._refuse(stranger)
            for stranger in list(self._strangers):
                self._refuse(stranger)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as e:  # the peer left, or the system is short of something: the next one may do better
            if e.errno in _SHORT:
                if not self._is_short:
                    _log.error("the KV data plane cannot take connections: %s (ulimit -n)", e)
                self._is_short = True
                time.sleep(NO_DESCRIPTOR_PAUSE_S)  # the peer still waits: without a pause this thread would spin
            return
        self._is_short = False
        sock.setblocking(False)
        if self._may_speak is not None and not self._may_speak(sock):
            self.num_refused += 1
            sock.close()
            return
        if len(self._strangers) >= MAX_STRANGERS:
            self._refuse(min(self._strangers, key=lambda s: s.stage))
        stranger = _Stranger(sock, time.monotonic() + HELLO_TIMEOUT_S)
        try:
            self._selector.register(sock, selectors.EVENT_READ, stranger)
        except OSError as e:
            _log.warning("a stranger on the KV data plane was refused: the system watches no more sockets (%s)", e)
            self.num_refused += 1
            sock.close()
            return
        self._strangers[stranger] = None
        self._hear(stranger)  # what it has said already counts before the next one asks for its place

    def _hear(self, stranger: _Stranger) -> None:
        """Goes on with a stranger as far as its bytes reach."""
        events = selectors.EVENT_READ
        try:
            self._go_on(stranger)
        except ssl.SSLWantWriteError:
            events = selectors.EVENT_WRITE
        except (BlockingIOError, ssl.SSLWantReadError):
            pass
        except ssl.SSLError as e:  # the alert that says so is on its way
            _log.debug("a stranger on the KV data plane was refused: %s", e)
            self._send_away(stranger, b"")
        except OSError:
            self._refuse(stranger)
        if stranger in self._strangers:
            self._selector.modify(stranger.sock, events, stranger)

    def _go_on(self, stranger: _Stranger) -> None:
        if stranger.stage is _Stage.SENT_AWAY:
            if not socket.socket.recv(stranger.sock, 4096):
                self._forget(stranger)
                stranger.sock.close()
            return
        if self._tls is None or self._shake_hands(stranger, self._tls):
            self._read_hello(stranger)

    def _shake_hands(self, stranger: _Stranger, tls: Tls) -> bool:
        """True when its hello is next; a stranger that does not begin with a handshake stays MUTE."""
        plain = stranger.sock
        if stranger.stage is _Stage.MUTE and not stranger.received and plain.recv(1, socket.MSG_PEEK) == _TLS_HANDSHAKE:
            try:
                stranger.sock = tls.accept(plain)
            except OSError as e:  # it has gone, and `plain` is no socket any more: its number is the next one's
                raise ConnectionAbortedError("left before its handshake") from e
            stranger.stage = _Stage.SHAKING
            self._selector.unregister(plain)
            self._selector.register(stranger.sock, selectors.EVENT_READ, stranger)
        if stranger.stage is _Stage.SHAKING:
            assert isinstance(stranger.sock, ssl.SSLSocket)
            stranger.sock.do_handshake()
            stranger.stage = _Stage.MEMBER
            if not tls.is_member(stranger.sock):
                self._send_away(stranger, _NO_MEMBER)
                return False
        return True

    def _read_hello(self, stranger: _Stranger) -> None:
        while (missing := wire.HEADER_BYTES - len(stranger.received)) > 0:
            part = stranger.sock.recv(missing)
            if not part:
                break
            stranger.received += part
        try:
            hello = wire.decode_header(stranger.received)
        except TransferError:
            hello = None
        if not isinstance(hello, wire.HelloFrame):
            self._refuse(stranger)
        elif self._tls is not None and stranger.stage is not _Stage.MEMBER:
            self._send_away(stranger, _WANTS_TLS)
        else:
            self._forget(stranger)
            if not self._admit(stranger.sock, hello):
                self.num_refused += 1
                stranger.sock.close()

    def _send_away(self, stranger: _Stranger, answer: bytes) -> None:
        """Closing at once would reset the connection and could take the answer with it."""
        self.num_refused += 1
        stranger.stage = _Stage.SENT_AWAY
        with contextlib.suppress(OSError):  # it may be gone
            if answer:
                stranger.sock.send(answer)
            socket.socket.shutdown(stranger.sock, socket.SHUT_WR)

    def _refuse(self, stranger: _Stranger) -> None:
        if stranger.stage is not _Stage.SENT_AWAY:
            self.num_refused += 1
        self._forget(stranger)
        stranger.sock.close()

    def _forget(self, stranger: _Stranger) -> None:
        self._selector.unregister(stranger.sock)
        del self._strangers[stranger]
