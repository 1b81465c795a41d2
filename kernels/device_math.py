"""What several Triton kernels share: addresses in pages, fp8 bits, score modifiers.

FP8 pages hold e4m3 as raw bytes, converted by integer operations: the same on every architecture, exact, and equal in
the interpreter. Decoding gives the value divided by 256 (`E4M3_UNIT`), which the callers fold into their scales.
"""

from __future__ import annotations

import triton
import triton.language as tl

E4M3_UNIT = 256.0
E4M3_MAX = 448.0
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def locate(table, position, end, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pages (int64) and offsets of the BLOCK_N tokens from `position`, a multiple of BLOCK_N; tokens end at `end`."""
    if PAGE_SIZE % BLOCK_N == 0:
        # All in one page: a single scalar load.
        page = tl.load(table + position // PAGE_SIZE).to(tl.int64)
        pages = page + tl.zeros([BLOCK_N], tl.int64)
        offsets = position % PAGE_SIZE + tl.arange(0, BLOCK_N)
    else:
        positions = position + tl.arange(0, BLOCK_N)
        pages = tl.load(table + positions // PAGE_SIZE, mask=positions < end, other=0).to(tl.int64)
        offsets = positions % PAGE_SIZE
    return pages, offsets


@triton.jit
def load_kv(pointers, mask, like, IS_FP8: tl.constexpr):
    """KV elements in the type of `like`; fp8 ones are divided by 256."""
    raw = tl.load(pointers, mask=mask, other=0)
    if IS_FP8:
        bits = raw.to(tl.uint16)
        # e4m3's exponent and mantissa lie in float16's place for values 2**8 smaller (biases 7 and 15). NaN is all
        # ones: of it alone adding one carries, and that bit fills float16's exponent, so that it is NaN there too.
        size = bits & 0x7F
        half = ((bits & 0x80) << 8) | ((size | ((size + 1) & 0x80)) << 7)
        value = half.to(tl.float16, bitcast=True).to(like.dtype)
    else:
        value = raw.to(like.dtype)
    return value


@triton.jit
def e4m3_bits(value):
    """float32 -> e4m3 bits as uint8: to nearest, ties to even, saturating at 448; what is not finite becomes NaN.

    e4m3 has no infinity, and a damaged number must not turn into one that looks right.
    """
    bits = value.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    is_finite = size < 0x7F800000
    size = tl.minimum(size, 0x43E00000)  # 448
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960  # 960: the exponent biases' difference, times 8
    # Adding 2**23 rounds to an integer: multiples of 2**-9, the step of e4m3's subnormal numbers.
    shifted = size.to(tl.float32, bitcast=True) * 512.0 + 8388608.0
    subnormal = shifted.to(tl.uint32, bitcast=True) & 0xF
    encoded = tl.where(size < 0x3C800000, subnormal, normal)  # 2**-6
    encoded = tl.where(is_finite, encoded, 0x7F)
    return (((bits >> 24) & 0x80) | encoded).to(tl.uint8)


@triton.jit
def soften(scores, softcap):
    """softcap * tanh(scores / softcap), with exp: the interpreter has no tanh."""
    return softcap * (1.0 - 2.0 / (1.0 + tl.exp(scores * (2.0 / softcap))))
