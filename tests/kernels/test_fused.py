"""The lean path's elementwise kernels that this machine would use, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdserve.kernels.dispatch import FusedKernels, fused_for
from pdserve.kernels.reference_fused import rms_norm, rotate, silu_mul

REFERENCE = FusedKernels(rms_norm, rotate, silu_mul)
CHOSEN = fused_for(torch.device("cpu"))
EACH = pytest.mark.parametrize("kernels", [REFERENCE, CHOSEN], ids=["reference", "chosen"])


def strided(rows: int, columns: int, seed: int, unused: int = 3) -> Tensor:
    """Random rows that lie apart; what lies between is NaN."""
    torch.manual_seed(seed)
    wide = torch.full((rows, columns + unused), math.nan)
    wide[:, :columns] = torch.randn(rows, columns)
    return wide[:, :columns]


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got.double(), expected, atol=2e-6, rtol=2e-6)


@EACH
@settings(max_examples=30)
@given(
    rows=st.integers(0, 40),
    columns=st.integers(1, 40) | st.sampled_from([576, 1000]),
    has_residual=st.booleans(),
    in_place=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_norm(kernels: FusedKernels, rows: int, columns: int, has_residual: bool, in_place: bool, seed: int) -> None:
    x, residual, weight = strided(rows, columns, seed), strided(rows, columns, seed + 1), torch.randn(columns)
    value = x.double() + residual.double() if has_residual else x.double()
    expected = value * (value.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    output = x if in_place else torch.full((rows, columns), math.nan)
    before = residual.clone()
    kernels.rms_norm(x, weight, output, epsilon=1e-5, residual=residual if has_residual else None)
    close(output, expected)
    close(residual, value if has_residual else before.double())


@EACH
@settings(max_examples=30)
@given(
    tokens=st.integers(0, 20),
    heads=st.integers(1, 4),
    half=st.integers(1, 20) | st.just(32),
    rest=st.sampled_from([0, 5]),
    seed=st.integers(0, 1000),
)
def test_rotation(kernels: FusedKernels, tokens: int, heads: int, half: int, rest: int, seed: int) -> None:
    width = 2 * half + rest
    x = strided(tokens, (heads + 1) * width, seed).unflatten(1, (heads + 1, width))[:, :heads]
    positions = torch.randperm(50)[:tokens]
    angles = torch.rand(50, half, dtype=torch.float64) * 6
    a, b = x[..., :half].double(), x[..., half : 2 * half].double()
    c, s = angles[positions].cos()[:, None], angles[positions].sin()[:, None]
    expected = torch.cat((a * c - b * s, b * c + a * s, x[..., 2 * half :].double()), dim=-1)
    kernels.rotate(x, positions, torch.cat((angles.cos(), angles.sin()), dim=-1).float())
    close(x, expected)


@EACH
@settings(max_examples=30)
@given(rows=st.integers(0, 30), columns=st.integers(1, 40) | st.just(1536), seed=st.integers(0, 1000))
def test_gating(kernels: FusedKernels, rows: int, columns: int, seed: int) -> None:
    gate_up = strided(rows, 2 * columns, seed).mul_(4)
    gate, up = gate_up.double().chunk(2, dim=-1)
    output = torch.full((rows, columns), math.nan)
    kernels.silu_mul(gate_up, output)
    close(output, gate * torch.sigmoid(gate) * up)


@EACH
def test_gating_of_extreme_values(kernels: FusedKernels) -> None:
    gate_up = torch.tensor([[-1e4, -100.0, 1e4, 0.0, math.nan, 1.0, 1.0, 1.0, 1.0, 1.0]])
    output = torch.empty(1, 5)
    kernels.silu_mul(gate_up, output)
    torch.testing.assert_close(output, torch.tensor([[0.0, 0.0, 1e4, 0.0, math.nan]]), equal_nan=True)


@EACH
def test_a_gate_far_below_zero_closes(kernels: FusedKernels) -> None:
    gates = [-89.0, -1e4, -1e30, -1e33, -1e36, -torch.finfo(torch.float32).max]
    output = torch.full((1, len(gates)), math.nan)
    kernels.silu_mul(torch.tensor([[*gates, *[1000.0] * len(gates)]]), output)
    assert output.abs().max() < 1e-30


@EACH
def test_a_row_does_not_depend_on_the_others(kernels: FusedKernels) -> None:
    x, weight = strided(300, 576, 0), torch.randn(576)
    whole, alone = torch.empty(300, 576), torch.empty(1, 576)
    kernels.rms_norm(x, weight, whole, epsilon=1e-5)
    kernels.rms_norm(x[200:201], weight, alone, epsilon=1e-5)
    assert torch.equal(whole[200:201], alone)


@EACH
def test_rows_without_values(kernels: FusedKernels) -> None:
    nothing = torch.empty(3, 0)
    kernels.rms_norm(nothing, nothing[0], torch.empty(3, 0), epsilon=1e-5, residual=torch.empty(3, 0))
    kernels.silu_mul(nothing, torch.empty(3, 0))
    x = torch.randn(3, 2, 4)
    before = x.clone()
    kernels.rotate(x, torch.tensor([0, 1, 4]), torch.empty(5, 0))
    kernels.rotate(x[:, :0], torch.tensor([0, 1, 4]), torch.randn(5, 4))
    assert torch.equal(x, before)
