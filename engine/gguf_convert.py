"""Converts a Llama GGUF file once to safetensors + tokenizer: `python -m pdserve.engine.gguf_convert FILE DIRECTORY`.

Runs in a process of its own, so that the memory of the conversion does not stay with the caller; needs no torch. Only
what SmolLM2's file holds is handled: Llama architecture, byte-level BPE, tied embeddings.

Source: the GGUF specification (tensor and key names); llama.cpp stores each head's query and key rows with the two rope
halves interleaved, transformers stores the halves one after the other.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import save_file

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
_SPECIAL = 3
"""GGUF token type of control tokens."""


def convert(gguf_path: Path, directory: Path) -> None:
    """Writes config, weights (fp32 safetensors) and tokenizer of a SmolLM2 GGUF file.

    Args:
        gguf_path: The file.
        directory: Existing directory to write into.
    """
    reader = GGUFReader(gguf_path)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    config = _config(meta)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        kind = tensor.name.split(".")[-2]
        data = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        weights[_weight_name(tensor.name)] = _rope_halves(data, heads[kind]) if kind in heads else data
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write(directory / "config.json", config)
    _write(directory / "generation_config.json", generation)
    _write(directory / "tokenizer.json", _tokenizer(meta))
    _write(directory / "tokenizer_config.json", _tokenizer_config(meta))
    (directory / "chat_template.jinja").write_text(meta["tokenizer.chat_template"])


def _weight_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_TENSORS[parts[2]]}.{parts[3]}"
    return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]


def _rope_halves(rows: np.ndarray[Any, np.dtype[np.float32]], num_heads: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))


def _config(meta: dict[str, Any]) -> dict[str, Any]:
    hidden, num_heads = meta["llama.embedding_length"], meta["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "dtype": "float32",
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "head_dim": hidden // num_heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": meta["llama.feed_forward_length"],
        "max_position_embeddings": meta["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": num_heads,
        "num_hidden_layers": meta["llama.block_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        "rms_norm_eps": meta["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_theta": meta["llama.rope.freq_base"], "rope_type": "default"},
        "tie_word_embeddings": True,
        "vocab_size": meta["llama.vocab_size"],
    }


def _tokenizer(meta: dict[str, Any]) -> dict[str, Any]:
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": token, **flags}
            for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind == _SPECIAL
        ],
        "normalizer": None,
        # SmolLM2 splits numbers into digits before the byte-level BPE.
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in meta["tokenizer.ggml.merges"]],
        },
    }


def _tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
        "model_max_length": meta["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=None if "tokenizer.json" in path.name else 2))


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
