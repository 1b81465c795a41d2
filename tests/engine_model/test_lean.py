"""The lean definition against transformers' plain model, and what it leaves to transformers."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pdserve.core.errors import ConfigError
from pdserve.core.sampling import SamplingParams
from pdserve.engine.attention import PagedContext
from pdserve.engine.forward_batch import ForwardBatch, build_batch
from pdserve.engine.kv_cache import layer_views
from pdserve.engine.loader import load_model
from pdserve.engine.models.lean import LeanModel, inverse_frequencies
from pdserve.engine.models.spec import DEFAULTS
from pdserve.engine.step import ScheduledSequence, SchedulerOutput
from pdserve.kernels.cpu import attention as compiled
from pdserve.kernels.dispatch import Kernels
from tests.engine_model.models import VOCAB_SIZE, engine_run, make_model, plain_greedy

LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 3e4, "factor": 2.0}
KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"num_key_value_heads": None, "head_dim": None}),
    "llama, wide heads": ("LlamaConfig", {"head_dim": 12, "rms_norm_eps": 1e-3}),
    "llama, tied": ("LlamaConfig", {"tie_word_embeddings": True, "rope_parameters": LINEAR}),
    "llama, biases": ("LlamaConfig", {"attention_bias": True, "rope_parameters": LLAMA3}),
    "qwen2": ("Qwen2Config", {"head_dim": ...}),
    "qwen2, window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {}),
    "qwen3, biases, window": (
        "Qwen3Config",
        {"attention_bias": True, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral, window": ("MistralConfig", {"sliding_window": 6}),
}
UNKNOWN: dict[str, tuple[str, dict[str, Any], str]] = {
    "family": ("GemmaConfig", {}, "'gemma' have no lean definition"),
    "activation": ("LlamaConfig", {"hidden_act": "gelu"}, "'gelu', not silu"),
    "mlp bias": ("LlamaConfig", {"mlp_bias": True}, "MLP has biases"),
    "key": ("LlamaConfig", {"logit_scaling": 2.0}, "logit_scaling"),
    "rope type": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
        "rope type is 'yarn'",
    ),
    "partial rotation": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor",
    ),
}


def randomised(config_class: str, overrides: dict[str, Any]) -> Any:
    """A model whose norms and biases are random too."""
    model = make_model(config_class, overrides)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.mark.parametrize("name", KNOWN)
def test_tokens_equal_the_plain_model_and_kv_is_exchangeable(name: str, tmp_path: Path) -> None:
    model = randomised(*KNOWN[name])
    model.save_pretrained(tmp_path)
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(n)] for n in (1, 3, 4, 5, 30)]
    greedy = SamplingParams(temperature=0.0, max_tokens=7, logprobs=0)
    loaded = load_model(tmp_path, impl="lean")
    assert isinstance(loaded.model, LeanModel)
    results = engine_run(loaded, prompts, [greedy] * len(prompts))
    for prompt, (tokens, logprobs) in zip(prompts, results, strict=True):
        expected_tokens, expected_logprobs = plain_greedy(model, prompt, 7)
        assert tokens == expected_tokens
        assert logprobs == pytest.approx(expected_logprobs, abs=2e-4)
    theirs = load_model(tmp_path, impl="transformers")
    assert loaded.identity == theirs.identity
    for fact in ("kv_shapes", "max_model_len", "vocab_size", "eos_token_ids", "dtype"):
        assert getattr(loaded, fact) == getattr(theirs, fact), fact


def one_by_one(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Attention that `LeanModel` does not know as the compiled one, so that it calls each kernel itself."""
    return compiled.paged_attention(*args, **kwargs)


@pytest.mark.usefixtures("compiled_kernels")
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("name", KNOWN)
def test_all_layers_in_one_call_have_the_bits_of_one_kernel_after_the_other(
    name: str, quantization: str | None, tmp_path: Path
) -> None:
    """A chunk with context, a decode, a prompt; rows in any order, one twice, more than tokens in the second pass."""
    randomised(*KNOWN[name]).save_pretrained(tmp_path)
    loaded = load_model(tmp_path, impl="lean", quantization=quantization)
    layout = loaded.layout(4)
    generator = torch.Generator().manual_seed(5)
    memory = torch.rand(12 * layout.page_bytes // 4, generator=generator).sub_(0.5)
    results = []
    for attention in (compiled.paged_attention, one_by_one):
        pool = memory.clone()
        pages = layer_views(layout, 12, memoryview(pool.numpy()).cast("B"))
        kernels = Kernels(compiled.store_kv, attention)
        for batch, rows in (
            (batch_of((5, 6, [3, 0, 7]), (9, 1, [1, 5, 2]), (0, 7, [4, 6])), [5, 6, 13, 0, 6]),
            (batch_of((6, 1, [3, 0])), [0, 0, 0]),
        ):
            with torch.inference_mode():
                logits = loaded.model(
                    input_ids=batch.token_ids[None],
                    position_ids=batch.positions[None],
                    logits_to_keep=torch.tensor(rows),
                    pdserve=PagedContext(batch, pages, kernels),
                ).logits
            assert logits.shape == (1, len(rows), VOCAB_SIZE) and logits.isfinite().all()
            results.append(logits)
        results.append(pool)
    half = len(results) // 2
    assert all(map(torch.equal, results[:half], results[half:]))
    assert not torch.equal(results[2], memory)


@pytest.mark.usefixtures("compiled_kernels")
def test_kernels_that_are_given_are_called(tmp_path: Path) -> None:
    """Also over pages that were computed in one call before."""
    randomised(*KNOWN["llama"]).save_pretrained(tmp_path)
    loaded = load_model(tmp_path, impl="lean")
    layout = loaded.layout(4)
    pages = layer_views(layout, 2, memoryview(bytearray(2 * layout.page_bytes)))
    batch, stored = batch_of((0, 3, [1])), []

    def store(*args: Any) -> None:
        stored.append(args)
        compiled.store_kv(*args)

    for kernels, calls in (
        (Kernels(compiled.store_kv, compiled.paged_attention), 0),
        (Kernels(store, compiled.paged_attention), 3),
        (Kernels(store, one_by_one), 6),
    ):
        with torch.inference_mode():
            loaded.model(
                input_ids=batch.token_ids[None],
                position_ids=batch.positions[None],
                logits_to_keep=torch.tensor([2]),
                pdserve=PagedContext(batch, pages, kernels),
            )
        assert len(stored) == calls


@pytest.mark.usefixtures("compiled_kernels")
def test_threads_that_share_a_model_compute_each_over_its_own_pages(tmp_path: Path) -> None:
    randomised(*KNOWN["llama"]).save_pretrained(tmp_path)
    loaded = load_model(tmp_path, impl="lean")
    layout = loaded.layout(4)
    batch = batch_of((0, 3, [1]))

    def stored(_: int) -> bytes:
        memory = bytearray(2 * layout.page_bytes)
        context = PagedContext(
            batch,
            layer_views(layout, 2, memoryview(memory)),
            Kernels(compiled.store_kv, compiled.paged_attention),
        )
        with torch.inference_mode():
            loaded.model(
                input_ids=batch.token_ids[None],
                position_ids=batch.positions[None],
                logits_to_keep=torch.tensor([2]),
                pdserve=context,
            )
        return bytes(memory)

    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(stored, range(400)))) == 1


def batch_of(*sequences: tuple[int, int, list[int]]) -> ForwardBatch:
    """A step of (tokens before, new tokens, page table)."""
    rows = [
        ScheduledSequence(str(i), start, range(i, i + num), table, None, 0, range(start + num), start + num)
        for i, (start, num, table) in enumerate(sequences)
    ]
    return build_batch(SchedulerOutput(0, tuple(rows), sum(num for _, num, _ in sequences)), 4)


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_it_does_not_know_exactly_is_transformers_business(name: str, tmp_path: Path) -> None:
    config_class, overrides, why = UNKNOWN[name]
    make_model(config_class, overrides).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"--model-impl is 'lean', but .*{why}"):
        load_model(tmp_path, impl="lean")
    assert not isinstance(load_model(tmp_path).model, LeanModel)


def test_other_weights_or_another_type_are_transformers_business(tmp_path: Path) -> None:
    make_model("LlamaConfig", {}).save_pretrained(tmp_path)
    assert isinstance(load_model(tmp_path).model, LeanModel)
    assert not isinstance(load_model(tmp_path, "bfloat16").model, LeanModel)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.self_attn.q_proj.bias"] = torch.ones(32)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"1 of its weights are .* model\.layers\.1\.self_attn\.q_proj"):
        load_model(tmp_path, impl="lean")


def test_shards_and_narrow_weights_are_read(tmp_path: Path) -> None:
    model = make_model("LlamaConfig", {}).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    greedy = SamplingParams(temperature=0.0, max_tokens=5)
    [(tokens, _)] = engine_run(load_model(tmp_path, impl="lean"), [[5, 6, 7]], [greedy])
    assert tokens == plain_greedy(model.float(), [5, 6, 7], 5)[0]


def broken_header(path: Path) -> None:
    path.write_bytes(b"\x20" + bytes(7) + b"{" * 32)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-50])


def misplaced(path: Path) -> None:
    """A tensor that begins within the header, as long as it should be."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    offsets = header["model.norm.weight"]["data_offsets"]
    header["model.norm.weight"]["data_offsets"] = [-8, offsets[1] - offsets[0] - 8]
    changed = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(changed)) + changed + data[8 + size :])


@pytest.mark.parametrize("damage", [broken_header, cut, misplaced])
def test_damaged_files_are_named(damage: Callable[[Path], None], tmp_path: Path) -> None:
    make_model("LlamaConfig", {}).save_pretrained(tmp_path)
    damage(tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"cannot load the model: .*model\.safetensors"):
        load_model(tmp_path)


@pytest.mark.parametrize("kind", DEFAULTS)
def test_keys_left_out_mean_what_transformers_takes_for_them(kind: str) -> None:
    config_class = type(transformers.AutoConfig.for_model(kind))
    fields = config_class.__dataclass_fields__
    assert {name: fields[name].default for name in DEFAULTS[kind] if name in fields} == {
        name: value for name, value in DEFAULTS[kind].items() if name in fields
    }
    assert set(DEFAULTS[kind]) - set(fields) <= {"head_dim"}


@pytest.mark.parametrize("rope", [LLAMA3, LINEAR, {"rope_type": "default", "rope_theta": 1e5}])
def test_angles_are_those_of_transformers_to_the_last_bit(rope: dict[str, Any]) -> None:
    config = transformers.LlamaConfig(head_dim=64, rope_parameters=dict(rope))
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    assert torch.equal(inverse_frequencies(rope, 64), rotary.inv_freq)
    assert set(ROPE_INIT_FUNCTIONS) >= {"llama3", "linear"}


def test_old_files_keep_rope_parameters_elsewhere(tmp_path: Path) -> None:
    make_model("LlamaConfig", {"rope_parameters": LLAMA3}).save_pretrained(tmp_path)
    new = load_model(tmp_path, impl="lean")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    scaling = config.pop("rope_parameters")
    config |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    path.write_text(json.dumps(config))
    old = load_model(tmp_path, impl="lean")
    assert torch.equal(old.model._inv_freq, new.model._inv_freq)
    assert old.identity == load_model(tmp_path, impl="transformers").identity


def test_a_head_that_the_files_repeat_is_the_embedding_or_transformers_business(tmp_path: Path) -> None:
    """transformers ties head and embedding only where the files do not hold two different ones."""
    make_model("LlamaConfig", {"tie_word_embeddings": True}).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    embedding = weights["model.embed_tokens.weight"]
    save_file({**weights, "lm_head.weight": embedding.clone()}, path, {"format": "pt"})
    assert isinstance(load_model(tmp_path).model, LeanModel)
    save_file({**weights, "lm_head.weight": embedding.flip(0)}, path, {"format": "pt"})
    with pytest.raises(ConfigError, match="the head is the embedding, but its files have another one"):
        load_model(tmp_path, impl="lean")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    [(tokens, _)] = engine_run(load_model(tmp_path), [[5, 6, 7]], [SamplingParams(temperature=0.0, max_tokens=5)])
    assert tokens == plain_greedy(plain, [5, 6, 7], 5)[0]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 3}, "4 heads are no multiple of its 3 KV heads"),
        ({"hidden_size": "32"}, "hidden_size is '32'"),
        ({"head_dim": -8}, "head_dim is -8"),
        ({"max_position_embeddings": None}, "max_position_embeddings is None"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'"),
        ({"rope_parameters": {**LINEAR, "factor": "2"}}, "factor is '2'"),
    ],
)
def test_numbers_that_are_none_are_named(changed: dict[str, Any], why: str, tmp_path: Path) -> None:
    make_model("LlamaConfig", {}).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(ConfigError, match=f"--model-impl is 'lean', but .*{why}"):
        load_model(tmp_path, impl="lean")


def rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the header of a safetensors file, not its data."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    change(header)
    changed = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(changed)) + changed + data[8 + size :])


@pytest.mark.parametrize(
    "told",
    [
        {"data_offsets": [0, 128]},  # another tensor's bytes
        {"data_offsets": [False, 128]},
        {"data_offsets": ["0", "128"]},
        {"dtype": None},
        {"shape": [32.0]},
        {"shape": [-32]},
        {"shape": ["32"]},
    ],
)
def test_a_header_that_cannot_be_is_refused_before_a_weight_is_read(told: dict[str, Any], tmp_path: Path) -> None:
    make_model("LlamaConfig", {}).save_pretrained(tmp_path)
    rewritten(tmp_path / "model.safetensors", lambda header: header["model.norm.weight"].update(told))
    with pytest.raises(ConfigError, match=r"cannot load the model: .*model\.safetensors") as caught:
        load_model(tmp_path)
    assert caught.value.reason == "CORRUPT_MODEL"


@pytest.mark.parametrize("impl", ["lean", "transformers"])
@pytest.mark.parametrize(
    ("file", "changed"),
    [
        ("config.json", {"rope_parameters": 5}),
        ("config.json", {"rope_parameters": {"rope_type": "default", "rope_theta": 0}}),
        ("config.json", {"eos_token_id": 2.0}),
        ("config.json", {"eos_token_id": "a"}),
        ("generation_config.json", {"eos_token_id": [1, "x"]}),
        ("generation_config.json", {"eos_token_id": 1e3}),
        ("config.json", {"rms_norm_eps": True}),
        ("config.json", {"quantization_config": {"quant_method": "fp8"}}),
        ("config.json", {"num_attention_heads": 3}),
    ],
)
def test_a_configuration_that_cannot_be_is_a_refusal(
    impl: str, file: str, changed: dict[str, Any], tmp_path: Path
) -> None:
    make_model("LlamaConfig", {}).save_pretrained(tmp_path)
    path = tmp_path / file
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(ConfigError):
        load_model(tmp_path, impl=impl)


def test_ends_of_sequence_that_no_model_can_choose_are_left_out(tmp_path: Path) -> None:
    make_model("LlamaConfig", {}).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [2, -1, VOCAB_SIZE]}))
    for impl in ("lean", "transformers"):
        assert load_model(tmp_path, impl=impl).eos_token_ids == {2}


def test_integers_are_no_weights(tmp_path: Path) -> None:
    make_model("LlamaConfig", {}).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.1.mlp.up_proj.weight"] = torch.ones(48, 32, dtype=torch.int8)
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"such as model\.layers\.1\.mlp\.up_proj\.weight, are quantized"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("config_class", "changed", "why"),
    [
        ("LlamaConfig", {"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'"),
        ("LlamaConfig", {"attention_bias": 1}, "attention_bias is 1"),
        ("LlamaConfig", {"rope_interleaved": True}, "rotation pairs neighbours"),
        ("Qwen2Config", {"use_sliding_window": "no"}, "use_sliding_window is 'no'"),
        ("Qwen2Config", {"layer_types": 3}, "3 layers .* are 3"),
        ("Qwen2Config", {"layer_types": [["full_attention"]] * 3}, "3 layers .* are"),
        ("Qwen2Config", {"layer_types": ["sliding_attention"] * 3}, "window of None are"),
        (
            "Qwen3Config",
            {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": "1", "layer_types": None},
            "max_window_layers is '1'",
        ),
    ],
)
def test_values_of_another_kind_are_named(config_class: str, changed: dict[str, Any], why: str, tmp_path: Path) -> None:
    make_model(config_class, {"head_dim": ...} if config_class == "Qwen2Config" else {}).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(ConfigError, match=f"--model-impl is 'lean', but .*{why}"):
        load_model(tmp_path, impl="lean")


def test_a_key_that_says_nothing_keeps_no_model_from_being_lean(tmp_path: Path) -> None:
    make_model("LlamaConfig", {}).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_interleaved": False}))
    assert isinstance(load_model(tmp_path).model, LeanModel)
