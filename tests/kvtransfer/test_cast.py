"""Conversions of KV elements against torch's, over every half-width value and bits of every exponent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pdserve.core.errors import TransferError
from pdserve.kvtransfer.cast import STORAGE, cast

DTYPES = tuple(STORAGE)
MAX = {name: torch.finfo(getattr(torch, name)).max for name in DTYPES}


def samples(dtype: str) -> Any:
    """Every value of a 16-bit type; of float32 bits of every exponent, ties of both narrower types among them."""
    if dtype != "float32":
        return np.arange(1 << 16, dtype=np.uint16).view(STORAGE[dtype])
    bits = np.random.default_rng(1).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    tails = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFF, 0x1000, 0x1001, 0x2000, 0x3000], np.uint32)
    ties = (np.arange(1 << 16, dtype=np.uint32)[:, None] << np.uint32(16)) | tails
    return np.concatenate((bits, ties.ravel())).view(np.float32)


def as_torch(values: Any, dtype: str) -> torch.Tensor:
    return torch.from_numpy(values.copy().view(np.uint8)).view(getattr(torch, dtype))


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_as_torch_does(source: str, target: str) -> None:
    values = samples(source)
    wide = as_torch(values, source).double()
    fits = ~torch.isfinite(wide) | (torch.isfinite(wide.to(getattr(torch, target))))
    values = values[fits.numpy()]
    mine = as_torch(cast(values, source, target), target)
    right = as_torch(values, source).to(getattr(torch, target))
    nan = torch.isnan(right)
    assert torch.equal(torch.isnan(mine), nan)
    width = torch.int32 if target == "float32" else torch.int16
    assert torch.equal(mine.view(width)[~nan], right.view(width)[~nan])  # signs of zeros, too
    assert len(values) > 30_000


@pytest.mark.parametrize(
    ("source", "target"), [("float32", "float16"), ("bfloat16", "float16"), ("float32", "bfloat16")]
)
def test_an_element_that_would_become_infinite_is_refused(source: str, target: str) -> None:
    largest = np.array([MAX[target], -MAX[target], np.inf, -np.inf, 0.0], np.float32)
    values = cast(largest, "float32", source) if source == "float32" else cast(largest[2:], "float32", source)
    cast(values, source, target)
    too_large = torch.tensor([1.0, -MAX[source], float("inf")], dtype=getattr(torch, source))
    bits = too_large.view(torch.uint8).numpy().view(STORAGE[source])
    with pytest.raises(TransferError, match=f"too large for {target}.*--dtype") as e:
        cast(bits, source, target)
    assert e.value.reason == "DTYPE_OVERFLOW"


def test_a_strided_array_is_converted_as_what_it_shows() -> None:
    values = np.arange(24, dtype=np.float32).reshape(4, 6)[::2, 1:4]
    assert cast(cast(values, "float32", "bfloat16"), "bfloat16", "float32").tolist() == values.tolist()
    assert cast(values, "float32", "float32") is values
