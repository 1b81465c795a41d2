"""Hashes that must be equal in every process: prompt digests, identity digests and sampling noise.

SHA-256 throughout: a collision would serve another request's KV.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence

JsonScalar = str | int | float | bool | None


def token_digest(token_ids: Sequence[int]) -> bytes:
    """SHA-256 over token ids as little-endian uint32.

    Args:
        token_ids: Ids in order, each in [0, 2**32).

    Returns:
        32 bytes.
    """
    return hashlib.sha256(struct.pack(f"<{len(token_ids)}I", *token_ids)).digest()


def identity_digest(parts: Mapping[str, JsonScalar]) -> bytes:
    """SHA-256 over the facts that must be equal on all workers of a pool.

    Args:
        parts: Names and values, e.g. protocol version, model id, weights digest, rope and attention config.

    Returns:
        32 bytes, independent of the order of `parts`.
    """
    return hashlib.sha256(json.dumps(dict(parts), sort_keys=True, separators=(",", ":")).encode()).digest()


def sampling_uniform(seed: int, index: int) -> float:
    """Uniform noise in [0, 1) for one output index of one request, the same on every worker.

    Args:
        seed: The request's seed, in [0, 2**64).
        index: Output index, from 0.

    Returns:
        A float64 with 53 random bits.
    """
    word = hashlib.sha256(struct.pack("<QQ", seed, index)).digest()
    return (int.from_bytes(word[:8], "little") >> 11) * 2.0**-53


def choice_seed(seed: int, choice: int) -> int:
    """Seed of one of a request's n output streams: choice 0 is the request's own, the others are unrelated to it.

    So choice i of a seeded request is the single request with the seed `choice_seed(seed, i)`.

    Args:
        seed: The request's seed, in [0, 2**64).
        choice: Index of the stream, from 0.

    Returns:
        A seed in [0, 2**64).
    """
    if choice == 0:
        return seed
    return int.from_bytes(hashlib.sha256(b"choice" + struct.pack("<QQ", seed, choice)).digest()[:8], "little")
