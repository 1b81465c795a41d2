"""Our attention inside transformers' modules.

`register()` names `attend` in transformers' attention interface; a model set to that name calls it in every layer,
after rope, with the keyword argument that the caller of the model passed: the `AttentionContext` of this forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from pdserve.core.errors import ConfigError
from pdserve.engine.forward_batch import ForwardBatch
from pdserve.engine.kv_cache import LayerPages
from pdserve.kernels.dispatch import Kernels

ATTENTION_NAME = "pdserve_paged"


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What a layer says about its attention; see `kernels.reference.paged_attention`."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


class AttentionContext(Protocol):
    """One forward pass, asked by each layer in turn."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Attention of one layer.

        Args:
            layer: Model layer index.
            query: `[num_tokens, num_heads, k_dim]`.
            key: `[num_tokens, num_kv_heads, k_dim]`, new tokens.
            value: `[num_tokens, num_kv_heads, v_dim]`, new tokens.
            options: The layer's options.

        Returns:
            `[num_tokens, num_heads, v_dim]`.
        """
        ...


@dataclass(frozen=True, slots=True)
class PagedContext:
    """Stores new KV in pages and attends over the pages."""

    batch: ForwardBatch
    pages: dict[int, LayerPages]
    kernels: Kernels

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """See `AttentionContext`."""
        keys, values = self.pages[layer]
        self.kernels.store_kv(key, value, keys, values, self.batch.slots)
        return self.kernels.paged_attention(
            query,
            keys,
            values,
            self.batch.page_tables,
            self.batch.query_starts,
            self.batch.kv_lens,
            scale=options.scale,
            window=options.window,
            softcap=options.softcap,
            sinks=options.sinks,
        )


@dataclass(frozen=True, slots=True)
class ShapeRecorder:
    """Notes which layers call and the shape of their KV; answers zeros.

    Attributes:
        shapes: Layer -> (num_kv_heads, k_dim, v_dim).
    """

    shapes: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """See `AttentionContext`."""
        self.shapes[layer] = (key.shape[1], key.shape[2], value.shape[2])
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])


def register() -> None:
    """Names our attention in transformers' interface. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, attend)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    pdserve: AttentionContext | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """What transformers calls: one sequence `[1, heads, num_tokens, dim]` in, `[1, num_tokens, heads, dim]` out."""
    if pdserve is None or attention_mask is not None:
        raise ConfigError("this model's layers do not pass our attention through; it cannot be served")
    options = AttentionOptions(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    layer: int = module.layer_idx  # type: ignore[assignment]
    query, key, value = (t[0].transpose(0, 1) for t in (query, key, value))
    out = pdserve.attend(layer, query, key, value, options)
    return out[None], None
