"""What the wrappers check before C reads a pointer."""

from __future__ import annotations

import torch
from torch import Tensor


def are_rows(*tensors: Tensor) -> bool:
    """Whether the kernels read them: fp32 in this memory, last dimension contiguous."""
    return all(t.is_cpu and t.dtype is torch.float32 and t.stride(-1) == 1 for t in tensors)


def are_indices(*tensors: Tensor) -> bool:
    """Whether the kernels read them: int64 in this memory, last dimension contiguous."""
    return all(t.is_cpu and t.dtype is torch.int64 and t.stride(-1) == 1 for t in tensors)


def require(fits: bool, what: str) -> None:
    """Refuses shapes.

    Args:
        fits: False refuses.
        what: Whose shapes they are.

    Raises:
        ValueError: They do not fit together.
    """
    if not fits:
        raise ValueError(f"shapes of {what} do not fit together")
