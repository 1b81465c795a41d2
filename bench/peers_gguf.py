"""Writes a Llama model as GGUF, in F32 and Q8_0, for llama.cpp: `python -m pdserve.bench.peers_gguf MODEL FILE KIND`.

The reverse of `engine.gguf_convert`: same weights, so that peers are compared and not models. Norms stay in F32, as in
llama.cpp's own conversion.

Source: the GGUF specification (tensor and key names); llama.cpp wants each head's query and key rows with the two rope
halves interleaved, transformers stores the halves one after the other.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
from gguf.quants import quantize
from safetensors.numpy import load_file

from pdserve.core.errors import ConfigError
from pdserve.engine.models.headers import weight_files

KINDS = ("F32", "Q8_0")
_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_ORDINARY, _CONTROL = 1, 3
Array = np.ndarray[Any, np.dtype[Any]]


def write(model: Path, path: Path, kind: str) -> None:
    """Writes one file.

    Args:
        model: Directory with config, safetensors and tokenizer of a Llama model.
        path: The file; its directory exists.
        kind: One of `KINDS`.

    Raises:
        ConfigError: The model is of another architecture, or has what is not handled here.
    """
    config = json.loads((model / "config.json").read_text())
    if config["model_type"] != "llama" or config["rope_parameters"]["rope_type"] != "default":
        raise ConfigError(f"{model} is no plain Llama model: llama.cpp's file cannot be made from it here")
    writer = GGUFWriter(str(path), "llama")
    _write_config(writer, config, kind)
    _write_tokenizer(writer, json.loads((model / "tokenizer.json").read_text()), config)
    for name, data in tensors(model, config):
        if kind == "Q8_0" and data.ndim == 2:
            writer.add_tensor(name, quantize(data, GGMLQuantizationType.Q8_0), raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(model: Path, config: dict[str, Any]) -> Iterator[tuple[str, Array]]:
    """The weights in fp32 with llama.cpp's names and order of rows."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for file in weight_files(model):
        for name, data in load_file(file).items():
            new = _name(name)
            data = np.ascontiguousarray(data, dtype=np.float32)
            kind = new.split(".")[-2]
            yield new, _interleaved(data, heads[kind]) if kind in heads else data


def _name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{_NAMES[part]}.{suffix}"
    return f"{_NAMES[stem]}.{suffix}"


def _interleaved(rows: Array, num_heads: int) -> Array:
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, rows.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def _write_config(writer: GGUFWriter, config: dict[str, Any], kind: str) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(LlamaFileType.ALL_F32 if kind == "F32" else LlamaFileType.MOSTLY_Q8_0)


def _write_tokenizer(writer: GGUFWriter, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    vocabulary = {i: text for text, i in tokenizer["model"]["vocab"].items()} | special
    if sorted(vocabulary) != list(range(config["vocab_size"])):
        raise ConfigError("the tokenizer's vocabulary is not that of the model")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([vocabulary[i] for i in range(config["vocab_size"])])
    writer.add_token_types([_CONTROL if i in special else _ORDINARY for i in range(config["vocab_size"])])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
