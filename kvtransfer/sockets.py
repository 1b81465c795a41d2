"""Blocking socket reads and writes of whole buffers, and what else the data planes ask of their sockets."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import struct
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


def has_ended(sock: socket.socket) -> bool:
    """Says whether a connection on which the peer has nothing to say is over."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def is_same_user(sock: socket.socket) -> bool:
    """Says whether the other end of a connected unix socket belongs to this process's user."""
    credentials = struct.Struct("3i")  # pid, uid, gid
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    _, uid, _ = credentials.unpack(raw)
    return int(uid) == os.geteuid()


def receive_descriptors(sock: socket.socket, num_bytes: int, max_num: int) -> tuple[bytes, list[int]]:
    """Reads one message of a unix socket and the descriptors beside it, which the caller closes.

    Raises:
        OSError: The socket failed, or there is nothing to read yet (BlockingIOError).
    """
    room = socket.CMSG_SPACE(max_num * struct.calcsize("i"))
    raw, ancillary, _, _ = sock.recvmsg(num_bytes, room, socket.MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds += [fd for (fd,) in struct.iter_unpack("i", data[: len(data) - len(data) % struct.calcsize("i")])]
    return raw, fds
