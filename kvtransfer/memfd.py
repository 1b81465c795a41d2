"""Anonymous memory (memfd) that can be shown to other processes.

It is sealed when it is made: its size is final, so a reader never meets a hole, and nobody can map it writable any
more: what `create` maps stays the only way to write, whatever a reader does with the descriptor that it was given.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os

from pdserve.core.errors import TransferError

_F_SEAL_FUTURE_WRITE = 0x10  # <linux/fcntl.h>, since Linux 5.1
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | _F_SEAL_FUTURE_WRITE


def create(name: str, num_bytes: int) -> tuple[int, memoryview]:
    """Makes memory, zeroed, and sealed where the system can; nothing of it is taken before it is written.

    Args:
        name: Shown by the system's tools.
        num_bytes: Size, >= 1.

    Returns:
        Its descriptor, which the caller closes, and its bytes, writable.

    Raises:
        OSError: The system has no such memory to give.
        ValueError, OverflowError: The size cannot be mapped.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        mapped = mmap.mmap(fd, num_bytes)
        with contextlib.suppress(OSError):  # whoever shows it asks `is_sealed`
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd, memoryview(mapped)


def is_sealed(fd: int) -> bool:
    """Says whether a descriptor is of memory as this module promises it."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:
        return False


def read_only(fd: int) -> int:
    """A second descriptor of the same memory, which cannot write; the caller closes it.

    Raises:
        OSError: The memory is not sealed, or the system cannot.
    """
    if not is_sealed(fd):
        raise OSError("memory cannot be sealed; Linux 5.1 or newer can")
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def map_foreign(fd: int, num_bytes: int) -> mmap.mmap:
    """Maps memory that a peer sent, to read it.

    Args:
        fd: Its descriptor; stays the caller's.
        num_bytes: Size that it must have.

    Raises:
        TransferError: BAD_MEMORY: it is not what `create` makes, so that reading it might kill this process.
    """
    try:
        if not is_sealed(fd) or os.fstat(fd).st_size != num_bytes:
            raise TransferError("a peer sent memory of another size, or not sealed", reason="BAD_MEMORY")
        return mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    except (OSError, ValueError) as e:
        raise TransferError(f"a peer sent something that cannot be mapped: {e}", reason="BAD_MEMORY") from e
