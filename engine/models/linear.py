"""Linears: a weight goes in, a function comes out. How it is kept and multiplied is the maker's business.

On a CPU with compiled kernels weights are packed, and the originals let go; elsewhere torch's linear serves.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pdserve.core.errors import ConfigError
from pdserve.kernels.cpu import library
from pdserve.kernels.cpu.linear import PackedLinear


class Linear(Protocol):
    """`x [..., in] -> [..., out]`."""

    def __call__(self, x: Tensor, /) -> Tensor: ...

    def rows(self, indices: Tensor, /) -> Tensor:
        """Rows of the weight, `[num_rows, in]`: what an embedding that shares it reads."""
        ...


class MakeLinear(Protocol):
    """Makes a linear from `weight [out, in]` and `bias [out]` or None; the caller lets go of both."""

    def __call__(self, weight: Tensor, bias: Tensor | None, /) -> Linear: ...


class TorchLinear:
    """The linear of torch, which keeps the weight as it is.

    Args:
        weight: `[out, in]`.
        bias: `[out]` or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor, /) -> Tensor:
        """See `Linear`."""
        return F.linear(x, self._weight, self._bias)

    def rows(self, indices: Tensor, /) -> Tensor:
        """See `Linear`."""
        return F.embedding(indices, self._weight)


def linear_maker(quantization: str | None) -> MakeLinear:
    """The linears of fp32 models on this CPU.

    Args:
        quantization: `EngineConfig.quantization`.

    Raises:
        ConfigError: It needs compiled kernels, and there are none.
    """
    if (reason := library.why_not()) is None:
        return PackedLinear.pack if quantization is None else PackedLinear.pack_int8
    if quantization is not None:
        raise ConfigError(f"--quantization is {quantization!r}, which needs the compiled CPU kernels: {reason}")
    return TorchLinear


class _LinearModule(nn.Module):
    """Stands where an `nn.Linear` stood."""

    def __init__(self, linear: Linear, like: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.in_features, self.out_features = like.in_features, like.out_features
        self.bias = like.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    @property
    def weight(self) -> Tensor:
        """A copy, for code that reads it beside the module; slow."""
        return self.linear.rows(torch.arange(self.out_features))


def replace_linears(model: Any, make: MakeLinear) -> None:
    """Puts our linears where a transformers model has torch's, one after the other: no two weights exist twice at once.

    A weight that is another module's too, as a tied head's is, stays in that module.
    Subclasses of torch's linear do something else, and stay.

    Args:
        model: A module in float32 on the CPU; mutated.
        make: Makes the linears.
    """
    for parent in [module for module in model.modules() if type(module) is not nn.Linear]:
        for name in [name for name, child in parent.named_children() if type(child) is nn.Linear]:
            _replace_linear(parent, name, make)


def _replace_linear(parent: nn.Module, name: str, make: MakeLinear) -> None:
    like: nn.Linear = getattr(parent, name)
    setattr(parent, name, _LinearModule(make(like.weight.detach(), like.bias), like))


def count_weights(model: Any) -> tuple[int, int]:
    """Weights that other modules than ours multiply, and those of ours; norms, biases and embeddings not counted.

    Args:
        model: A module after `replace_linears`.
    """
    plain = packed = 0
    for module in model.modules():
        if isinstance(module, _LinearModule):
            packed += module.in_features * module.out_features
        elif not isinstance(module, nn.Embedding):
            plain += sum(p.numel() for p in module.parameters(recurse=False) if p.dim() > 1)
    return plain, packed
