"""Our attention inside transformers' modules.

`register()` names `attend` in transformers' attention interface; a model set to that name calls it in every layer,
after rope, with the keyword argument that the caller of the model passed: the `AttentionContext` of this forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from pdserve.engine.forward_batch import ForwardBatch
from pdserve.engine.kv_cache import LayerPages
from pdserve.kernels.dispatch import Kernels

ATTENTION_NAME = "pdserve_paged"

_WITHOUT_EFFECT = {
    "cache",
    "cache_position",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "deterministic",
    "dropout",
    "max_length_k",
    "max_length_q",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_ids",
    "return_dict",
    "use_cache",
}
"""What layers pass beside the arguments of `attend`, and what may be ignored: it does not change the answer here."""


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
class LayerFacts:
    """What a layer says when it calls.

    Attributes:
        kv_shape: (num_kv_heads, k_dim, v_dim).
        window: Its sliding window, or None.
        softcap: Its softcap, or None.
    """

    kv_shape: tuple[int, int, int]
    window: int | None
    softcap: float | None


@dataclass(frozen=True, slots=True)
class LayerRecorder:
    """Notes which layers call and what they say; answers zeros.

    Attributes:
        calls: Layer of each call, in order.
        layers: What each layer said last.
    """

    calls: list[int] = field(default_factory=list)
    layers: dict[int, LayerFacts] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """See `AttentionContext`."""
        self.calls.append(layer)
        self.layers[layer] = LayerFacts((key.shape[1], key.shape[2], value.shape[2]), options.window, options.softcap)
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
    is_causal: bool | None = None,
    pdserve: AttentionContext | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """What transformers calls: one sequence `[1, heads, num_tokens, dim]` in, `[1, num_tokens, heads, dim]` out.

    Raises:
        ValueError: The layer asks for something that would be ignored.
    """
    if pdserve is None:
        raise ValueError("its layers do not pass our attention through")
    if attention_mask is not None:
        raise ValueError("its layers bring a mask of their own")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ValueError("its attention is not causal")
    ignored = sorted(name for name, value in others.items() if value is not None and name not in _WITHOUT_EFFECT)
    if ignored:
        raise ValueError(f"its layers ask for {', '.join(ignored)}, which we do not have")
    if key.shape[2] != query.shape[2]:
        raise ValueError("its layers attend over more than the tokens that they are given")
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
