"""Inputs of attention cases in pages of the real layout; whatever a kernel must not read is NaN."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pdserve.core.layout import KVLayout, LayerGroup
from pdserve.engine.kv_cache import LayerPages, layer_views
from tests.kernels.naive import Case, Inputs

LAYER = 3
NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def layout_of(case: Case, dtype: torch.dtype) -> KVLayout:
    """Four layers in two groups; `LAYER` is in the second place of the second group."""
    groups = (LayerGroup((0, 2), 1, 16, 16), LayerGroup((1, LAYER), case.num_kv_heads, case.k_dim, case.v_dim))
    return KVLayout(case.page_size, NAMES[dtype], groups)


def poisoned_pages(layout: KVLayout, num_pages: int) -> tuple[bytearray, LayerPages]:
    """A pool full of NaN, and the views of `LAYER`."""
    memory = bytearray(b"\xff" * (layout.page_bytes * num_pages))
    return memory, layer_views(layout, num_pages, memoryview(memory))[LAYER]


def as_fp8(views: LayerPages, layout: KVLayout, num_pages: int) -> LayerPages:
    """Views of the same strides over new float8 memory, full of NaN."""
    flat = torch.full((num_pages * layout.page_elements,), 0xFF, dtype=torch.uint8).view(torch.float8_e4m3fn)
    keys, values = (flat.as_strided(v.shape, v.stride(), v.storage_offset()) for v in views)
    return LayerPages(keys, values)


def make_inputs(case: Case, dtype: torch.dtype, seed: int, *, fp8: bool = False) -> Inputs:
    """Random inputs with all KV stored, pages in random order. `keys` and `values` hold what is stored, exactly.

    Nobody owns page 0, where kernels may point but not read. A sequence of length 0 is a padded row: it owns no pages,
    its table is zeros.
    """
    rng = torch.Generator().manual_seed(seed)
    layout = layout_of(case, dtype)
    needed = [layout.num_pages(n) for n in case.kv_lens]
    num_pages = sum(needed) + 2
    order = (torch.randperm(num_pages - 1, generator=rng) + 1).tolist()
    _, views = poisoned_pages(layout, num_pages)
    if fp8:
        views = as_fp8(views, layout, num_pages)
    stored = views.keys.dtype
    tables = torch.zeros(len(needed), max(max(needed), 1) + 1, dtype=torch.int64)
    keys, values = [], []
    for i, n in enumerate(case.kv_lens):
        pages = torch.tensor([order.pop() for _ in range(needed[i])], dtype=torch.int64)
        if n:
            tables[i].fill_(10**9)
            tables[i, : len(pages)] = pages
        at, offsets = pages.repeat_interleave(case.page_size)[:n], torch.arange(n) % case.page_size
        for dim, view, kept in ((case.k_dim, views.keys, keys), (case.v_dim, views.values, values)):
            new = torch.randn(n, case.num_kv_heads, dim, generator=rng).to(stored)
            _bits(view)[at, :, offsets] = _bits(new)
            kept.append(new.float())
    starts = torch.tensor([0, *case.num_new]).cumsum(0)
    query = torch.randn(int(starts[-1]), case.num_heads, case.k_dim, generator=rng).to(dtype)
    sinks = torch.randn(case.num_heads, generator=rng).to(dtype) if case.sinks else None
    lens = torch.tensor(case.kv_lens)
    return Inputs(query, keys, values, views.keys, views.values, tables, starts, lens, torch.empty(0), sinks)


def tensors_of(inputs: Inputs) -> tuple[Tensor, ...]:
    """The tensors that every attention kernel begins with."""
    return (
        inputs.query, inputs.key_pages, inputs.value_pages, inputs.page_tables, inputs.query_starts, inputs.kv_lens,
    )  # fmt: skip


def _bits(tensor: Tensor) -> Tensor:
    """float8 as bytes, which can be indexed; other dtypes as they are."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def e4m3(x: Tensor) -> Tensor:
    """float8_e4m3fn: rounded to nearest; large numbers become 448, and what is not finite NaN."""
    wide = x.float()
    limited = torch.where(wide.isfinite(), wide.clamp(-448.0, 448.0), torch.full_like(wide, math.nan).copysign(wide))
    return limited.to(torch.float8_e4m3fn)
