"""Launch configurations of the Triton kernels: one table per architecture, never tuned at run time.

An entry holds for keys and values up to `max_dim` wide with elements of `num_bytes`. It is chosen so that
`scripts/compile_kernels.py` shows no spills and fits the shared memory of the smallest device that uses the table.
Nothing here imports Triton or touches a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pdserve.core.errors import ConfigError

Arch = Literal["sm_80", "sm_90", "sm_100", "gfx942"]

MAX_SPLITS = 64
MIN_DOT_ROWS = 16
MAX_DECODE_ROWS = 64


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """How one attention kernel is launched.

    Attributes:
        block_n: Tokens of KV that a program reads at a time, a power of two >= 16.
        num_warps: Warps (wavefronts on AMD) per program.
        num_stages: Depth of the load pipeline.
        block_m: Rows (query tokens times grouped heads) of a prefill program; decode derives its own.
        min_split_tokens: Tokens below which a decode program's share is not split further, a multiple of `block_n`.
        precision: How `tl.dot` treats float32 ("ieee", "tf32x3"); without effect on other types.
    """

    block_n: int
    num_warps: int
    num_stages: int
    block_m: int = 64
    min_split_tokens: int = 256
    precision: Literal["ieee", "tf32x3"] = "ieee"


@dataclass(frozen=True, slots=True)
class Profile:
    """A device as the launch code sees it.

    Attributes:
        arch: Table to use.
        num_cores: Streaming multiprocessors (compute units on AMD).
    """

    arch: Arch
    num_cores: int


_Table = dict[tuple[int, int], AttentionConfig]  # (max_dim, num_bytes) -> configuration

_DECODE: dict[Arch, _Table] = {
    "sm_80": {
        (64, 2): AttentionConfig(64, 4, 3),
        (128, 2): AttentionConfig(64, 4, 2),
        (256, 2): AttentionConfig(32, 4, 2),
        (64, 4): AttentionConfig(32, 4, 2, precision="tf32x3"),
        (128, 4): AttentionConfig(32, 4, 2, precision="tf32x3"),
        (256, 4): AttentionConfig(16, 4, 2),
    },
    "sm_90": {
        (64, 2): AttentionConfig(128, 4, 3),
        (128, 2): AttentionConfig(64, 4, 3),
        (256, 2): AttentionConfig(32, 4, 3),
        (64, 4): AttentionConfig(64, 4, 2, precision="tf32x3"),
        (128, 4): AttentionConfig(32, 4, 3, precision="tf32x3"),
        (256, 4): AttentionConfig(16, 4, 3),
    },
    "sm_100": {
        (64, 2): AttentionConfig(128, 4, 3),
        (128, 2): AttentionConfig(64, 4, 3),
        (256, 2): AttentionConfig(32, 4, 3),
        (64, 4): AttentionConfig(64, 4, 2, precision="tf32x3"),
        (128, 4): AttentionConfig(32, 4, 3, precision="tf32x3"),
        (256, 4): AttentionConfig(16, 4, 3),
    },
    "gfx942": {
        (64, 2): AttentionConfig(64, 4, 1),
        (128, 2): AttentionConfig(32, 4, 1),
        (256, 2): AttentionConfig(32, 4, 1),
        (64, 4): AttentionConfig(32, 4, 1),
        (128, 4): AttentionConfig(32, 4, 1),
        (256, 4): AttentionConfig(16, 4, 1),
    },
}

_PREFILL: dict[Arch, _Table] = {
    "sm_80": {
        (64, 2): AttentionConfig(64, 8, 3, block_m=128),
        (128, 2): AttentionConfig(32, 8, 3, block_m=128),
        (256, 2): AttentionConfig(32, 8, 2, block_m=64),
        (64, 4): AttentionConfig(32, 4, 2, block_m=32, precision="tf32x3"),
        (128, 4): AttentionConfig(16, 8, 2, block_m=32),
        (256, 4): AttentionConfig(16, 8, 2, block_m=32),
    },
    "sm_90": {
        (64, 2): AttentionConfig(128, 8, 3, block_m=128),
        (128, 2): AttentionConfig(64, 8, 3, block_m=128),
        (256, 2): AttentionConfig(32, 8, 2, block_m=128),
        (64, 4): AttentionConfig(32, 4, 2, block_m=64, precision="tf32x3"),
        (128, 4): AttentionConfig(16, 8, 2, block_m=32),
        (256, 4): AttentionConfig(16, 8, 2, block_m=32),
    },
    "sm_100": {
        (64, 2): AttentionConfig(128, 8, 3, block_m=128),
        (128, 2): AttentionConfig(64, 8, 3, block_m=128),
        (256, 2): AttentionConfig(32, 8, 2, block_m=128),
        (64, 4): AttentionConfig(32, 4, 2, block_m=32, precision="tf32x3"),
        (128, 4): AttentionConfig(16, 8, 2, block_m=32),
        (256, 4): AttentionConfig(16, 8, 2, block_m=32),
    },
    "gfx942": {
        (64, 2): AttentionConfig(64, 4, 1, block_m=64),
        (128, 2): AttentionConfig(64, 4, 1, block_m=64),
        (256, 2): AttentionConfig(32, 4, 1, block_m=64),
        (64, 4): AttentionConfig(32, 4, 1, block_m=32),
        (128, 4): AttentionConfig(32, 4, 1, block_m=32),
        (256, 4): AttentionConfig(16, 4, 1, block_m=32),
    },
}

_PREFILL_FP8_KV: dict[Arch, _Table] = {
    "sm_80": {},
    "sm_90": {(256, 2): AttentionConfig(16, 8, 2, block_m=128)},
    "sm_100": {},
    "gfx942": {},
}
"""Where decoding KV of 8 bits takes registers that the entry of `_PREFILL` has not left."""


def cuda_arch(major: int) -> Arch:
    """Table of a CUDA compute capability; consumer Blackwell (12.x) has the small shared memory of sm_80's table.

    Raises:
        ConfigError: The device is older than sm_80.
    """
    if major < 8:
        raise ConfigError(f"this GPU has compute capability {major}.x; 8.0 or newer is needed")
    by_major: dict[int, Arch] = {9: "sm_90", 10: "sm_100"}
    return by_major.get(major, "sm_80")


def decode_config(arch: Arch, widest_dim: int, num_bytes: int) -> AttentionConfig:
    """Configuration of decode attention.

    Args:
        arch: Table.
        widest_dim: Larger one of key and value width.
        num_bytes: Bytes of one query element.
    """
    return _entry(_DECODE[arch], widest_dim, num_bytes)


def prefill_config(arch: Arch, widest_dim: int, num_bytes: int, *, is_fp8_kv: bool = False) -> AttentionConfig:
    """Configuration of prefill attention.

    Args:
        arch: Table.
        widest_dim: Larger one of key and value width.
        num_bytes: Bytes of one query element.
        is_fp8_kv: The pages hold e4m3 numbers; for queries of 16 bits (with float32 ones the kernels spill).
    """
    table = _PREFILL[arch] | (_PREFILL_FP8_KV[arch] if is_fp8_kv else {})
    return _entry(table, widest_dim, num_bytes)


def _entry(table: _Table, widest_dim: int, num_bytes: int) -> AttentionConfig:
    for max_dim in (64, 128, 256):
        if widest_dim <= max_dim:
            return table[max_dim, num_bytes]
    raise ConfigError(f"head dim {widest_dim} is wider than 256, the widest that the GPU kernels serve")


def choose_splits(num_cores: int, num_programs: int, max_tokens: int, min_split_tokens: int) -> int:
    """Over how many programs decode attention spreads each sequence's KV.

    Fixed by shapes alone, so that a captured CUDA graph may keep it; the kernel then divides the lengths it reads.

    Args:
        num_cores: Cores of the device.
        num_programs: Programs without a split: padded sequences times KV heads.
        max_tokens: Tokens that the page tables have room for.
        min_split_tokens: Tokens that are worth a program.

    Returns:
        A power of two from 1 to `MAX_SPLITS`: enough for four programs per core, and for no program to read more than
        8192 tokens, but never more than there are shares of `min_split_tokens`.
    """
    wanted = max(-(-4 * num_cores // num_programs), -(-max_tokens // 8192))
    wanted = min(wanted, -(-max_tokens // min_split_tokens), MAX_SPLITS)
    return power_of_two(wanted) if wanted > 1 else 1


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n >= 1."""
    return 1 << (n - 1).bit_length()
