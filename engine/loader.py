"""Loads a model: by the lean definition where it knows the model exactly, else transformers' with our attention in
every layer, or refuses it.

A model that ignores our attention, or keeps something beside it, would answer wrongly without an error: short passes
must see every layer call it, and the right answers (`engine.model_check`).
"""

from __future__ import annotations

import ctypes
import json
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from pdserve.core.errors import ConfigError
from pdserve.core.hashing import identity_digest
from pdserve.core.layout import DTYPE_BYTES, KVLayout, LayerGroup
from pdserve.engine import attention
from pdserve.engine.model_check import check_answers, check_finite, check_windows, fact, record_layers, refuse
from pdserve.engine.model_store import weights_digest
from pdserve.engine.models.headers import weight_files
from pdserve.engine.models.lean import LeanModel
from pdserve.engine.models.linear import MakeLinear, TorchLinear, count_weights, linear_maker, replace_linears
from pdserve.engine.models.spec import NotLean, check_depth, read_eos, read_json, read_spec
from pdserve.engine.models.weights import WeightFiles
from pdserve.engine.progress import Progress, SilentProgress

KV_VERSION = 1
"""Raise it when equal models would write other KV than before: workers of both sides must not mix."""

_KV_CLASS = "float32"
"""All dtypes that decode may convert: the layout names the one. The version before put its own dtype here."""

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

_LOAD_ERRORS = (OSError, ValueError, TypeError, AttributeError, LookupError, RuntimeError, ImportError)
"""What transformers raises over files that are not what it expects, and where a library is missing."""
_FLOATS = {"F64", "F32", "F16", "BF16"}

_CPU = torch.device("cpu")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        model: transformers' causal LM with our attention, or a `LeanModel`, which is called in the same way.
        dtype: Of the weights: a key of `DTYPE_BYTES`.
        kv_shapes: Per layer (num_kv_heads, k_dim, v_dim), in layer order.
        max_model_len: Positions that the model knows; None when it does not say.
        vocab_size: Rows of the output head.
        eos_token_ids: End-of-sequence tokens.
        identity: Facts that must be equal on all workers of a pool; the dtype is in the layout instead.
    """

    model: Any  # transformers' classes are untyped
    dtype: str
    kv_shapes: tuple[tuple[int, int, int], ...]
    max_model_len: int | None
    vocab_size: int
    eos_token_ids: frozenset[int]
    identity: dict[str, str | int]

    def layout(self, page_size: int, kv_dtype: str | None = None) -> KVLayout:
        """KV layout: one group per distinct KV shape, in order of its first layer.

        Args:
            page_size: Tokens per page.
            kv_dtype: A key of `KV_DTYPE_BYTES`; None: that of the weights.
        """
        return _layout(self.kv_shapes, page_size, kv_dtype or self.dtype)

    def identity_digest(self, model_name: str) -> bytes:
        """Digest of `identity` and the served name."""
        return identity_digest({**self.identity, "model": model_name})


def _layout(kv_shapes: tuple[tuple[int, int, int], ...], page_size: int, dtype: str) -> KVLayout:
    layers: dict[tuple[int, int, int], list[int]] = {}
    for layer, shape in enumerate(kv_shapes):
        layers.setdefault(shape, []).append(layer)
    return KVLayout(page_size, dtype, tuple(LayerGroup(tuple(ls), *shape) for shape, ls in layers.items()))


def load_model(
    directory: Path,
    dtype: str = "auto",
    progress: Progress | None = None,
    where: torch.device = _CPU,
    *,
    impl: str = "auto",
    quantization: str | None = None,
) -> LoadedModel:
    """Loads a model.

    Args:
        directory: See `model_store.resolve_model`.
        dtype: A key of `DTYPE_BYTES`, or "auto": float32 on a CPU, bfloat16 on a GPU.
        progress: Told about long steps.
        where: Device of the weights.
        impl: `EngineConfig.model_impl`.
        quantization: `EngineConfig.quantization`; only with float32.

    Raises:
        ConfigError: The directory cannot be read, or the model cannot be served.
    """
    progress = progress or SilentProgress()
    if dtype == "auto":
        dtype = "float32" if where.type == "cpu" else "bfloat16"
    assert dtype in DTYPE_BYTES, dtype
    config = read_json(directory / "config.json")
    check_depth(config)
    digest = weights_digest(directory, progress)
    _warn_of_unread(directory, weight_files(directory, config))
    progress.begin("loading the model")
    make = linear_maker(quantization) if where.type == "cpu" and dtype == "float32" else None
    assert quantization is None or make is not None, (quantization, dtype, where)
    required = impl == "lean"
    loaded = None if impl == "transformers" else _try_lean(directory, dtype, where, digest, make, required=required)
    if loaded is None:
        loaded = _load_transformers(directory, dtype, where, digest, make)
    _return_freed_memory()
    progress.end()
    if quantization is None:
        return loaded
    _warn_of_plain(loaded.model)
    return replace(loaded, identity=loaded.identity | {"weights_as": quantization})


def _warn_of_unread(directory: Path, read: Sequence[Path]) -> None:
    """Says that other files of weights lie there: which ones count may not be what somebody thinks."""
    if unread := sorted({path.name for path in directory.glob("*.safetensors")} - {path.name for path in read}):
        _log.warning(
            "%d files of weights in %s are not read, such as %s: the weights are %s",
            *(len(unread), directory, unread[0], read[0].name if len(read) == 1 else "the shards of its index"),
        )


def _warn_of_plain(model: Any) -> None:
    """Says that a part of a transformers model is not in 8 bits: it is computed otherwise than by torch's linears."""
    if isinstance(model, LeanModel):
        return
    plain, packed = count_weights(model)
    if 10 * plain > packed:
        _log.warning(
            "--quantization int8 reaches %d million of this model's weights; %d million, which are no plain linears, "
            "stay float32",
            *(round(packed / 1e6), round(plain / 1e6)),
        )


def _try_lean(
    directory: Path, dtype: str, where: torch.device, digest: str, make: MakeLinear | None, *, required: bool
) -> LoadedModel | None:
    try:
        if where.type != "cpu" and not required:
            raise NotLean("on a GPU the lean definition has to be asked for: nobody has measured there what it saves")
        if where.type == "cpu" and dtype != "float32":
            raise NotLean(f"on a CPU the lean definition computes in float32, not {dtype}")
        spec = read_spec(directory)
        with WeightFiles(directory) as files:
            model = LeanModel(spec, files, make or TorchLinear, getattr(torch, dtype), where)
    except RuntimeError as e:  # torch's error for memory too
        raise ConfigError(f"the model in {directory} does not fit on the device {where}: {e}") from e
    except NotLean as e:
        if required:
            raise ConfigError(f"--model-impl is 'lean', but {directory.name} cannot be served so: {e}") from e
        _log.info("transformers' modules serve %s: %s", directory.name, e)
        return None
    loaded = LoadedModel(
        model=model,
        dtype=dtype,
        kv_shapes=((spec.num_kv_heads, spec.head_dim, spec.head_dim),) * spec.num_layers,
        max_model_len=spec.max_model_len,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        identity=_identity({name: spec.facts.get(name) for name in _IDENTITY_CONFIG}, digest),
    )
    check_finite(model, spec, loaded.layout)
    return loaded


def _return_freed_memory() -> None:
    """Gives the system back what packing used: glibc would keep it for this process."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _load_transformers(
    directory: Path, dtype: str, where: torch.device, digest: str, make: MakeLinear | None
) -> LoadedModel:
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    transformers.utils.logging.disable_progress_bar()
    try:
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=getattr(torch, dtype),
            local_files_only=True,
            output_loading_info=True,
            use_safetensors=True,  # others are not in the digest
            trust_remote_code=False,  # else it asks on standard input whether to run what lies in the directory
        )
    except (*_LOAD_ERRORS, SafetensorError, StrictDataclassError) as e:
        what = " ".join(str(e).split())[:300] or type(e).__name__
        if "trust_remote_code" in str(e):
            what = "transformers does not know its architecture, and code that lies beside a model is not run"
        raise ConfigError(f"cannot load the model in {directory}: {what}") from e
    _check_types(directory, model.config)
    _check_weights(directory, found)
    ahead = getattr(model.config.get_text_config(), "num_nextn_predict_layers", None) or 0
    unused = sorted(str(name) for name in found["unexpected_keys"])
    _check_unused(directory, unused, model.state_dict().keys(), ahead)
    try:
        model.to(where)
    except RuntimeError as e:  # torch's error for memory too
        raise ConfigError(f"the model in {directory} does not fit on the device {where}: {e}") from e
    if make is not None:
        replace_linears(model, make)  # before the check: what is checked is what serves
    return prepare_model(model, dtype, digest)


def _check_types(directory: Path, config: Any) -> None:
    """transformers casts whatever a checkpoint holds: the integers of a quantized one, without their scales."""
    if getattr(config, "quantization_config", None) is not None:
        return  # it knows how to read them
    with WeightFiles(directory) as files:
        odd = sorted(name for name, kind in files.types().items() if name.endswith(".weight") and kind not in _FLOATS)
    if odd:
        raise ConfigError(
            f"cannot load the model in {directory}: {len(odd)} of its weights, such as {odd[0]}, are quantized, and "
            "its configuration does not say how",
            reason="UNSUPPORTED_MODEL",
        )


def _check_weights(directory: Path, found: Mapping[str, Collection[Any]]) -> None:
    """transformers makes up what a checkpoint lacks, with a warning."""
    for kind, what in (("missing_keys", "are missing"), ("mismatched_keys", "have another shape")):
        if names := sorted(str(name) for name in found[kind]):
            raise ConfigError(
                f"cannot load the model in {directory}: {len(names)} of its weights {what}, such as {names[0]}",
                reason="CORRUPT_MODEL",
            )


def _check_unused(directory: Path, unused: Sequence[str], own: Collection[str], ahead: int = 0) -> None:
    """Refuses a checkpoint with more layers than its configuration says; warns of whatever else is not used.

    Layers are counted by their prefix: those of another part, as of a vision tower, are no more of the same. After the
    last may come `ahead` ones that predict further tokens and are not served.
    """
    counts: dict[str, int] = {}
    for prefix, at in filter(None, map(_layer_of, own)):
        counts[prefix] = max(counts.get(prefix, 0), at + 1)
    for name in unused:
        if (layer := _layer_of(name)) is None:
            continue
        count = max((n for prefix, n in counts.items() if prefix.endswith(layer[0])), default=None)
        if count is not None and layer[1] >= count + ahead:
            raise ConfigError(
                f"cannot load the model in {directory}: its configuration says {count} layers, and its files hold "
                f"more, such as {name}: a configuration of another model?",
                reason="CORRUPT_MODEL",
            )
    if unused:
        _log.warning("%d weights in %s are not used by its model, such as %s", len(unused), directory, unused[0])


def _layer_of(name: str) -> tuple[str, int] | None:
    """The prefix and the number of the layer that a weight belongs to: ("model.layers.", 3)."""
    found = re.match(r"(.*?[a-z]\.)(\d+)\.", name)
    return None if found is None else (found[1], int(found[2]))


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
    check_answers(model, config, lambda page_size: _layout(shapes, page_size, dtype))
    eos = model.generation_config.eos_token_id if model.generation_config is not None else None
    eos = config.eos_token_id if eos is None else eos
    facts = {name: fact(config, name) for name in _IDENTITY_CONFIG}
    return LoadedModel(
        model=model,
        dtype=dtype,
        kv_shapes=shapes,
        max_model_len=_max_model_len(config),
        vocab_size=config.vocab_size,
        eos_token_ids=read_eos(eos, config.vocab_size),
        identity=_identity(facts, weights),
    )


def _identity(facts: Mapping[str, object], weights: str) -> dict[str, str | int]:
    return {
        "kv_version": KV_VERSION,
        "weights": weights,
        "attention": json.dumps(facts, sort_keys=True, default=str),
        "kv_dtype": _KV_CLASS,
    }


def _install_attention(model: Any, config: Any) -> tuple[tuple[int, int, int], ...]:
    if not getattr(model, "_supports_attention_backend", False):
        raise refuse(config, "transformers gives them no exchangeable attention")
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYER_TYPES)
    if unknown or getattr(config, "attention_chunk_size", None):
        raise refuse(config, f"layers of type {', '.join(unknown) or 'chunked'}")
    attention.register()
    model.eval().requires_grad_(False)
    model.set_attn_implementation(attention.ATTENTION_NAME)
    layers = record_layers(model, config)
    check_windows(config, layers)
    return tuple(layers[layer].kv_shape for layer in range(config.num_hidden_layers))


def _max_model_len(config: Any) -> int | None:
    """Positions that the model knows and that do not change what earlier ones were.

    Beyond `original_max_position_embeddings` longrope takes other factors, for all tokens of a forward pass: those that
    share it with a long sequence, and keys stored before, would be wrong.
    """
    length: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if part.get("rope_type") == "longrope":
            original = part.get("original_max_position_embeddings") or config.original_max_position_embeddings
            length = min(n for n in (length, original) if n is not None)
    return length
