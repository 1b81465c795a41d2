"""Decode attention over pages: one new token per sequence, its KV split over several programs.

Stage 1: program (sequence, KV head, split) attends over its share of the tokens with all query heads of the group and
leaves a normalised part and the base-2 logarithm of its sum. Stage 2 weighs the parts. Both read the lengths on the
device and derive the same shares from them, so a launch depends on shapes alone (CUDA graphs):

    num_new != 1      row belongs to prefill attention: nothing is written
    kv_len == 0       padded row: zeros
    share is empty    program ends; stage 2 does not read its part
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.configs import MAX_DECODE_ROWS, MIN_DOT_ROWS, AttentionConfig, power_of_two
from pdserve.kernels.device_math import E4M3_UNIT, LOG2_E
from pdserve.kernels.online_softmax import answer, attend_over

_PARTS = tl.constexpr(16)  # parts that stage 2 reads at a time


@triton.jit
def _shares(kv_len, num_splits, window, HAS_WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, MIN_SHARE: tl.constexpr):
    """Where the shares begin: at the first token that is seen, aligned down; and tokens per share, whole blocks."""
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(kv_len - window, 0)
    begin = first // BLOCK_N * BLOCK_N
    share = tl.cdiv(tl.cdiv(kv_len - begin, num_splits), MIN_SHARE) * MIN_SHARE
    return begin, share


@triton.jit
def _stage1(
    query, keys, values, page_tables, query_starts, kv_lens, sinks, parts, part_logs, output,
    q_stride_token, q_stride_head, k_stride_page, k_stride_head, k_stride_token,
    v_stride_page, v_stride_head, v_stride_token, table_stride, num_splits,
    score_scale, value_scale, softcap, window,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_BLOCKS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, MIN_SHARE: tl.constexpr, IS_DIRECT: tl.constexpr, IS_FP8: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0)
    kv_head = tl.program_id(1) // HEAD_BLOCKS
    split = tl.program_id(2)
    row = tl.load(query_starts + seq).to(tl.int64)
    if tl.load(query_starts + seq + 1) - row != 1:
        return
    kv_len = tl.load(kv_lens + seq).to(tl.int32)
    begin, share = _shares(kv_len, num_splits, window, HAS_WINDOW, BLOCK_N, MIN_SHARE)
    begin += split * share
    end = tl.minimum(begin + share, kv_len)
    if not IS_DIRECT and begin >= kv_len:
        return

    in_group = tl.program_id(1) % HEAD_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = in_group < GROUP
    heads = kv_head * GROUP + in_group
    k_dims = tl.arange(0, BLOCK_K)
    v_dims = tl.arange(0, BLOCK_V)
    q_at = query + row * q_stride_token + heads[:, None].to(tl.int64) * q_stride_head + k_dims[None, :]
    q = tl.load(q_at, mask=is_head[:, None] & (k_dims < K_DIM)[None, :], other=0.0)
    key_base = keys + kv_head.to(tl.int64) * k_stride_head
    value_base = values + kv_head.to(tl.int64) * v_stride_head
    table = page_tables + seq.to(tl.int64) * table_stride

    acc = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc, top, total = attend_over(
        acc, top, total, q, tl.full([1], kv_len - 1, tl.int32), begin, end, kv_len, table, key_base, value_base,
        k_stride_page, k_stride_token, v_stride_page, v_stride_token, score_scale, softcap, window,
        K_DIM, V_DIM, PAGE_SIZE, BLOCK_N, BLOCK_K, BLOCK_V, IS_FP8, True, HAS_WINDOW, HAS_SOFTCAP, PRECISION,
    )  # fmt: skip

    is_out = is_head[:, None] & (v_dims < V_DIM)[None, :]
    if IS_DIRECT:
        result = answer(acc, top, total, sinks, heads, is_head, value_scale, HAS_SINKS)
        out_at = output + (row * NUM_HEADS + heads)[:, None] * V_DIM + v_dims[None, :]
        tl.store(out_at, result.to(output.dtype.element_ty), mask=is_out)
    else:
        part = (seq.to(tl.int64) * NUM_HEADS + heads) * num_splits + split
        tl.store(parts + part[:, None] * V_DIM + v_dims[None, :], acc / total[:, None], mask=is_out)
        tl.store(part_logs + part, top + tl.log2(total), mask=is_head)


@triton.jit
def _stage2(
    query_starts, kv_lens, sinks, parts, part_logs, output, num_splits, value_scale, window,
    NUM_HEADS: tl.constexpr, V_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
    MIN_SHARE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(query_starts + seq).to(tl.int64)
    if tl.load(query_starts + seq + 1) - row != 1:
        return
    kv_len = tl.load(kv_lens + seq).to(tl.int32)
    begin, share = _shares(kv_len, num_splits, window, HAS_WINDOW, BLOCK_N, MIN_SHARE)
    num_live = tl.cdiv(kv_len - begin, tl.maximum(share, 1))
    v_dims = tl.arange(0, BLOCK_V)
    base = (seq.to(tl.int64) * NUM_HEADS + head) * num_splits

    acc = tl.zeros([BLOCK_V], tl.float32)
    top = float("-inf")
    total = 0.0
    if HAS_SINKS:
        top = tl.load(sinks + head).to(tl.float32) * LOG2_E
        total = 1.0
    for at in range(0, num_live, _PARTS):
        index = at + tl.arange(0, _PARTS)
        is_live = index < num_live
        logs = tl.load(part_logs + base + index, mask=is_live, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(logs, 0))
        fade = tl.exp2(top - new_top)
        weights = tl.exp2(logs - new_top)
        part_at = parts + (base + index)[:, None] * V_DIM + v_dims[None, :]
        part = tl.load(part_at, mask=is_live[:, None] & (v_dims < V_DIM)[None, :], other=0.0)
        acc = acc * fade + tl.sum(part * weights[:, None], 0)
        total = total * fade + tl.sum(weights, 0)
        top = new_top
    result = acc * (value_scale / tl.where(total > 0.0, total, 1.0))
    out_at = output + (row * NUM_HEADS + head) * V_DIM + v_dims
    tl.store(out_at, result.to(output.dtype.element_ty), mask=v_dims < V_DIM)


def decode_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_tables: Tensor,
    query_starts: Tensor,
    kv_lens: Tensor,
    output: Tensor,
    *,
    scale: float,
    config: AttentionConfig,
    num_splits: int,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Attention of the sequences with one new token; rows of all others stay as they are.

    Arguments as in `reference.paged_attention`, and:

    Args:
        key_pages: May be float8_e4m3fn; a key is the stored number times `key_scale`. Last dimension contiguous.
        value_pages: Likewise, with `value_scale`.
        output: `[num_tokens, num_heads, v_dim]`, contiguous; written.
        config: Launch configuration, see `configs.decode_config`.
        num_splits: Programs per sequence and KV head, see `configs.choose_splits`.
        key_scale: See `key_pages`.
        value_scale: See `value_pages`.
    """
    num_seqs, num_heads, num_kv_heads = kv_lens.shape[0], query.shape[1], key_pages.shape[1]
    k_dim, v_dim, group = key_pages.shape[3], value_pages.shape[3], num_heads // num_kv_heads
    is_fp8 = key_pages.element_size() == 1
    if is_fp8:
        key_pages, value_pages = key_pages.view(torch.uint8), value_pages.view(torch.uint8)
        key_scale, value_scale = key_scale * E4M3_UNIT, value_scale * E4M3_UNIT
    block_h = min(max(power_of_two(group), MIN_DOT_ROWS), MAX_DECODE_ROWS)
    head_blocks = -(-group // block_h)
    is_direct = num_splits == 1
    parts = part_logs = output  # not used when direct
    if not is_direct:
        parts = torch.empty(num_seqs, num_heads, num_splits, v_dim, dtype=torch.float32, device=query.device)
        part_logs = torch.empty(num_seqs, num_heads, num_splits, dtype=torch.float32, device=query.device)
    block_v = max(power_of_two(v_dim), MIN_DOT_ROWS)
    some_sinks = output if sinks is None else sinks
    _stage1[num_seqs, num_kv_heads * head_blocks, num_splits](
        query, key_pages, value_pages, page_tables, query_starts, kv_lens, some_sinks, parts, part_logs, output,
        query.stride(0), query.stride(1), key_pages.stride(0), key_pages.stride(1), key_pages.stride(2),
        value_pages.stride(0), value_pages.stride(1), value_pages.stride(2), page_tables.stride(0), num_splits,
        scale * key_scale, value_scale if is_direct else 1.0, softcap or 0.0, window or 0,
        NUM_HEADS=num_heads, GROUP=group, HEAD_BLOCKS=head_blocks, K_DIM=k_dim, V_DIM=v_dim,
        PAGE_SIZE=key_pages.shape[2], BLOCK_H=block_h, BLOCK_N=config.block_n,
        BLOCK_K=max(power_of_two(k_dim), MIN_DOT_ROWS), BLOCK_V=block_v, MIN_SHARE=config.min_split_tokens,
        IS_DIRECT=is_direct, IS_FP8=is_fp8, HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None, PRECISION=config.precision,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if not is_direct:
        _stage2[num_seqs, num_heads](
            query_starts, kv_lens, some_sinks, parts, part_logs, output, num_splits, value_scale, window or 0,
            NUM_HEADS=num_heads, V_DIM=v_dim, BLOCK_N=config.block_n, BLOCK_V=block_v,
            MIN_SHARE=config.min_split_tokens, HAS_WINDOW=window is not None, HAS_SINKS=sinks is not None,
            num_warps=4, num_stages=2,
        )  # fmt: skip
