"""The loop of both attention kernels: tokens in pages, taken a block at a time into a running softmax, and its end.

What a row carries from block to block (float32):

    top     largest score so far, times log2 e; -inf before the first token
    total   sum of the weights 2 ** (score - top)
    acc     sum of the values times their weights
"""

from __future__ import annotations

import triton
import triton.language as tl

from pdserve.kernels.device_math import LOG2_E, load_kv, locate, soften


@triton.jit
def attend_over(
    acc, top, total, q, row_positions, begin, end, kv_len, table, key_base, value_base,
    k_stride_page, k_stride_token, v_stride_page, v_stride_token, score_scale, softcap, window,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, IS_FP8: tl.constexpr, IS_MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes the blocks from `begin`, a multiple of BLOCK_N, to `end`, another or the end of all tokens, into the state.

    A row sees the tokens up to its position: one per row, or a single one for all. Not masked: it sees all of them.
    """
    k_dims = tl.arange(0, BLOCK_K)
    v_dims = tl.arange(0, BLOCK_V)
    for at in range(begin, end, BLOCK_N):
        pages, offsets = locate(table, at, kv_len, PAGE_SIZE, BLOCK_N)
        positions = at + tl.arange(0, BLOCK_N)
        is_key = (k_dims < K_DIM)[None, :]
        is_value = (v_dims < V_DIM)[None, :]
        if IS_MASKED:
            # Slots past the end may hold NaN: they are not read, not only weighted with 0.
            is_key = is_key & (positions < kv_len)[:, None]
            is_value = is_value & (positions < kv_len)[:, None]
        k_at = key_base + (pages * k_stride_page + offsets * k_stride_token)[:, None] + k_dims[None, :]
        k = load_kv(k_at, is_key, q, IS_FP8)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * score_scale
        if HAS_SOFTCAP:
            scores = soften(scores, softcap)
        scores = scores * LOG2_E
        if IS_MASKED:
            seen = positions[None, :] <= row_positions[:, None]
            if HAS_WINDOW:
                seen = seen & (positions[None, :] > row_positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = new_top
        if IS_MASKED:
            base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen no token yet
        fade = tl.exp2(top - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * fade + tl.sum(weights, 1)
        v_at = value_base + (pages * v_stride_page + offsets * v_stride_token)[:, None] + v_dims[None, :]
        v = load_kv(v_at, is_value, q, IS_FP8)
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        top = new_top
    return acc, top, total


@triton.jit
def answer(acc, top, total, sinks, heads, is_row, value_scale, HAS_SINKS: tl.constexpr):
    """Weighted means of the values, times `value_scale`; zeros where a row saw nothing."""
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        new_top = tl.maximum(top, sink)
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.exp2(sink - new_top)
        acc = acc * fade[:, None]
    return acc * (value_scale / tl.where(total > 0.0, total, 1.0))[:, None]
