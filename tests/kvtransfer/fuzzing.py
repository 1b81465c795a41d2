"""Mutations of valid messages and a limit on memory, for the fuzz tests. Everything follows from the seed."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_WORDS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1024, 1025, 128, 129, 64)


def mutated(rng: random.Random, raw: bytes) -> bytes:
    """`raw` after one to eight small changes: bits, bytes, words, cut, grown, repeated, moved."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(7):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1 if data:
                data[at % len(data)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                at -= at % 4
                data[at : at + 4] = rng.choice(_WORDS).to_bytes(4, "little")
            case 3:
                del data[at:]
            case 4:
                data[at:at] = rng.randbytes(rng.choice((1, 2, 8, 64)))
            case 5:
                data[at:at] = data[at : at + rng.randrange(1, 33)]
            case _:
                part = data[at : at + rng.randrange(1, 17)]
                del data[at : at + len(part)]
                to = rng.randrange(len(data) + 1)
                data[to:to] = part
    return bytes(data)


def inputs(rng: random.Random, valid: Sequence[bytes], number: int) -> Iterator[bytes]:
    """Three of four are mutations of a valid one, the others random bytes."""
    for i in range(number):
        yield mutated(rng, rng.choice(valid)) if i % 4 else rng.randbytes(rng.randrange(200))


@contextmanager
def memory_limit(limit_bytes: int) -> Iterator[None]:
    """What is inside never holds more than so many bytes above what was held before.

    Raises:
        AssertionError: It did.
    """
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before <= limit_bytes, f"{peak - before} bytes were held, {limit_bytes} are allowed"
