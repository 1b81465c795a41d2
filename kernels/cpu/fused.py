"""Elementwise kernels of the lean path, compiled: fp32 in ordinary strides; all else goes to the torch reference."""

from __future__ import annotations

from ctypes import c_float, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pdserve.kernels import reference_fused
from pdserve.kernels.cpu import library
from pdserve.kernels.cpu.arguments import are_rows, require


@cache
def _function(name: str, num_pointers: int, num_integers: int, *rest: Any) -> Any:
    function = library.load()[name]
    function.argtypes = [c_void_p] * num_pointers + [c_int64] * num_integers + list(rest)
    return function


def rms_norm(x: Tensor, weight: Tensor, output: Tensor, *, epsilon: float, residual: Tensor | None = None) -> None:
    """As `reference_fused.rms_norm`.

    Raises:
        ValueError: Shapes do not fit together.
    """
    if not are_rows(x, weight, output) or (residual is not None and not are_rows(residual)) or x.dim() != 2:
        return reference_fused.rms_norm(x, weight, output, epsilon=epsilon, residual=residual)
    num_rows, num_columns = x.shape
    require(
        weight.shape == (num_columns,) and output.shape == x.shape and (residual is None or residual.shape == x.shape),
        "rows, weight, output and residual",
    )
    _function("pdserve_rms_norm", 4, 5, c_float)(
        x.data_ptr(), weight.data_ptr(), output.data_ptr(), None if residual is None else residual.data_ptr(),
        num_rows, num_columns, x.stride(0), output.stride(0), 0 if residual is None else residual.stride(0), epsilon,
    )  # fmt: skip
    return None


def rotate(x: Tensor, positions: Tensor, table: Tensor) -> None:
    """As `reference_fused.rotate`.

    Raises:
        ValueError: Shapes do not fit together.
        IndexError: The table has no row for a position; nothing was written.
    """
    if not are_rows(x, table) or positions.dtype is not torch.int64 or positions.stride(0) != 1:
        return reference_fused.rotate(x, positions, table)
    num_tokens, num_heads, head_dim = x.shape
    num_positions, rotary_dim = table.shape
    require(
        positions.shape == (num_tokens,) and rotary_dim <= head_dim and rotary_dim % 2 == 0,
        "heads, positions and table",
    )
    if _function("pdserve_rotate", 3, 7)(
        x.data_ptr(), positions.data_ptr(), table.data_ptr(),
        num_tokens, num_heads, rotary_dim // 2, x.stride(0), x.stride(1), num_positions, table.stride(0),
    ):  # fmt: skip
        raise IndexError(f"positions must be below {num_positions}, the rows of the table")
    return None


def silu_mul(gate_up: Tensor, output: Tensor) -> None:
    """As `reference_fused.silu_mul`.

    Raises:
        ValueError: Shapes do not fit together.
    """
    if not are_rows(gate_up, output):
        return reference_fused.silu_mul(gate_up, output)
    num_rows, num_columns = output.shape
    require(gate_up.shape == (num_rows, 2 * num_columns), "gate, up and output")
    _function("pdserve_silu_mul", 2, 4)(
        gate_up.data_ptr(), output.data_ptr(), num_rows, num_columns, gate_up.stride(0), output.stride(0)
    )
    return None
