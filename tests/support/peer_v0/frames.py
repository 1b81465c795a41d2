"""The frozen frames of the tcp data plane: 64 bytes, little endian, then at most one body."""

from __future__ import annotations

import socket
import struct

MAGIC, VERSION = 0x564B4450, 1
HELLO, GET, PAGE, END, ERR = 1, 2, 3, 4, 5


def frame(kind: int, layout: str, *values: object) -> bytes:
    """Packs a header: `layout` is that of its fields, zeros follow."""
    return (struct.pack("<IBBH", MAGIC, VERSION, kind, 0) + struct.pack("<" + layout, *values)).ljust(64, b"\0")


def receive(sock: socket.socket, num_bytes: int) -> bytes:
    """Reads exactly so many bytes.

    Raises:
        ConnectionError: The peer closed first.
    """
    data = b""
    while len(data) < num_bytes:
        part = sock.recv(num_bytes - len(data))
        if not part:
            raise ConnectionError("closed")
        data += part
    return data


def header(raw: bytes) -> tuple[int, bytes]:
    """Kind and fields of a header of this version."""
    magic, version, kind, reserved = struct.unpack_from("<IBBH", raw)
    assert (magic, version, reserved) == (MAGIC, VERSION, 0), "not a frame of version 1"
    return kind, raw[8:]
