"""What the lean definition must know of a model, read from its `config.json` alone: transformers is not imported, which
would take seconds and hundreds of megabytes. What is not known exactly is refused with the reason; the general path,
transformers' own modules, serves it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pdserve.core.errors import ConfigError


class NotLean(Exception):
    """The lean definition does not know this model exactly; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeanSpec:
    """A decoder with RMSNorm, rotary positions, grouped queries and a gated SiLU.

    Attributes:
        num_layers: Decoder layers.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the gated part.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Width of a head, even.
        vocab_size: Rows of embedding and head.
        norm_eps: Added to the mean square of every norm.
        rope: Parameters of the rotation, with `rope_type` and `rope_theta`.
        windows: Per layer: tokens that a token sees, itself included; None: all.
        qkv_bias: Query, key and value have biases.
        out_bias: The attention's output has a bias.
        qk_norm: Queries and keys are normalised per head before they are rotated.
        tied: The head is the embedding.
        max_model_len: Positions that the model knows.
        eos_token_ids: End-of-sequence tokens.
        facts: What transformers' configuration would say of what KV depends on.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    rope: Mapping[str, Any]
    windows: tuple[int | None, ...]
    qkv_bias: bool
    out_bias: bool
    qk_norm: bool
    tied: bool
    max_model_len: int
    eos_token_ids: frozenset[int]
    facts: Mapping[str, object]


_LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_QWEN2: dict[str, Any] = {
    **{name: value for name, value in _LLAMA.items() if name not in ("attention_bias", "mlp_bias")},
    **{"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "eos_token_id": None},
    **{"max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096},
    **{"max_window_layers": 28, "layer_types": None},
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": _LLAMA,
    "qwen2": _QWEN2,
    "qwen3": {**_QWEN2, "head_dim": 128, "attention_bias": False},
    "mistral": {
        **{name: value for name, value in _LLAMA.items() if name not in ("attention_bias", "mlp_bias")},
        **{"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072},
        **{"sliding_window": 4096},
    },
}
"""What transformers takes for a key that `config.json` leaves out, by type of model; a test compares them."""

_ROPE_KEYS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
}
_IN_ROPE = {"rope_theta", "rope_scaling", "rope_parameters"}
_WITHOUT_EFFECT = {
    *("architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "use_cache", "_name_or_path"),
    *("pad_token_id", "bos_token_id", "initializer_range", "attention_dropout", "pretraining_tp"),
    *("is_llama_config", "transformers.js_config", "rope_interleaved"),
}
_IDENTITY_FACTS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_SIZES = (
    *(
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    ),
    *("max_position_embeddings",),
)
_MOST_LAYERS = 10_000
_SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "rope_interleaved")


def read_spec(directory: Path) -> LeanSpec:
    """Reads the configuration of a model directory.

    Raises:
        NotLean: The lean definition might compute something else than transformers' model.
        ConfigError: A file cannot be read.
    """
    raw = read_json(directory / "config.json")
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in DEFAULTS:
        raise NotLean(f"models of type {kind!r} have no lean definition (there is one for {', '.join(DEFAULTS)})")
    defaults = DEFAULTS[kind]
    unknown = sorted(set(raw) - set(defaults) - _IN_ROPE - _WITHOUT_EFFECT)
    if unknown:
        raise NotLean(f"its configuration has keys that the lean definition does not know: {', '.join(unknown)}")
    generation = directory / "generation_config.json"
    return _spec(kind, {**defaults, **raw}, read_json(generation) if generation.is_file() else {})


def _spec(kind: str, config: dict[str, Any], generation: dict[str, Any]) -> LeanSpec:
    heads = config["num_attention_heads"]
    if config["num_key_value_heads"] is None:
        config["num_key_value_heads"] = heads
    _check_numbers(config)
    head_dim = config["head_dim"] or config["hidden_size"] // heads
    if kind in ("llama", "mistral"):
        config["head_dim"] = head_dim
    if config["hidden_act"] != "silu":
        raise NotLean(f"its activation is {config['hidden_act']!r}, not silu")
    if config.get("rope_interleaved"):
        raise NotLean("its rotation pairs neighbours")
    if config.get("mlp_bias"):
        raise NotLean("its MLP has biases")
    if head_dim % 2:
        raise NotLean(f"its heads have {head_dim} values, an odd number")
    windows = _windows(kind, config)
    rope = _rope(config)
    biased = kind == "qwen2" or bool(config.get("attention_bias"))
    eos = generation.get("eos_token_id")
    eos_token_ids = read_eos(config["eos_token_id"] if eos is None else eos, config["vocab_size"])
    facts = {name: config.get(name) for name in (*_IDENTITY_FACTS, "sliding_window", "layer_types")}
    return LeanSpec(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_heads=heads,
        num_kv_heads=config["num_key_value_heads"],
        head_dim=head_dim,
        vocab_size=config["vocab_size"],
        norm_eps=config["rms_norm_eps"],
        rope=rope,
        windows=windows,
        qkv_bias=biased,
        out_bias=biased and kind != "qwen2",
        qk_norm=kind == "qwen3",
        tied=bool(config["tie_word_embeddings"]),
        max_model_len=config["max_position_embeddings"],
        eos_token_ids=eos_token_ids,
        facts={**facts, "model_type": kind, "rope_parameters": rope},
    )


def _check_numbers(config: Mapping[str, Any]) -> None:
    optional = [name for name in ("head_dim", "sliding_window") if config.get(name) is not None]
    for name in (*_SIZES, *optional):
        if type(config[name]) is not int or config[name] < 1:
            raise NotLean(f"its {name} is {config[name]!r}")
    if config["num_attention_heads"] % config["num_key_value_heads"]:
        raise NotLean(
            f"its {config['num_attention_heads']} heads are no multiple of its {config['num_key_value_heads']} KV heads"
        )
    if not _is_positive(config["rms_norm_eps"]):
        raise NotLean(f"its rms_norm_eps is {config['rms_norm_eps']!r}")
    for name in _SWITCHES:
        if not isinstance(config.get(name), bool | None):
            raise NotLean(f"its {name} is {config[name]!r}")


def _is_positive(value: object) -> bool:
    return type(value) in (int, float) and 0 < cast(float, value) < math.inf


def _windows(kind: str, config: dict[str, Any]) -> tuple[int | None, ...]:
    """Windows of the layers; completes `sliding_window` and `layer_types` as transformers does."""
    num: int = config["num_hidden_layers"]
    if kind == "llama":
        return (None,) * num
    if kind == "mistral":
        return (config["sliding_window"],) * num
    window = config["sliding_window"] = config["sliding_window"] if config["use_sliding_window"] else None
    if config["layer_types"] is None:
        first = num if window is None else config["max_window_layers"]
        if type(first) is not int:
            raise NotLean(f"its max_window_layers is {first!r}")
        config["layer_types"] = ["sliding_attention" if i >= first else "full_attention" for i in range(num)]
    types = config["layer_types"]
    known = ("full_attention",) if window is None else ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != num or not all(one in known for one in types):
        raise NotLean(f"its {num} layers with a window of {window} are {types!r:.200}")
    return tuple(window if one == "sliding_attention" else None for one in types)


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Old files keep the base beside `rope_scaling`, new ones have all in `rope_parameters`."""
    told = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(told, dict):
        raise NotLean(f"its rope parameters are {told!r}")
    rope = dict(told)
    rope.setdefault("rope_theta", config.get("rope_theta", 10_000.0))
    kind = rope.setdefault("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        raise NotLean(f"its rope type is {kind!r} (known: {', '.join(_ROPE_KEYS)})")
    if kind == "llama3":
        rope.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    odd = set(rope) ^ (_ROPE_KEYS[kind] | {"rope_theta", "rope_type"})
    if odd - {"type"}:
        raise NotLean(f"its rope parameters of type {kind} lack or add {', '.join(sorted(odd - {'type'}))}")
    for name, value in rope.items():
        if name not in ("type", "rope_type") and not _is_positive(value):
            raise NotLean(f"its {name} is {value!r}")
    return rope


def read_eos(value: object, vocab_size: int) -> frozenset[int]:
    """End-of-sequence tokens of a configuration: one, several or none. Those that no model can choose are left out.

    Raises:
        ConfigError: They are no token ids.
    """
    ids: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int for token in ids):
        raise ConfigError(
            f"eos_token_id in the model's configuration is {value!r}; it must be a token or a list of tokens",
            reason="CORRUPT_MODEL",
        )
    return frozenset(token for token in ids if 0 <= token < vocab_size)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        ConfigError: The file cannot be read, or holds something else.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise ConfigError(f"{path} cannot be read: {e}; copy it again", reason="CORRUPT_MODEL") from e
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} is not a JSON object; copy it again", reason="CORRUPT_MODEL")
    return raw


def check_depth(config: Mapping[str, Any]) -> None:
    """Refuses a number of layers that no model has, before somebody begins to make them.

    Args:
        config: Contents of `config.json`.

    Raises:
        ConfigError: There are too many.
    """
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for name in ("num_hidden_layers", "num_layers", "n_layer"):
            if isinstance(part.get(name), int | float) and part[name] > _MOST_LAYERS:
                raise ConfigError(
                    f"{name} in the model's configuration is {part[name]}; at most {_MOST_LAYERS} can be",
                    reason="CORRUPT_MODEL",
                )
