"""Fused elementwise kernels of the lean path: RMSNorm with residual, rotary embedding, SiLU-mul.

They compute in float32 and round to the tensor's dtype where transformers' modules do in the norm (after the
residual sum and before the weight); rotary and SiLU round once, at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.configs import power_of_two


@triton.jit
def _rms_norm(
    x, residual, weight, output, x_stride, residual_stride, output_stride, epsilon, NUM_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < NUM_COLUMNS
    dtype = x.dtype.element_ty
    value = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual_at = residual + row * residual_stride + columns
        value += tl.load(residual_at, mask=mask, other=0.0).to(tl.float32)
        value = value.to(dtype)
        tl.store(residual_at, value, mask=mask)
        value = value.to(tl.float32)
    variance = tl.sum(value * value, 0) / NUM_COLUMNS
    normed = (value * tl.rsqrt(variance + epsilon)).to(dtype).to(tl.float32)
    factor = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(output + row * output_stride + columns, (normed * factor).to(dtype), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, output: Tensor, *, epsilon: float, residual: Tensor | None = None) -> None:
    """`output = weight * rms_normalised(x + residual)`; the sum replaces the residual.

    Args:
        x: `[num_rows, num_columns]`, rows contiguous.
        weight: `[num_columns]`.
        output: Like `x`, may be `x`; written.
        epsilon: Added to the mean square.
        residual: Like `x`; mutated. None: the norm of `x` alone.
    """
    num_rows, num_columns = x.shape
    block = power_of_two(num_columns)
    some_residual = x if residual is None else residual
    _rms_norm[num_rows,](
        x, some_residual, weight, output, x.stride(0), some_residual.stride(0), output.stride(0), epsilon,
        NUM_COLUMNS=num_columns, BLOCK=block, HAS_RESIDUAL=residual is not None,
        num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip


@triton.jit
def _rotate(
    x, positions, table, stride_token, stride_head, table_stride,
    NUM_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HALF
    position = tl.load(positions + token).to(tl.int64)
    cosine = tl.load(table + position * table_stride + dims, mask=is_dim, other=0.0)[None, :]
    sine = tl.load(table + position * table_stride + HALF + dims, mask=is_dim, other=0.0)[None, :]
    first_at = x + token * stride_token + heads[:, None].to(tl.int64) * stride_head + dims[None, :]
    second_at = first_at + HALF
    mask = (heads < NUM_HEADS)[:, None] & is_dim[None, :]
    first = tl.load(first_at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(second_at, mask=mask, other=0.0).to(tl.float32)
    dtype = x.dtype.element_ty
    tl.store(first_at, (first * cosine - second * sine).to(dtype), mask=mask)
    tl.store(second_at, (second * cosine + first * sine).to(dtype), mask=mask)


def rotate(x: Tensor, positions: Tensor, table: Tensor) -> None:
    """Rotary embedding in place, dimension i paired with i + rotary_dim / 2.

    Args:
        x: `[num_tokens, num_heads, head_dim]`, last dimension contiguous; its first `rotary_dim` elements are mutated.
        positions: `[num_tokens]` rows of the table; padded rows name any valid one.
        table: `[max_positions, rotary_dim]` float32: cosines, then sines, of the angles of each position.
    """
    num_tokens, num_heads, _ = x.shape
    half = table.shape[1] // 2
    block_d = power_of_two(half)
    block_h = min(power_of_two(num_heads), max(1, 2048 // block_d))
    _rotate[num_tokens, -(-num_heads // block_h)](
        x, positions, table, x.stride(0), x.stride(1), table.stride(0),
        NUM_HEADS=num_heads, HALF=half, BLOCK_H=block_h, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip


@triton.jit
def _silu_mul(gate_up, output, gate_up_stride, output_stride, NUM_COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < NUM_COLUMNS
    gate = tl.load(gate_up + row * gate_up_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_up_stride + NUM_COLUMNS + columns, mask=mask, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(output + row * output_stride + columns, value.to(output.dtype.element_ty), mask=mask)


def silu_mul(gate_up: Tensor, output: Tensor) -> None:
    """`output = silu(gate) * up`.

    Args:
        gate_up: `[num_tokens, 2 * num_columns]`, gate columns first, rows contiguous.
        output: `[num_tokens, num_columns]`, rows contiguous; written.
    """
    num_tokens, num_columns = output.shape
    block = min(power_of_two(num_columns), 2048)
    _silu_mul[num_tokens, -(-num_columns // block)](
        gate_up, output, gate_up.stride(0), output.stride(0), NUM_COLUMNS=num_columns, BLOCK=block, num_warps=4
    )
