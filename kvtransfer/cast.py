"""KV elements from one dtype to another, rounded to nearest, ties to even. numpy has no bfloat16: its bits are kept."""

from __future__ import annotations

from typing import Any

import numpy as np

from pdserve.core.errors import TransferError

Array = np.ndarray[Any, np.dtype[Any]]

STORAGE: dict[str, type[np.generic]] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
"""numpy's type of each KV dtype's elements in memory."""


def cast(values: Array, source: str, target: str) -> Array:
    """Converts elements.

    Args:
        values: `STORAGE[source]`, any shape.
        source: A key of `STORAGE`.
        target: A key of `STORAGE`.

    Returns:
        `STORAGE[target]` of the same shape; `values` itself where nothing changes. NaN and infinity stay what they are.

    Raises:
        TransferError: A finite element is too large for `target`; as infinity it would turn every output into NaN.
    """
    if source == target:
        return values
    wide = _from_bfloat16(values) if source == "bfloat16" else values.astype(np.float32)
    if target == "float32":
        return wide
    if target == "bfloat16":
        narrow = _to_bfloat16(wide)
        num_infinite = np.count_nonzero((narrow & np.uint16(0x7FFF)) == 0x7F80)
    else:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            narrow = wide.astype(np.float16)
        num_infinite = np.count_nonzero(np.isinf(narrow))
    if num_infinite and num_infinite > np.count_nonzero(np.isinf(wide)):
        raise TransferError(
            f"KV has elements of magnitude {np.abs(wide[np.isfinite(wide)]).max():g}, too large for {target}: give the "
            "decode worker the prefill worker's --dtype",
            reason="DTYPE_OVERFLOW",
        )
    return narrow


def _from_bfloat16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _to_bfloat16(values: Array) -> Array:
    bits = np.ascontiguousarray(values).view(np.uint32)
    kept = bits >> np.uint32(16)
    # Half of the last kept place, or just less where that place is even. It may carry into the exponent, as it should.
    rounded = (bits + (np.uint32(0x7FFF) + (kept & np.uint32(1)))) >> np.uint32(16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(nan, kept | np.uint32(0x40), rounded).astype(np.uint16)  # a NaN's low bits may be all it has
