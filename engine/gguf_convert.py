"""Converts a GGUF file once to safetensors + tokenizer: `python -m pdserve.engine.gguf_convert FILE DIRECTORY`.

Runs in a process of its own, so that the memory of the conversion does not stay with the caller; needs no torch.
Weights become float32, in shards. Llama, Qwen2 and Qwen3 are converted; whatever the file says that is not known here
is refused, for it would be answered wrongly and nobody would see it.

Source: the GGUF specification (tensor and key names); of a Llama model llama.cpp stores each head's query and key rows
with the two rope halves interleaved, transformers stores the halves one after the other, as llama.cpp does for Qwens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import save_file

from pdserve.engine.gguf_tokenizer import Refused, special_ids, tokenizer, tokenizer_config

_SHARD_BYTES = 1 << 30
_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of every Llama from 3.1 on; a file holds only what follows from them, and is compared with that."""

_KNOWN_KEYS = {
    *("context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon"),
    *("attention.key_length", "attention.value_length", "rope.freq_base", "rope.dimension_count"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned"),
    "attention.causal",
}
_Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class _Family:
    architecture: str
    switches: frozenset[str] = frozenset()
    is_interleaved: bool = False
    tensors: Mapping[str, str] = field(default_factory=lambda: _TENSORS)
    biases: frozenset[str] = frozenset()


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", frozenset({"attention_bias", "mlp_bias"}), is_interleaved=True),
    "qwen2": _Family("Qwen2ForCausalLM", biases=frozenset({"attn_q", "attn_k", "attn_v"})),
    "qwen3": _Family(
        "Qwen3ForCausalLM",
        frozenset({"attention_bias"}),
        tensors={**_TENSORS, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"},
    ),
}


class _Reader(GGUFReader):
    """Refuses to read past the end of the file, where the library goes on with nothing."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> _Array:
        found: _Array = super()._get(offset, dtype, count, override_order)
        if len(found) < count:
            raise ValueError("it ends early")
        return found


def convert(gguf_path: Path, directory: Path) -> None:
    """Writes config, weights (fp32 safetensors) and tokenizer of a GGUF file.

    Args:
        gguf_path: The file.
        directory: Existing directory to write into.

    Raises:
        Refused: The file holds what is not known here, or is damaged.
    """
    try:
        reader = _Reader(gguf_path)
        meta = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError) as e:  # the library counts on what the file says of itself
        raise Refused(f"it is damaged or not whole ({e}); copy it again") from e
    kind = meta.get("general.architecture")
    if kind not in _FAMILIES:
        raise Refused(f"its architecture is {kind!r}; GGUF files of {', '.join(_FAMILIES)} are converted")
    if meta.get("split.count", 0) > 1:
        raise Refused(f"it is one of {meta['split.count']} parts; join them with llama.cpp's llama-gguf-split --merge")
    family = _FAMILIES[kind]
    _check_apart(reader.tensors)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    names = {name: _weight_name(name, family) for name in tensors if name != _ROPE_FACTORS}
    config = _config(kind, family, meta, tensors)
    files = {
        "config.json": config,
        "generation_config.json": special_ids(meta),
        "tokenizer.json": tokenizer(meta),
        "tokenizer_config.json": tokenizer_config(meta, config["max_position_embeddings"]),
    }
    _write_weights(directory, tensors, names, config, family)
    for name, value in files.items():
        _write(directory / name, value)
    if (template := meta.get("tokenizer.chat_template")) is not None:
        (directory / "chat_template.jinja").write_text(template)


def _check_apart(tensors: Iterable[Any]) -> None:
    """No tensor is read where another one lies."""
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: int(tensor.data_offset)):
        if tensor.data_offset < end:
            raise Refused(f"it is damaged (its tensor {tensor.name} lies within another one); copy it again")
        end = int(tensor.data_offset) + int(tensor.n_bytes)


def _write_weights(
    directory: Path, tensors: Mapping[str, Any], names: Mapping[str, str], config: Mapping[str, Any], family: _Family
) -> None:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    shards: list[list[str]] = []
    shard: dict[str, _Array] = {}

    def flush() -> None:
        save_file(shard, directory / f"{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    for name, target in names.items():
        kind = name.split(".")[-2]
        data = np.ascontiguousarray(dequantize(tensors[name].data, tensors[name].tensor_type), dtype=np.float32)
        shard[target] = _rope_halves(data, heads[kind]) if family.is_interleaved and kind in heads else data
        if sum(one.nbytes for one in shard.values()) >= _SHARD_BYTES:
            flush()
    if shard:
        flush()
    _name_shards(directory, shards)


def _name_shards(directory: Path, shards: list[list[str]]) -> None:
    """As transformers names them: one file, or several and an index."""
    if len(shards) == 1:
        (directory / "0.safetensors").rename(directory / "model.safetensors")
        return
    files = [f"model-{at + 1:05}-of-{len(shards):05}.safetensors" for at in range(len(shards))]
    for at, file in enumerate(files):
        (directory / f"{at}.safetensors").rename(directory / file)
    where = {name: file for names, file in zip(shards, files, strict=True) for name in names}
    _write(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})


def _weight_name(name: str, family: _Family) -> str:
    if name in _OTHERS:
        return _OTHERS[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in family.tensors:
        _, layer, kind, suffix = parts
        if suffix == "weight" or (suffix == "bias" and kind in family.biases):
            return f"model.layers.{layer}.{family.tensors[kind]}.{suffix}"
    raise Refused(f"it has a tensor {name}, which a {family.architecture} of this version does not have")


def _rope_halves(rows: _Array, num_heads: int) -> _Array:
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))


def _config(kind: str, family: _Family, meta: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    own = {key.removeprefix(f"{kind}."): value for key, value in meta.items() if key.startswith(f"{kind}.")}
    if unknown := sorted(key for key, value in own.items() if key not in _KNOWN_KEYS and value not in (0, False)):
        raise Refused(f"it says {kind}.{unknown[0]}, whose meaning is not known here")
    if not own.get("attention.causal", True):
        raise Refused(f"its {kind}.attention.causal is false; its tokens see those after them, too")
    hidden, num_heads = _count(kind, own, "embedding_length"), _count(kind, own, "attention.head_count")
    head_dim = own.get("attention.key_length", hidden // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, head_dim) != head_dim:
            raise Refused(f"its {kind}.{key} is {own[key]}; only heads of one width, rotated whole, are converted")
    ids = special_ids(meta)
    return {
        "architectures": [family.architecture],
        "model_type": kind,
        **({"attention_bias": False} if "attention_bias" in family.switches else {}),
        "attention_dropout": 0.0,
        "bos_token_id": ids.get("bos_token_id"),
        "dtype": "float32",
        "eos_token_id": ids.get("eos_token_id"),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": _count(kind, own, "feed_forward_length"),
        "max_position_embeddings": _count(kind, own, "context_length"),
        **({"mlp_bias": False} if "mlp_bias" in family.switches else {}),
        "num_attention_heads": num_heads,
        "num_hidden_layers": _count(kind, own, "block_count"),
        "num_key_value_heads": _count(kind, own, "attention.head_count_kv", num_heads),
        "pad_token_id": ids.get("pad_token_id"),
        "rms_norm_eps": own["attention.layer_norm_rms_epsilon"],
        "rope_parameters": _rope(kind, own, tensors, head_dim),
        "tie_word_embeddings": "output.weight" not in tensors,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
    }


def _count(kind: str, own: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = own.get(key, default)
    if type(value) is not int or value < 1:
        raise Refused(f"its {kind}.{key} is {value!r}, not a number")
    return value


def _rope(kind: str, own: Mapping[str, Any], tensors: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    # Without a type, llama.cpp takes a factor for that of a linear scaling.
    factor = own.get("rope.scaling.factor", 0)
    theta = own.get("rope.freq_base", 10_000.0)
    scaling = own.get("rope.scaling.type", "none" if factor in (0, 1) else "linear")
    if scaling not in ("none", "linear"):
        raise Refused(f"its {kind}.rope.scaling.type is {scaling!r}; none and linear are converted")
    if _ROPE_FACTORS in tensors:
        if scaling == "linear" and factor not in (0, 1):
            raise Refused(f"it has both {_ROPE_FACTORS} and a {kind}.rope.scaling.factor of {factor}")
        return _stretched(np.asarray(tensors[_ROPE_FACTORS].data, dtype=np.float64), theta, head_dim)
    if scaling == "linear":
        return {"rope_theta": theta, "rope_type": "linear", "factor": own["rope.scaling.factor"]}
    return {"rope_theta": theta, "rope_type": "default"}


def _stretched(factors: _Array, theta: float, head_dim: int) -> dict[str, Any]:
    """Rope parameters whose factors these are."""
    factor, low, high = float(factors.max()), _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    waves = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = _LLAMA3["original_max_position_embeddings"] / waves
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    if factors.shape != waves.shape or not np.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise Refused(f"its {_ROPE_FACTORS} are not those of a Llama from 3.1 on")
    return {"rope_theta": theta, "rope_type": "llama3", "factor": round(factor, 4), **_LLAMA3}


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=None if "tokenizer.json" in path.name else 2))


def main(words: list[str]) -> int:
    """Converts; the last line of stderr says why not."""
    try:
        convert(Path(words[0]), Path(words[1]))
    except Refused as e:
        sys.stderr.write(f"{e}\n")
        return 1
    except KeyError as e:
        sys.stderr.write(f"it lacks {e.args[0]}\n")
        return 1
    except (ValueError, IndexError, TypeError) as e:
        sys.stderr.write(f"it is damaged: what it says of itself does not fit together ({e})\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
