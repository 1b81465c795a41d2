"""Torch reference of the lean path's elementwise kernels: the oracle of the others, and what serves where none is."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, output: Tensor, *, epsilon: float, residual: Tensor | None = None) -> None:
    """`output = weight * rms_normalised(x + residual)`; the sum replaces the residual.

    Computed in float32, rounded to the tensors' type after the sum and before the weight.

    Args:
        x: `[num_rows, num_columns]`.
        weight: `[num_columns]`.
        output: Like `x`, may be `x`; written.
        epsilon: Added to the mean square.
        residual: Like `x`; mutated. None: the norm of `x` alone.
    """
    if residual is not None:
        x = residual.add_(x)
    value = x.float()
    normed = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + epsilon)
    output.copy_(weight * normed.to(output.dtype))


def rotate(x: Tensor, positions: Tensor, table: Tensor) -> None:
    """Rotary embedding in place, dimension i paired with i + rotary_dim / 2.

    Args:
        x: `[num_tokens, num_heads, head_dim]`; its first `rotary_dim` elements are mutated.
        positions: `[num_tokens]` int64 rows of the table.
        table: `[max_positions, rotary_dim]` float32: cosines, then sines, of the angles of each position.
    """
    half = table.shape[1] // 2
    cosine, sine = table[positions][:, None].chunk(2, dim=-1)
    first, second = x[..., :half], x[..., half : 2 * half]
    rotated = first * cosine - second * sine
    second.copy_(second * cosine + first * sine)
    first.copy_(rotated)


def silu_mul(gate_up: Tensor, output: Tensor) -> None:
    """`output = silu(gate) * up`, computed in float32.

    Args:
        gate_up: `[num_tokens, 2 * num_columns]`, gate columns first.
        output: `[num_tokens, num_columns]`; written.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    output.copy_(F.silu(gate) * up)
