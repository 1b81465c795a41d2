"""Tiny random models of several families, and a plain way to run them."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from pdserve.core.request import Request
from pdserve.core.sampling import SamplingParams
from pdserve.engine.chunks import SchedulerLimits
from pdserve.engine.engine_core import EngineCore
from pdserve.engine.kv_cache import PlainPool
from pdserve.engine.loader import LoadedModel, prepare_model
from pdserve.engine.logits import LogitsProcessor
from pdserve.engine.page_pool import PagePool
from pdserve.engine.runner import ModelRunner
from pdserve.engine.step import Add, SequenceFailed, TokensSampled
from pdserve.engine.swap import SwapSpace

VOCAB_SIZE = 97
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.3,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 64,
}
_SCALED_ROPE = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5},
}
_MIXED_LAYERS = ["sliding_attention", "full_attention"] * 2
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama, stretched rope": ("LlamaConfig", {"rope_parameters": _LLAMA3_ROPE}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2, window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {}),
    "mistral, window": ("MistralConfig", {"sliding_window": 6}),
    "gemma2: window, softcap": ("Gemma2Config", {"sliding_window": 5, "attn_logit_softcapping": 2.0}),
    "gemma3: QK norm, window": ("Gemma3TextConfig", {"sliding_window": 5, "sliding_window_pattern": 2}),
    "gpt-oss: sinks, window, experts": (
        "GptOssConfig",
        {"sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gpt2: learned positions": (
        "GPT2Config",
        {
            **{name: ... for name in _COMMON if name not in ("vocab_size", "initializer_range")},
            **{"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256, "eos_token_id": None, "bos_token_id": None},
        },
    ),
    "deepseek-v3: keys wider than values": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "head_dim": ...,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
    ),
    "llama, longrope": ("LlamaConfig", {"rope_parameters": _LONGROPE}),
    "llama, dynamic rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, "max_position_embeddings": 64},
    ),
    "gemma": ("GemmaConfig", {}),
    "gemma3n: layers without KV of their own": (
        "Gemma3nTextConfig",
        {
            **{"num_hidden_layers": 4, "sliding_window": 5, "num_kv_shared_layers": 2, "laurel_rank": 4},
            **{"layer_types": _MIXED_LAYERS, "activation_sparsity_pattern": [0.0] * 4},
            **{
                "vocab_size_per_layer_input": VOCAB_SIZE,
                "hidden_size_per_layer_input": 8,
                "intermediate_size": [48] * 4,
            },
        },
    ),
    "gemma4: wider heads in some layers": (
        "Gemma4TextConfig",
        {
            **{"num_hidden_layers": 4, "sliding_window": 5, "layer_types": _MIXED_LAYERS, "global_head_dim": 16},
            **{"vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2},
        },
    ),
    "qwen3-moe": ("Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3: window": ("Olmo3Config", {"sliding_window": 5}),
    "granite: factors": ("GraniteConfig", {"attention_multiplier": 0.3, "logits_scaling": 2.0}),
    "smollm3: layers without rope": ("SmolLM3Config", {"no_rope_layer_interval": 2}),
    "cohere": ("CohereConfig", {}),
    "cohere2: window": ("Cohere2Config", {"sliding_window": 5, "sliding_window_pattern": 2}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 6}),
    "phi: partial rope": ("PhiConfig", {}),
    "phi3": ("Phi3Config", {}),
    "opt: learned positions": ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gpt-neox": ("GPTNeoXConfig", {}),
    "glm4": ("Glm4Config", {}),
    "exaone4: window": ("Exaone4Config", {"sliding_window": 5, "sliding_window_pattern": 2}),
    "ministral3: scale by position": ("Ministral3Config", {"rope_parameters": _SCALED_ROPE}),
}
"""Name -> (class of the configuration, what is other than `_COMMON`)."""


def make_model(config_class: str, overrides: dict[str, Any]) -> Any:
    """A random model in fp32; an override of `...` takes a common value out."""
    values = {name: value for name, value in {**_COMMON, **overrides}.items() if value is not ...}
    torch.manual_seed(7)
    config = getattr(transformers, config_class)(**values)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def save_model(family: str, directory: Path) -> None:
    """Writes a random model with a tokenizer of the words w0, w1, ... ."""
    make_model(*FAMILIES[family]).save_pretrained(directory)
    save_tokenizer(directory)


def save_tokenizer(directory: Path) -> None:
    """Writes a tokenizer of the words w0, w1, ... ."""
    words = {f"w{i}": i for i in range(VOCAB_SIZE)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))


def served(model: Any) -> LoadedModel:
    """The same model with our attention."""
    return prepare_model(copy.deepcopy(model), "float32", "test")


def plain_greedy(model: Any, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probabilities, by whole forward passes without any cache."""
    tokens, logprobs = list(prompt), []
    for _ in range(num_tokens):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
        tokens.append(int(logits.argmax()))
        logprobs.append(float(torch.log_softmax(logits, -1)[tokens[-1]]))
    return tokens[len(prompt) :], logprobs


def engine_run(
    loaded: LoadedModel,
    prompts: list[list[int]],
    sampling: list[SamplingParams],
    *,
    page_size: int = 4,
    budget: int = 9,
    num_pages: int = 64,
    processors: Sequence[LogitsProcessor] = (),
    emitted: Sequence[Sequence[int]] | None = None,
    swap: SwapSpace | None = None,
) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of prompts that arrive one step after the other, in one engine; each may go on after
    tokens that were emitted elsewhere.
    """
    layout = loaded.layout(page_size)
    host = PlainPool(layout, swap.totals().num_host_pages) if swap else None
    runner = ModelRunner(loaded, layout, num_pages, PlainPool(layout, num_pages), host, processors)
    limits = SchedulerLimits(
        page_size=page_size,
        max_num_seqs=budget,
        max_num_batched_tokens=budget,
        max_model_len=256,
        least_tokens=page_size,
    )
    core = EngineCore(limits, PagePool(num_pages), runner, swap=swap)
    results: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
    waiting = [
        Add(
            Request(
                key=str(i),
                prompt_token_ids=tuple(prompt),
                emitted_token_ids=tuple(emitted[i]) if emitted else (),
                sampling=sampling[i],
                eos_token_ids=frozenset(),
                arrival_s=0.0,
            )
        )
        for i, prompt in enumerate(prompts)
    ]
    open_keys = {add.request.key for add in waiting}
    while open_keys:
        core.begin_step([waiting.pop(0)] if waiting else [])
        for event in core.step(0.0).events:
            assert not isinstance(event, SequenceFailed), event.message
            if isinstance(event, TokensSampled):
                tokens, logprobs = results[int(event.key)]
                tokens.extend(event.token_ids)
                logprobs.extend(p.chosen.logprob for p in event.logprobs)
                if event.finish_reason is not None:
                    open_keys.remove(event.key)
        core.check()
    return results
