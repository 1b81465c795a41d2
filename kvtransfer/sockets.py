"""Blocking socket reads and writes of many buffers at once, and what else the data planes ask of their sockets."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import ssl
import struct
from collections.abc import Sequence

SOCKET_BUFFER_BYTES = 4 << 20
MAX_BUFFERS = 1024
"""Of one read or write: the system takes no more."""
BATCH_BYTES = 4 << 20
"""Pages that are sent, received and verified at a time: fewer calls, and what came is still in a cache."""


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


def wait_at_most(sock: socket.socket, seconds: float | None) -> None:
    """Limits how long one read or write waits; None: for ever.

    By the kernel, and the socket blocks: with a timeout of Python's a read would return whatever part has come, and ask
    before each whether there is one.
    """
    if isinstance(sock, ssl.SSLSocket):
        sock.settimeout(seconds)
        return
    sock.settimeout(None)
    whole = int(seconds or 0)
    limit = struct.pack("@ll", whole, max(1, int(((seconds or 0) - whole) * 1e6)) if seconds else 0)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, limit)


def receive_some(sock: socket.socket, into: list[memoryview]) -> int:
    """Fills buffers in order, and takes the full ones out of the list.

    Returns:
        Bytes that came: all that fit, or fewer when the socket's limit passed or a signal came.

    Raises:
        Closed: The peer has closed.
        OSError: The socket failed or its limit passed without a byte (TimeoutError).
    """
    try:
        if isinstance(sock, ssl.SSLSocket):  # has no recvmsg_into
            num = sock.recv_into(into[0])
        else:
            num = sock.recvmsg_into(into[:MAX_BUFFERS], 0, socket.MSG_WAITALL)[0]
    except BlockingIOError as e:
        raise TimeoutError("nothing came in time") from e
    if num == 0:
        raise Closed
    _take_off(into, num)
    return num


def recv_exactly(sock: socket.socket, into: memoryview) -> None:
    """Fills a buffer straight from the socket; errors as in `receive_some`."""
    left = [into]
    while left:
        receive_some(sock, left)


def send_all(sock: socket.socket, buffers: Sequence[bytes | memoryview]) -> None:
    """Sends buffers in order without joining them.

    Raises:
        OSError: The socket failed or its limit passed without progress (TimeoutError).
    """
    left = [memoryview(b) for b in buffers]
    while left:
        try:
            # TLS has no sendmsg; it sends a record (16 KiB) at a time in any case.
            num = sock.send(left[0]) if isinstance(sock, ssl.SSLSocket) else sock.sendmsg(left[:MAX_BUFFERS])
        except BlockingIOError as e:
            raise TimeoutError("nothing could be sent in time") from e
        _take_off(left, num)


def _take_off(buffers: list[memoryview], num_bytes: int) -> None:
    """Takes as many bytes off the front."""
    full = 0
    while full < len(buffers) and num_bytes >= len(buffers[full]):
        num_bytes -= len(buffers[full])
        full += 1
    del buffers[:full]
    if num_bytes:
        buffers[0] = buffers[0][num_bytes:]


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
        OSError: The socket failed, there is nothing to read yet (BlockingIOError), or this process had no room for all
            descriptors: none is left open then.
    """
    room = socket.CMSG_SPACE(max_num * struct.calcsize("i"))
    raw, ancillary, flags, _ = sock.recvmsg(num_bytes, room, socket.MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds += [fd for (fd,) in struct.iter_unpack("i", data[: len(data) - len(data) % struct.calcsize("i")])]
    if flags & socket.MSG_CTRUNC:
        for fd in fds:
            os.close(fd)
        raise OSError(errno.EMFILE, "too many descriptors are open here (ulimit -n), or too many were sent")
    return raw, fds


def batch_pages(page_bytes: int) -> int:
    """Pages of a batch; each has a header of its own."""
    return max(1, min(BATCH_BYTES // page_bytes, MAX_BUFFERS // 2))
