"""GGUF files: made here of tiny models with the format's own library, answered as those models answer."""

from __future__ import annotations

import inspect
import json
import random
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, TokenType, get_tensor_name_map
from gguf.quants import dequantize, quantize
from tokenizers import pre_tokenizers
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from pdserve.core.errors import ConfigError
from pdserve.core.sampling import SamplingParams
from pdserve.core.tokenizer import Tokenizer
from pdserve.engine import gguf_convert, model_store
from pdserve.engine.gguf_tokenizer import Refused
from pdserve.engine.loader import load_model
from pdserve.engine.model_store import resolve_model, weights_digest
from tests.engine_model.models import VOCAB_SIZE, engine_run, make_model, plain_greedy

LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8192,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "LlamaConfig", {}),
    "llama, tied, linear rope": (
        "llama",
        "LlamaConfig",
        {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "linear", "rope_theta": 3e4, "factor": 2.0}},
    ),
    "llama, stretched rope": ("llama", "LlamaConfig", {"rope_parameters": LLAMA3}),
    "qwen2": ("qwen2", "Qwen2Config", {"head_dim": ...}),
    "qwen3": ("qwen3", "Qwen3Config", {"head_dim": 12}),
}
ARCHITECTURES = {"llama": MODEL_ARCH.LLAMA, "qwen2": MODEL_ARCH.QWEN2, "qwen3": MODEL_ARCH.QWEN3}
PRE = {"llama": "llama-bpe", "qwen2": "qwen2", "qwen3": "qwen2"}
Change = Callable[["Contents"], object]


@dataclass
class Contents:
    """What a file holds."""

    kind: str
    numbers: dict[str, float]
    tensors: dict[str, np.ndarray[Any, Any]]
    tokens: list[str] = field(default_factory=lambda: [f"t{i}" for i in range(VOCAB_SIZE)])
    types: list[int] = field(default_factory=lambda: [TokenType.NORMAL] * VOCAB_SIZE)
    merges: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    flags: dict[str, bool] = field(default_factory=dict)
    ids: dict[str, int] = field(default_factory=lambda: {"bos": 1, "eos": 2})


def contents(kind: str, model: Any) -> Contents:
    """A transformers model in llama.cpp's names, keys and order of rows."""
    config = model.config
    names = get_tensor_name_map(ARCHITECTURES[kind], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data, part = tensor.numpy(), name.split(".")[-2]
        if kind == "llama" and part in heads:
            data = data.reshape(heads[part], 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = np.ascontiguousarray(data)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    numbers = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    texts = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": PRE[kind]}
    if rope["rope_type"] == "linear":
        numbers["rope.scaling.factor"] = rope["factor"]
        texts[f"{kind}.rope.scaling.type"] = "linear"
    if rope["rope_type"] == "llama3":
        plain = rope["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
        tensors["rope_freqs.weight"] = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    return Contents(kind, numbers, tensors, texts=texts)


def write(file: Path, has: Contents, quantised: GGMLQuantizationType | None = None) -> Path:
    writer = GGUFWriter(str(file), has.kind)
    for key, value in has.numbers.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{has.kind}.{key}", value)
    for key, text in has.texts.items():
        writer.add_string(key, text)
    for key, flag in has.flags.items():
        writer.add_bool(f"tokenizer.ggml.{key}", flag)
    for name, token_id in has.ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token_id)
    writer.add_token_list(has.tokens)
    writer.add_token_types(has.types)
    writer.add_token_merges(has.merges or ["t 1"])
    for name, data in has.tensors.items():
        if quantised is not None and data.ndim == 2:
            writer.add_tensor(name, quantize(data, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def converted(file: Path) -> Path:
    directory = file.with_suffix(".made")
    directory.mkdir()
    gguf_convert.convert(file, directory)
    return directory


@pytest.mark.parametrize(
    "name", [n if n in ("llama, stretched rope", "qwen2") else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)
def test_a_converted_model_answers_as_the_one_that_was_written(name: str, tmp_path: Path) -> None:
    kind, config_class, overrides = MODELS[name]
    model = make_model(config_class, overrides)
    loaded = load_model(converted(write(tmp_path / "tiny.gguf", contents(kind, model))), impl="lean")
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(n)] for n in (2, 20)]
    results = engine_run(loaded, prompts, [SamplingParams(temperature=0.0, max_tokens=6)] * 2)
    assert [tokens for tokens, _ in results] == [plain_greedy(model, prompt, 6)[0] for prompt in prompts]
    assert loaded.max_model_len == 256 and loaded.eos_token_ids == {2}


@pytest.mark.slow
def test_quantised_weights_are_what_the_file_says_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_convert, "_SHARD_BYTES", 20_000)
    has = contents("qwen2", make_model("Qwen2Config", {"head_dim": ..., "intermediate_size": 64}))
    kind = GGMLQuantizationType.Q8_0
    directory = converted(write(tmp_path / "tiny.gguf", has, kind))
    assert len(list(directory.glob("*.safetensors"))) > 2
    for impl in ("lean", "transformers"):
        model = load_model(directory, impl=impl).model
        assert model is not None
    import torch
    from safetensors import safe_open

    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    name = "model.layers.1.mlp.up_proj.weight"
    with safe_open(directory / index[name], "pt") as f:
        expected = dequantize(quantize(has.tensors["blk.1.ffn_up.weight"], kind), kind)
        assert torch.equal(f.get_tensor(name), torch.from_numpy(expected))


def trained(pattern: str | None) -> tokenizers.Tokenizer:
    """A byte-level BPE that splits as the model's own does."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    split = [] if pattern is None else [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")]
    digits = [pre_tokenizers.Digits(individual_digits=True)] if pattern is None else []
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    made.pre_tokenizer = pre_tokenizers.Sequence([*digits, *split, level])
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator(["the year 2024, it's 100000 km; don't go\n\n  there then 1999"] * 9, trainer)
    return made


SPLITS: Mapping[str, str | None] = {
    "smollm": None,
    "qwen2": PRETOKENIZE_REGEX,
    "llama-bpe": inspect.signature(TikTokenConverter).parameters["pattern"].default,
}


@pytest.mark.parametrize("pre", SPLITS)
def test_text_becomes_the_tokens_of_the_model(pre: str, tmp_path: Path) -> None:
    theirs = trained(SPLITS[pre])
    has = contents("llama", make_model("LlamaConfig", {}))
    model = json.loads(theirs.to_str())["model"]
    has.tokens = [*sorted(model["vocab"], key=model["vocab"].__getitem__), "<think>"]
    has.types = [TokenType.CONTROL] * 2 + [TokenType.NORMAL] * (len(has.tokens) - 3) + [TokenType.USER_DEFINED]
    has.merges = [" ".join(merge) for merge in model["merges"]]
    has.texts["tokenizer.ggml.pre"] = pre
    has.texts["tokenizer.chat_template"] = "{{ messages[0].content }}</s>"
    has.ids = {"bos": 0, "eos": 1, "eot": len(has.tokens) - 1}
    directory = converted(write(tmp_path / "tiny.gguf", has))
    ours = Tokenizer.from_dir(directory)
    for text in ("it's 100000 km", "2024\n\n\n  don't  ", "the then\tthere 19", "é🎉 x", " ", "THE YEAR"):
        assert ours.encode_part(text) == theirs.encode(text).ids, text
        assert ours.encode(text) == [0] * (pre == "llama-bpe") + theirs.encode(text).ids
    assert ours.encode_part("a<think>b</s>")[1::2] == [len(has.tokens) - 1, 1]
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == [1, len(has.tokens) - 1]


REFUSED: dict[str, tuple[Change, str]] = {
    "architecture": (lambda has: setattr(has, "kind", "gemma3"), "architecture is 'gemma3'; .* llama, qwen2, qwen3"),
    "tensor": (lambda has: has.tensors.update({"blk.0.attn_q.bias": np.zeros(32, np.float32)}), "blk.0.attn_q.bias"),
    "key": (lambda has: has.numbers.update({"logit_scale": 2.0}), "llama.logit_scale"),
    "experts": (lambda has: has.numbers.update({"expert_count": 8}), "llama.expert_count"),
    "partial rotation": (lambda has: has.numbers.update({"rope.dimension_count": 4}), "rope.dimension_count is 4"),
    "rope": (lambda has: has.texts.update({"llama.rope.scaling.type": "yarn"}), "rope.scaling.type is 'yarn'"),
    "rope factors": (
        lambda has: has.tensors.update({"rope_freqs.weight": np.asarray([1, 1, 2, 9], np.float32)}),
        "rope_freqs.weight are not",
    ),
    "two ropes": (
        lambda has: (
            has.tensors.update({"rope_freqs.weight": np.ones(4, np.float32)}),
            has.numbers.update({"rope.scaling.factor": 4.0}),
        ),
        "both rope_freqs.weight and a llama.rope.scaling.factor of 4",
    ),
    "not causal": (lambda has: has.numbers.update({"attention.causal": 0}), "attention.causal is false"),
    "sentencepiece": (lambda has: has.texts.update({"tokenizer.ggml.model": "llama"}), "ggml.model is 'llama'"),
    "split of text": (lambda has: has.texts.update({"tokenizer.ggml.pre": "tekken"}), "tokenizer.ggml.pre is 'tekken'"),
    "end of prompts": (lambda has: has.flags.update({"add_eos_token": True}), "add_eos_token is true"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused_by_name(name: str, tmp_path: Path) -> None:
    change, message = REFUSED[name]
    has = contents("llama", make_model("LlamaConfig", {}))
    change(has)
    with pytest.raises(Refused, match=message):
        converted(write(tmp_path / "tiny.gguf", has))


@pytest.mark.slow
def test_a_file_is_converted_once_into_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    has = contents("qwen3", make_model("Qwen3Config", {}))
    file = write(tmp_path / "tiny.gguf", has)
    directory = resolve_model(str(file))
    assert directory.parent == tmp_path / "cache" / "models" / "gguf" and weights_digest(directory)
    made = (directory / "config.json").stat().st_mtime_ns
    assert resolve_model(str(file)) == directory and (directory / "config.json").stat().st_mtime_ns == made
    with monkeypatch.context() as later:
        later.setattr(model_store, "_CONVERTER", model_store._CONVERTER + 1)
        assert resolve_model(str(file)) != directory
    with pytest.raises(ConfigError, match=r"name the GGUF file itself: --model .*tiny\.gguf"):
        resolve_model(str(tmp_path))
    has.texts["tokenizer.ggml.pre"] = "tekken"
    write(file, has)
    with pytest.raises(ConfigError, match=r"tiny\.gguf cannot be converted: its tokenizer.ggml.pre is 'tekken'"):
        resolve_model(str(file))
    file.write_bytes(b"GGUF but no more")
    with pytest.raises(ConfigError, match=r"tiny\.gguf cannot be converted: it is damaged or not whole"):
        resolve_model(str(file))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.5, 0.999])
def test_a_file_that_is_not_whole_is_told_so(tmp_path: Path, share: float) -> None:
    file = write(tmp_path / "tiny.gguf", contents("llama", make_model("LlamaConfig", {})))
    data = file.read_bytes()
    file.write_bytes(data[: 4 + int(share * len(data))])
    with pytest.raises(Refused, match="it is damaged or not whole"):
        converted(file)


def test_a_factor_without_a_type_is_a_linear_scaling(tmp_path: Path) -> None:
    has = contents("llama", make_model(*MODELS["llama, tied, linear rope"][1:]))
    del has.texts["llama.rope.scaling.type"]
    directory = converted(write(tmp_path / "tiny.gguf", has))
    rope = json.loads((directory / "config.json").read_text())["rope_parameters"]
    assert rope == {"rope_theta": 3e4, "rope_type": "linear", "factor": 2.0}


def endless(data: bytes) -> bytes:
    """An array longer than the file."""
    key = b"tokenizer.ggml.token_type"
    kept = key + struct.pack("<IIQ", 9, 5, VOCAB_SIZE)
    assert kept in data
    return data.replace(kept, key + struct.pack("<IIQ", 9, 5, 1 << 40))


def overlapping(data: bytes) -> bytes:
    """A tensor in the place of the first one."""
    name = b"blk.1.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8 + 4
    return data[:at] + bytes(8) + data[at + 8 :]


def repeated(data: bytes) -> bytes:
    """A key that occurs twice."""
    return data.replace(b"ggml.bos_token_id", b"ggml.eos_token_id")


@pytest.mark.parametrize("damage", [pytest.param(endless, marks=pytest.mark.slow), overlapping, repeated])
def test_a_damaged_file_is_told_so(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    file = write(tmp_path / "tiny.gguf", contents("llama", make_model("LlamaConfig", {})))
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(Refused, match="it is damaged"):
        converted(file)


@pytest.mark.parametrize(
    "change",
    [
        lambda has: has.numbers.update({"attention.head_count": 3}),
        lambda has: has.ids.update({"eos": 1000}),
        lambda has: has.types.pop(),
    ],
)
def test_what_does_not_fit_together_is_told_in_a_line(
    change: Change, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    has = contents("llama", make_model("LlamaConfig", {}))
    change(has)
    file = write(tmp_path / "tiny.gguf", has)
    (tmp_path / "made").mkdir()
    capsys.readouterr()
    assert gguf_convert.main([str(file), str(tmp_path / "made")]) == 1
    assert capsys.readouterr().err.startswith("it is damaged: what it says of itself does not fit together")
