"""Loads the compiled kernels, which exist where a C compiler was when pdserve was installed."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

_ABI = 5  # as in csrc/cpu.c


class Unavailable(Exception):
    """There are no compiled kernels here; the text says why."""


@cache
def load() -> ctypes.CDLL:
    """The library.

    Raises:
        Unavailable: It was not built, is of another version than this code, or does not run on this processor.
    """
    directory = Path(__file__).parent
    found = [path for suffix in EXTENSION_SUFFIXES if (path := directory / f"_cpu{suffix}").is_file()]
    if not found:
        raise Unavailable("they are not built: on Linux and x86-64, put a C compiler on PATH and install pdserve again")
    try:
        library = ctypes.CDLL(str(found[0]))
        abi = library.pdserve_abi()
    except (OSError, AttributeError) as e:
        raise Unavailable(f"{found[0].name} cannot be loaded: {e}") from e
    if abi != _ABI:
        raise Unavailable(f"{found[0].name} has version {abi}, this code needs {_ABI}: install pdserve again")
    if not library.pdserve_supported():
        raise Unavailable("this processor has no AVX2 and FMA")
    return library


def why_not() -> str | None:
    """Why there are no compiled kernels; None: there are."""
    try:
        load()
    except Unavailable as e:
        return str(e)
    return None


def set_threads(count: int) -> None:
    """Sets the number of threads of this process's compiled kernels, at first 1.

    Args:
        count: From 1 to 256; the calling thread is one of them.

    Raises:
        Unavailable: There are no compiled kernels.
        RuntimeError: There are not so many threads.
    """
    if load().pdserve_set_threads(count):
        raise RuntimeError(
            f"cannot start {count} threads: the system gives no more, or the number is not from 1 to 256"
        )
