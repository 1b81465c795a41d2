"""Prefill attention over pages: sequences of any number of new tokens, with or without earlier context.

A program holds BLOCK_Q new tokens of one sequence and all query heads of one KV head's group: BLOCK_M = BLOCK_Q * group
rows at most. Sequence i owns the blocks from `query_starts[i] // BLOCK_Q + i`; there are at least as many as it
needs, and `num_tokens // BLOCK_Q + num_seqs` in all, which depends on shapes alone. Blocks too many end at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.configs import MIN_DOT_ROWS, AttentionConfig, power_of_two
from pdserve.kernels.device_math import E4M3_UNIT
from pdserve.kernels.online_softmax import answer, attend_over

_SEARCH = tl.constexpr(128)  # sequences compared at a time when a block looks for its own


@triton.jit
def _sequence_of(block, query_starts, num_seqs, BLOCK_Q: tl.constexpr):
    """Index of the sequence that owns a block."""
    count = 0
    for at in range(0, num_seqs, _SEARCH):
        index = at + tl.arange(0, _SEARCH)
        starts = tl.load(query_starts + index, mask=index < num_seqs, other=0).to(tl.int32)
        owned = (index < num_seqs) & (starts // BLOCK_Q + index <= block)
        count += tl.sum(owned.to(tl.int32), 0)
    return count - 1


@triton.jit
def _prefill(
    query, keys, values, page_tables, query_starts, kv_lens, sinks, output,
    q_stride_token, q_stride_head, k_stride_page, k_stride_head, k_stride_token,
    v_stride_page, v_stride_head, v_stride_token, table_stride, num_seqs,
    score_scale, value_scale, softcap, window,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    SKIPS_SINGLE: tl.constexpr, IS_FP8: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = _sequence_of(block, query_starts, num_seqs, BLOCK_Q)
    start = tl.load(query_starts + seq).to(tl.int32)
    num_new = tl.load(query_starts + seq + 1).to(tl.int32) - start
    first_new = (block - (start // BLOCK_Q + seq)) * BLOCK_Q
    if first_new >= num_new:
        return
    if SKIPS_SINGLE and num_new == 1:
        return
    kv_len = tl.load(kv_lens + seq).to(tl.int32)

    rows = tl.arange(0, BLOCK_M)
    new = first_new + rows // GROUP
    is_row = (rows < BLOCK_Q * GROUP) & (new < num_new)
    tokens = (start + new).to(tl.int64)
    heads = kv_head * GROUP + rows % GROUP
    k_dims = tl.arange(0, BLOCK_K)
    v_dims = tl.arange(0, BLOCK_V)
    q_at = query + tokens[:, None] * q_stride_token + heads[:, None].to(tl.int64) * q_stride_head + k_dims[None, :]
    q = tl.load(q_at, mask=is_row[:, None] & (k_dims < K_DIM)[None, :], other=0.0)
    first_position = kv_len - num_new + first_new
    row_positions = kv_len - num_new + new
    key_base = keys + kv_head.to(tl.int64) * k_stride_head
    value_base = values + kv_head.to(tl.int64) * v_stride_head
    table = page_tables + seq.to(tl.int64) * table_stride

    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    end = tl.minimum(kv_len, first_position + BLOCK_Q)
    if HAS_WINDOW:
        begin = tl.maximum(first_position - window + 1, 0) // BLOCK_N * BLOCK_N
    else:
        # Whole blocks that the first row, and so every row, sees need no mask.
        begin = tl.maximum(first_position + 1, 0) // BLOCK_N * BLOCK_N
        acc, top, total = attend_over(
            acc, top, total, q, row_positions, 0, begin, kv_len, table, key_base, value_base,
            k_stride_page, k_stride_token, v_stride_page, v_stride_token, score_scale, softcap, window,
            K_DIM, V_DIM, PAGE_SIZE, BLOCK_N, BLOCK_K, BLOCK_V, IS_FP8, False, False, HAS_SOFTCAP, PRECISION,
        )  # fmt: skip
    acc, top, total = attend_over(
        acc, top, total, q, row_positions, begin, end, kv_len, table, key_base, value_base,
        k_stride_page, k_stride_token, v_stride_page, v_stride_token, score_scale, softcap, window,
        K_DIM, V_DIM, PAGE_SIZE, BLOCK_N, BLOCK_K, BLOCK_V, IS_FP8, True, HAS_WINDOW, HAS_SOFTCAP, PRECISION,
    )  # fmt: skip

    result = answer(acc, top, total, sinks, heads, is_row, value_scale, HAS_SINKS)
    out_at = output + (tokens * NUM_HEADS + heads)[:, None] * V_DIM + v_dims[None, :]
    tl.store(out_at, result.to(output.dtype.element_ty), mask=is_row[:, None] & (v_dims < V_DIM)[None, :])


def prefill_attention(
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
    skips_single: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Causal attention of all new tokens.

    Arguments as in `reference.paged_attention` and `paged_attention.decode_attention`, and:

    Args:
        output: `[num_tokens, num_heads, v_dim]`, contiguous; rows of no sequence stay as they are.
        config: Launch configuration, see `configs.prefill_config`.
        skips_single: Leaves the sequences with one new token to `decode_attention`.
    """
    num_seqs, num_heads, num_kv_heads = kv_lens.shape[0], query.shape[1], key_pages.shape[1]
    k_dim, v_dim, group = key_pages.shape[3], value_pages.shape[3], num_heads // num_kv_heads
    is_fp8 = key_pages.element_size() == 1
    if is_fp8:
        key_pages, value_pages = key_pages.view(torch.uint8), value_pages.view(torch.uint8)
        key_scale, value_scale = key_scale * E4M3_UNIT, value_scale * E4M3_UNIT
    block_m = max(config.block_m, power_of_two(group))
    block_q = block_m // group
    _prefill[query.shape[0] // block_q + num_seqs, num_kv_heads](
        query, key_pages, value_pages, page_tables, query_starts, kv_lens, output if sinks is None else sinks, output,
        query.stride(0), query.stride(1), key_pages.stride(0), key_pages.stride(1), key_pages.stride(2),
        value_pages.stride(0), value_pages.stride(1), value_pages.stride(2), page_tables.stride(0), num_seqs,
        scale * key_scale, value_scale, softcap or 0.0, window or 0,
        NUM_HEADS=num_heads, GROUP=group, K_DIM=k_dim, V_DIM=v_dim, PAGE_SIZE=key_pages.shape[2],
        BLOCK_M=block_m, BLOCK_Q=block_q, BLOCK_N=config.block_n, BLOCK_K=max(power_of_two(k_dim), MIN_DOT_ROWS),
        BLOCK_V=max(power_of_two(v_dim), MIN_DOT_ROWS), SKIPS_SINGLE=skips_single, IS_FP8=is_fp8,
        HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None, HAS_SINKS=sinks is not None,
        PRECISION=config.precision, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
