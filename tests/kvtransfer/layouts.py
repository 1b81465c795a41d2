"""KV of a prompt, and pages of any layout made of it element by element: the reference that conversions are held to."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from pdserve.core.layout import KV_DTYPE_BYTES, KVLayout, LayerGroup
from pdserve.kvtransfer.convert import HeadShard
from pdserve.kvtransfer.pool import KvPool

Kv = dict[tuple[int, int, str], Any]
"""(layer, KV head, "k" or "v") -> `[num_tokens, dim]` float32."""
POISON = 0xA5


@st.composite
def layer_groups(draw: st.DrawFn) -> tuple[LayerGroup, ...]:
    """One to three groups of unlike shapes, over layers in any order."""
    num_layers = draw(st.integers(1, 4))
    of_group = [draw(st.integers(0, 2)) for _ in range(num_layers)]
    groups = []
    for index in sorted(set(of_group)):
        layers = tuple(layer for layer, g in enumerate(of_group) if g == index)
        groups.append(LayerGroup(layers, *(draw(st.integers(1, 4)) for _ in range(3))))
    return tuple(groups)


def make_kv(groups: tuple[LayerGroup, ...], num_tokens: int, seed: int = 0) -> Kv:
    """Random KV that float16 can hold."""
    rng = np.random.default_rng(seed)
    return {
        (layer, head, part): rng.standard_normal((num_tokens, dim)).astype(np.float32)
        for g in groups
        for layer in g.layers
        for head in range(g.num_kv_heads)
        for part, dim in (("k", g.k_dim), ("v", g.v_dim))
    }


def in_dtype(values: Any, dtype: str) -> bytes:
    """Bytes of float32 values in a KV dtype, rounded by torch."""
    return torch.from_numpy(values.copy()).to(getattr(torch, dtype)).view(torch.uint8).numpy().tobytes()


def make_pages(kv: Kv, layout: KVLayout, num_tokens: int, first_heads: tuple[int, ...] | None = None) -> list[bytes]:
    """Pages of the prompt, element by element as the layout's definition says; what no token fills is poison."""
    item = KV_DTYPE_BYTES[layout.dtype]
    pages = [bytearray([POISON]) * layout.page_bytes for _ in range(layout.num_pages(num_tokens))]
    for token in range(num_tokens):
        page, slot = divmod(token, layout.page_size)
        at = 0
        for index, g in enumerate(layout.groups):
            first = first_heads[index] if first_heads else 0
            for head in range(g.num_kv_heads):
                for layer in g.layers:
                    for part, dim in (("k", g.k_dim), ("v", g.v_dim)):
                        data = in_dtype(kv[layer, first + head, part][token], layout.dtype)
                        begin = (at + slot * dim) * item
                        pages[page][begin : begin + dim * item] = data
                        at += layout.page_size * dim
        assert at == layout.page_elements
    return [bytes(page) for page in pages]


def poisoned_pool(layout: KVLayout, num_pages: int) -> KvPool:
    """A pool with no byte that a test could take for KV."""
    pool = KvPool(layout, num_pages)
    pool.buffer[:] = bytes([POISON]) * len(pool.buffer)
    return pool


def put(pool: KvPool, page_ids: list[int], pages: list[bytes]) -> None:
    """Writes pages into a pool."""
    for page_id, page in zip(page_ids, pages, strict=True):
        pool.page(page_id)[:] = page


def shards_of(layout: KVLayout, *, page_size: int, dtype: str, cuts: tuple[int, ...]) -> list[HeadShard]:
    """Sources that have each a range of every group's heads, cut at these heads."""
    bounds = [0, *cuts]
    shards = []
    for i, first in enumerate(bounds):
        groups = tuple(
            LayerGroup(g.layers, (bounds[i + 1] if i + 1 < len(bounds) else g.num_kv_heads) - first, g.k_dim, g.v_dim)
            for g in layout.groups
        )
        shards.append(HeadShard(KVLayout(page_size, dtype, groups), (first,) * len(groups)))
    return shards
