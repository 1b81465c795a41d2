"""What a case returns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Outcome:
    """Largest error of one comparison and what it may be."""

    label: str
    error: float
    limit: float

    @property
    def is_good(self) -> bool:
        """False for NaN too."""
        return self.error <= self.limit


def compare(label: str, actual: Tensor, expected: Tensor, limit: float) -> Outcome:
    """Largest absolute difference; NaN where either one is NaN."""
    return Outcome(label, float((actual.double() - expected.double()).abs().max()), limit)


def same(label: str, actual: Tensor, expected: Tensor) -> Outcome:
    """Bytes that differ."""
    import torch

    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    return Outcome(label, float((actual.view(bits) != expected.view(bits)).sum()), 0.0)
