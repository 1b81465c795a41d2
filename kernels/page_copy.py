"""Gathers, scatters and copies whole pages, or the same column range of each (some layers' or KV heads' bytes).

A pool is `[num_pages, page_elements]` in any dtype; rows may be strided, so `pool[:, a:b]` moves a part of each page.
Where an index is -1 (padding) nothing moves. Nothing is converted.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK_BYTES = 8192  # what one program moves


@triton.jit
def _move_rows(
    source, target, source_rows, target_rows, source_stride, target_stride, num_elements,
    HAS_SOURCE_ROWS: tl.constexpr, HAS_TARGET_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    source_row = index
    target_row = index
    if HAS_SOURCE_ROWS:
        source_row = tl.load(source_rows + index).to(tl.int64)
    if HAS_TARGET_ROWS:
        target_row = tl.load(target_rows + index).to(tl.int64)
    if source_row >= 0 and target_row >= 0:
        at = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = at < num_elements
        value = tl.load(source + source_row * source_stride + at, mask=mask)
        tl.store(target + target_row * target_stride + at, value, mask=mask)


def gather_pages(pool: Tensor, pages: Tensor, staged: Tensor) -> None:
    """`staged[i] = pool[pages[i]]`.

    Args:
        pool: `[num_pages, num_elements]`, rows contiguous.
        pages: `[n]` page ids.
        staged: `[n, num_elements]` of the same dtype, rows contiguous; written.
    """
    _launch(pool, staged, pages, None, pages.shape[0])


def scatter_pages(staged: Tensor, pages: Tensor, pool: Tensor) -> None:
    """`pool[pages[i]] = staged[i]`; arguments as in `gather_pages`, page ids distinct, the pool is written."""
    _launch(staged, pool, None, pages, pages.shape[0])


def copy_pages(pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    """`pool[targets[i]] = pool[sources[i]]`; targets are distinct and none is a source."""
    _launch(pool, pool, sources, targets, sources.shape[0])


def _launch(
    source: Tensor, target: Tensor, source_rows: Tensor | None, target_rows: Tensor | None, num_rows: int
) -> None:
    block = _BLOCK_BYTES // source.element_size()
    num_elements = source.shape[1]
    _move_rows[num_rows, -(-num_elements // block)](
        source, target, source if source_rows is None else source_rows, target if target_rows is None else target_rows,
        source.stride(0), target.stride(0), num_elements,
        HAS_SOURCE_ROWS=source_rows is not None, HAS_TARGET_ROWS=target_rows is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip
