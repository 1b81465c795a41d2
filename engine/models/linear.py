"""Linears: a weight goes in, a function comes out. How it is kept and multiplied is the maker's business."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.nn import functional as F


class Linear(Protocol):
    """`x [..., in] -> [..., out]`."""

    def __call__(self, x: Tensor, /) -> Tensor: ...


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
