"""Blocking socket reads and writes of whole buffers, shared by both ends of the tcp data plane."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Sequence

SOCKET_BUFFER_BYTES = 4 << 20


class Closed(Exception):
    """The peer closed the connection."""


def tune(sock: socket.socket) -> None:
    """Sets what bulk transfer over one connection wants; an idle peer that vanished is noticed within two minutes."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)


def recv_exactly(sock: socket.socket, into: memoryview) -> None:
    """Fills a buffer straight from the socket.

    Raises:
        Closed: The peer closed first.
        OSError: The socket failed or its timeout passed without a byte (TimeoutError).
    """
    at = 0
    while at < len(into):
        n = sock.recv_into(into[at:])
        if n == 0:
            raise Closed
        at += n


def send_all(sock: socket.socket, buffers: Sequence[bytes | memoryview]) -> None:
    """Sends buffers in order without joining them.

    Raises:
        OSError: The socket failed or its timeout passed without progress (TimeoutError).
    """
    left = [memoryview(b) for b in buffers]
    if isinstance(sock, ssl.SSLSocket):  # has no sendmsg; sends a record (16 KiB) at a time in any case
        for view in left:
            while view:
                view = view[sock.send(view) :]
        return
    while left:
        sent = sock.sendmsg(left)
        while left and sent >= len(left[0]):
            sent -= len(left.pop(0))
        if left:
            left[0] = left[0][sent:]


def shut_down(sock: socket.socket) -> None:
    """Ends a connection from any thread: its blocked reads and writes return at once.

    Not by `SSLSocket.shutdown`: that makes the socket a plain one under its thread, which would read on what came
    encrypted.
    """
    with contextlib.suppress(OSError):  # not connected any more
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
