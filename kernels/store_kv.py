"""Writes the KV of new tokens into the pages of one layer. A slot of -1 (a padded row) is skipped."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.configs import power_of_two
from pdserve.kernels.device_math import e4m3_bits

_MAX_TILE = 4096  # elements that one program moves at a time


@triton.jit
def _put(
    source, target, source_stride, target_stride, heads, is_head, factor,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, IS_FP8: tl.constexpr,
):  # fmt: skip
    """Writes all heads of one token."""
    dims = tl.arange(0, BLOCK_D)
    mask = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    value = tl.load(source + heads[:, None] * source_stride + dims[None, :], mask=mask)
    if IS_FP8:
        value = e4m3_bits(value.to(tl.float32) * factor)
    tl.store(target + heads[:, None] * target_stride + dims[None, :], value.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _store_kv(
    keys, values, key_pages, value_pages, slots, key_factor, value_factor,
    k_stride_token, k_stride_head, v_stride_token, v_stride_head,
    kp_stride_page, kp_stride_head, kp_stride_token, vp_stride_page, vp_stride_head, vp_stride_token,
    NUM_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, IS_FP8: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    page = slot // PAGE_SIZE
    offset = slot % PAGE_SIZE
    heads = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    is_head = heads < NUM_HEADS
    _put(
        keys + token * k_stride_token, key_pages + page * kp_stride_page + offset * kp_stride_token,
        k_stride_head, kp_stride_head, heads, is_head, key_factor, K_DIM, BLOCK_K, IS_FP8,
    )  # fmt: skip
    _put(
        values + token * v_stride_token, value_pages + page * vp_stride_page + offset * vp_stride_token,
        v_stride_head, vp_stride_head, heads, is_head, value_factor, V_DIM, BLOCK_V, IS_FP8,
    )  # fmt: skip


def store_kv(
    keys: Tensor,
    values: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    slots: Tensor,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """As `reference.store_kv`; mutates the pages.

    Args:
        keys: `[num_tokens, num_kv_heads, k_dim]`, last dimension contiguous.
        values: `[num_tokens, num_kv_heads, v_dim]`, last dimension contiguous.
        key_pages: Key view of one layer; if float8_e4m3fn, keys are divided by `key_scale` and rounded, at most
            448; what is not finite becomes NaN.
        value_pages: Value view of one layer, likewise.
        slots: `[num_tokens]`, distinct; -1: the row is not stored.
        key_scale: See `key_pages`.
        value_scale: See `value_pages`.
    """
    num_tokens, num_heads, k_dim = keys.shape
    v_dim = values.shape[2]
    is_fp8 = key_pages.element_size() == 1
    if is_fp8:
        key_pages, value_pages = key_pages.view(torch.uint8), value_pages.view(torch.uint8)
    block_k, block_v = power_of_two(k_dim), power_of_two(v_dim)
    block_h = min(power_of_two(num_heads), max(1, _MAX_TILE // max(block_k, block_v)))
    _store_kv[num_tokens, -(-num_heads // block_h)](
        keys, values, key_pages, value_pages, slots, 1.0 / key_scale, 1.0 / value_scale,
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        key_pages.stride(0), key_pages.stride(1), key_pages.stride(2),
        value_pages.stride(0), value_pages.stride(1), value_pages.stride(2),
        NUM_HEADS=num_heads, K_DIM=k_dim, V_DIM=v_dim, PAGE_SIZE=key_pages.shape[2],
        BLOCK_H=block_h, BLOCK_K=block_k, BLOCK_V=block_v, IS_FP8=is_fp8, num_warps=4,
    )  # fmt: skip
