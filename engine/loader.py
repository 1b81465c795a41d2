"""Loads a transformers model with our attention in every layer, or refuses it.

A model that ignores our attention would answer wrongly without an error: a warm-up pass must see every layer call it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

from pdserve.core.errors import ConfigError
from pdserve.core.hashing import identity_digest
from pdserve.core.layout import DTYPE_BYTES, KVLayout, LayerGroup
from pdserve.engine import attention
from pdserve.engine.model_store import weights_digest
from pdserve.engine.progress import Progress, SilentProgress

KV_VERSION = 1
"""Raise it when equal models would write other KV than before: workers of both sides must not mix."""

_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}
_IDENTITY_CONFIG = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope_parameters",
    "sliding_window",
    "layer_types",
    "attn_logit_softcapping",
    "query_pre_attn_scalar",
)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        model: transformers' causal LM: eval mode, our attention.
        dtype: Weights and KV: a key of `DTYPE_BYTES`.
        kv_shapes: Per layer (num_kv_heads, k_dim, v_dim), in layer order.
        max_model_len: Positions that the model knows; None when it does not say.
        vocab_size: Rows of the output head.
        eos_token_ids: End-of-sequence tokens.
        identity: Facts that must be equal on all workers of a pool.
    """

    model: Any  # transformers' classes are untyped
    dtype: str
    kv_shapes: tuple[tuple[int, int, int], ...]
    max_model_len: int | None
    vocab_size: int
    eos_token_ids: frozenset[int]
    identity: dict[str, str | int]

    def layout(self, page_size: int) -> KVLayout:
        """KV layout: one group per distinct KV shape, in order of its first layer."""
        layers: dict[tuple[int, int, int], list[int]] = {}
        for layer, shape in enumerate(self.kv_shapes):
            layers.setdefault(shape, []).append(layer)
        return KVLayout(page_size, self.dtype, tuple(LayerGroup(tuple(ls), *shape) for shape, ls in layers.items()))

    def identity_digest(self, model_name: str) -> bytes:
        """Digest of `identity` and the served name."""
        return identity_digest({**self.identity, "model": model_name})


def load_model(directory: Path, dtype: str = "auto", progress: Progress | None = None) -> LoadedModel:
    """Loads a model onto the CPU.

    Args:
        directory: See `model_store.resolve_model`.
        dtype: "auto" (float32) or a key of `DTYPE_BYTES`.
        progress: Told about long steps.

    Raises:
        ConfigError: The directory cannot be read, or the model cannot be served.
    """
    progress = progress or SilentProgress()
    dtype = "float32" if dtype == "auto" else dtype
    assert dtype in DTYPE_BYTES, dtype
    digest = weights_digest(directory, progress)
    transformers.utils.logging.disable_progress_bar()
    progress.begin("loading the model")
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=getattr(torch, dtype), local_files_only=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as e:
        what = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise ConfigError(f"cannot load the model in {directory}: {what}") from e
    loaded = prepare_model(model, dtype, digest)
    progress.end()
    return loaded


def prepare_model(model: Any, dtype: str, weights: str) -> LoadedModel:
    """Puts our attention into a model and reads what the engine needs to know of it.

    Args:
        model: A transformers causal LM in `dtype`; mutated.
        dtype: A key of `DTYPE_BYTES`.
        weights: Digest of the weights.

    Raises:
        ConfigError: The model cannot be served.
    """
    config = model.config.get_text_config()
    shapes = _install_attention(model, config)
    eos = model.generation_config.eos_token_id if model.generation_config is not None else None
    eos = config.eos_token_id if eos is None else eos
    facts = {name: getattr(config, name, None) for name in _IDENTITY_CONFIG}
    return LoadedModel(
        model=model,
        dtype=dtype,
        kv_shapes=shapes,
        max_model_len=getattr(config, "max_position_embeddings", None),
        vocab_size=config.vocab_size,
        eos_token_ids=frozenset([eos] if isinstance(eos, int) else eos or ()),
        identity={
            "kv_version": KV_VERSION,
            "weights": weights,
            "attention": json.dumps(facts, sort_keys=True, default=str),
            "kv_dtype": dtype,
        },
    )


def _install_attention(model: Any, config: Any) -> tuple[tuple[int, int, int], ...]:
    kind = f"models of type {config.model_type!r} cannot be served"
    if not model._supports_attention_backend:
        raise ConfigError(f"{kind}: transformers gives them no exchangeable attention", reason="UNSUPPORTED_MODEL")
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYER_TYPES)
    if unknown or getattr(config, "attention_chunk_size", None):
        raise ConfigError(f"{kind}: layers of type {', '.join(unknown) or 'chunked'}", reason="UNSUPPORTED_MODEL")
    attention.register()
    model.eval().requires_grad_(False)
    model.set_attn_implementation(attention.ATTENTION_NAME)
    recorder = attention.ShapeRecorder()
    tokens = torch.zeros((1, 4), dtype=torch.int64)
    with torch.inference_mode():
        model(input_ids=tokens, position_ids=torch.arange(4)[None], use_cache=False, pdserve=recorder)
    if sorted(recorder.shapes) != list(range(config.num_hidden_layers)):
        raise ConfigError(
            f"{kind}: {len(recorder.shapes)} of {config.num_hidden_layers} layers called our attention",
            reason="UNSUPPORTED_MODEL",
        )
    return tuple(recorder.shapes[layer] for layer in range(config.num_hidden_layers))
