"""Views of pool memory as tensors. The pool is plain bytes that somebody else may own; nothing is copied here."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pdserve.core.errors import ConfigError
from pdserve.core.layout import KVLayout

if TYPE_CHECKING:
    from torch import Tensor


class PoolMemory(Protocol):
    """Memory for KV pages."""

    @property
    def buffer(self) -> memoryview:
        """Writable bytes, `num_pages * layout.page_bytes`."""
        ...


class PlainPool:
    """Anonymous memory of this process alone, zeroed; pages are backed when first written. A forked process has a copy.

    Args:
        layout: Layout of the pages.
        num_pages: Pages.

    Raises:
        ConfigError: The system has no such memory to give.
    """

    def __init__(self, layout: KVLayout, num_pages: int) -> None:
        size = layout.page_bytes * num_pages
        try:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as e:
            raise ConfigError(
                f"the system has no {size} bytes for KV pages; lower --kv-cache-memory-bytes, --num-pages or "
                "--swap-space-bytes"
            ) from e
        self._buffer = memoryview(memory)

    @property
    def buffer(self) -> memoryview:
        """See `PoolMemory`."""
        return self._buffer


class LayerPages(NamedTuple):
    """Pages of one layer.

    Attributes:
        keys: `[num_pages, num_kv_heads, page_size, k_dim]`.
        values: `[num_pages, num_kv_heads, page_size, v_dim]`.
    """

    keys: Tensor
    values: Tensor


def layer_views(layout: KVLayout, num_pages: int, buffer: memoryview) -> dict[int, LayerPages]:
    """Strided tensors over a pool, `[page][kv_head][layer][K|V][token][dim]` per layer group.

    Args:
        layout: The layout.
        num_pages: Pages in the pool.
        buffer: Writable bytes of the pool; kept alive by the tensors.

    Returns:
        Views by model layer index; writing to them writes the pool.
    """
    import torch

    return views_of(
        layout, torch.frombuffer(buffer, dtype=getattr(torch, layout.dtype), count=num_pages * layout.page_elements)
    )


def views_of(layout: KVLayout, flat: Tensor) -> dict[int, LayerPages]:
    """`layer_views` over a tensor, on whatever device.

    Args:
        layout: The layout.
        flat: `[num_pages * layout.page_elements]` of `layout.dtype`.
    """
    num_pages = flat.shape[0] // layout.page_elements
    size = layout.page_size
    views = {}
    for group, group_at in zip(layout.groups, layout.group_offsets, strict=True):
        per_layer = (group.k_dim + group.v_dim) * size
        head_stride = per_layer * len(group.layers)
        for i, layer in enumerate(group.layers):
            keys_at = group_at + i * per_layer
            values_at = keys_at + group.k_dim * size
            strides = (layout.page_elements, head_stride)
            shape = (num_pages, group.num_kv_heads, size)
            views[layer] = LayerPages(
                flat.as_strided((*shape, group.k_dim), (*strides, group.k_dim, 1), keys_at),
                flat.as_strided((*shape, group.v_dim), (*strides, group.v_dim, 1), values_at),
            )
    return views
