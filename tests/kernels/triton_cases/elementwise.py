"""RMSNorm, rotary embedding and SiLU-mul against float64."""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.kernels.fused import rms_norm, rotate, silu_mul
from tests.kernels.triton_cases.device import is_gpu, launch
from tests.kernels.triton_cases.report import Outcome, compare, same

# The interpreter truncates where it makes bfloat16 of float32: twice the error of a GPU.
LIMITS = {torch.float32: 4e-6, torch.float16: 5e-3, torch.bfloat16: 1e-1}
GPU_FLOAT32_LIMIT = 2e-5  # its rsqrt and exp are approximate


def limits() -> list[tuple[torch.dtype, float]]:
    """Types, and the largest error that is accepted of each."""
    return [(t, GPU_FLOAT32_LIMIT if is_gpu() and t is torch.float32 else limit) for t, limit in LIMITS.items()]


def norm() -> list[Outcome]:
    """With and without residual, in place and not, widths that are no powers of two, strided rows."""
    outcomes = []
    for dtype, limit in limits():
        for rows, width in ((3, 576), (2, 64), (2, 4100)):
            rng = torch.Generator().manual_seed(3)
            name = f"{width} {str(dtype).removeprefix('torch.')}"
            x, residual = (torch.randn(rows, width + 16, generator=rng).to(dtype)[:, :width] for _ in range(2))
            weight = torch.randn(width, generator=rng).to(dtype)
            output = torch.full((rows, width), float("nan"), dtype=dtype)
            launch(rms_norm, x, weight, output, epsilon=1e-5)
            outcomes.append(compare(f"norm {name}", output, _norm(x.double(), weight), limit))
            total = (x.double() + residual.double()).to(dtype)
            launch(rms_norm, x, weight, x, epsilon=1e-5, residual=residual)
            outcomes.append(compare(f"norm+residual {name}", x, _norm(total.double(), weight), limit))
            if dtype is not torch.bfloat16:
                outcomes.append(same(f"residual {name}", residual.contiguous(), total))
    return outcomes


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()


def rotary() -> list[Outcome]:
    """In place, heads outermost as the model gives them, some dimensions left alone."""
    outcomes = []
    for dtype, limit in limits():
        for heads, dim, rotary_dim in ((3, 64, 64), (1, 80, 32), (40, 128, 128)):
            rng = torch.Generator().manual_seed(4)
            x = torch.randn(heads, 4, dim, generator=rng).to(dtype).transpose(0, 1)
            positions = torch.tensor([0, 7, 2, 31])
            angles = torch.outer(torch.arange(32.0), torch.rand(rotary_dim // 2, generator=rng))
            before = x.double()
            launch(rotate, x, positions, torch.cat((angles.cos(), angles.sin()), dim=1))
            expected, half = before.clone(), rotary_dim // 2
            turn = torch.polar(torch.ones(()).double(), angles[positions].double())[:, None]
            turned = torch.complex(before[..., :half], before[..., half:rotary_dim]) * turn
            expected[..., :half], expected[..., half:rotary_dim] = turned.real, turned.imag
            outcomes.append(compare(f"rotary {dim} {str(dtype).removeprefix('torch.')}", x, expected, limit))
    return outcomes


def silu() -> list[Outcome]:
    """Wider than one block; gates far from zero."""
    outcomes = []
    for dtype, limit in limits():
        for width in (96, 2100):
            rng = torch.Generator().manual_seed(5)
            gate_up = (torch.randn(3, 2 * width, generator=rng) * 2).to(dtype)
            gate_up[0, :3] = torch.tensor([80.0, -80.0, torch.finfo(dtype).min])
            gate_up[0, width : width + 3] = 1.0
            output = torch.full((3, width), float("nan"), dtype=dtype)
            launch(silu_mul, gate_up, output)
            gate, up = gate_up.double().chunk(2, dim=1)
            expected = gate / (1 + (-gate).exp()) * up
            scale = expected.abs().clamp(min=1.0)
            outcomes.append(
                compare(f"silu {width} {str(dtype).removeprefix('torch.')}", output / scale, expected / scale, limit)
            )
    return outcomes
