"""Checkpoints as they lie in directories."""

from __future__ import annotations

import contextlib
import json
import math
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.core.errors import ConfigError
from pdserve.core.sampling import SamplingParams
from pdserve.engine import loader
from pdserve.engine.loader import load_model
from pdserve.engine.model_store import weights_digest
from pdserve.engine.models.headers import weight_files
from tests.engine_model.models import FAMILIES, engine_run, make_model, plain_greedy

PROMPT = [5, 17, 3, 88, 41]


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    make_model(*FAMILIES["llama"]).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    return tmp_path


def test_a_sharded_checkpoint_answers_as_the_model_that_was_saved(sharded: Path) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=6)
    (tokens, _), *_ = engine_run(load_model(sharded), [PROMPT], [greedy])
    assert tokens == plain_greedy(make_model(*FAMILIES["llama"]), PROMPT, 6)[0]


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ConfigError, match=shard.name):
        load_model(sharded)


@pytest.mark.parametrize(("damage", "message"), [("drop", "are missing"), ("narrow", "shape|mismatch")])
def test_weights_that_transformers_would_make_up_are_refused(tmp_path: Path, damage: str, message: str) -> None:
    make_model(*FAMILIES["llama"]).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if damage == "drop":
        del weights[name]
    else:
        weights[name] = torch.zeros(3, 32)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path)


def test_a_type_of_model_that_is_not_known_is_refused(tmp_path: Path) -> None:
    make_model(*FAMILIES["llama"]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "t5", "architectures": ["T5Model"]}))
    with pytest.raises(ConfigError, match="cannot load the model"):
        load_model(tmp_path)


@pytest.mark.parametrize("impl", ["auto", "transformers"])
def test_a_configuration_of_fewer_layers_than_the_files_hold_is_refused(tmp_path: Path, impl: str) -> None:
    make_model(*FAMILIES["llama"]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_hidden_layers"] == 3
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(ConfigError, match=r"says 2 layers, and its files hold more, such as model\.layers\.2\."):
        load_model(tmp_path, impl=impl)


@pytest.mark.parametrize(
    ("unused", "ahead", "refused"),
    [
        ("model.layers.1.self_attn.rotary_emb.inv_freq", 0, False),
        ("model.layers.2.mlp.up_proj.weight", 0, True),
        ("layers.2.mlp.up_proj.weight", 0, True),  # saved without its head
        ("model.layers.2.mlp.up_proj.weight", 1, False),
        ("model.layers.3.mlp.up_proj.weight", 1, True),
        ("model.layers.1.mlp.experts.7.weight", 0, False),
        ("vision_tower.encoder.layers.20.mlp.weight", 0, False),
        ("mtp.layers.5.weight", 0, False),
        ("score.weight", 0, False),
    ],
)
def test_of_what_is_not_used_only_layers_beyond_the_last_are_refused(unused: str, ahead: int, refused: bool) -> None:
    own = ["model.embed_tokens.weight", "model.layers.0.mlp.experts.3.weight", "model.layers.1.mlp.experts.0.weight"]
    with pytest.raises(ConfigError, match="says 2 layers") if refused else contextlib.nullcontext():
        loader._check_unused(Path("m"), [unused], own, ahead)


DEEP = "[" * 200_000 + "]" * 200_000


def test_files_nested_beyond_reading_are_refused(tmp_path: Path) -> None:
    make_model(*FAMILIES["llama"]).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(struct.pack("<Q", len(DEEP)) + DEEP.encode() + data)
    with pytest.raises(ConfigError, match=r"cannot load the model: .*model\.safetensors"):
        load_model(tmp_path)
    path.write_bytes(data)
    (tmp_path / "config.json").write_text(f'{{"model_type": "llama", "rope_scaling": {DEEP}}}')
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        load_model(tmp_path)


@pytest.mark.parametrize("impl", ["auto", "transformers"])
@pytest.mark.parametrize("family", ["llama", "gpt2: learned positions"])
def test_layers_without_number_are_refused_before_one_is_made(tmp_path: Path, family: str, impl: str) -> None:
    make_model(*FAMILIES[family]).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    name = "n_layer" if "n_layer" in config else "num_hidden_layers"
    path.write_text(json.dumps({**config, name: 10**9}))
    with pytest.raises(ConfigError, match=f"{name} .* is 1000000000; at most 10000"):
        load_model(tmp_path, impl=impl)


def test_code_beside_a_model_is_neither_run_nor_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(*FAMILIES["llama"]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    mine = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "mine", "auto_map": mine}))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    asked: list[str] = []

    def answer(question: str) -> str:
        asked.append(question)
        return "y"

    monkeypatch.setattr("builtins.input", answer)
    with pytest.raises(ConfigError, match="code that lies beside a model is not run"):
        load_model(tmp_path)
    assert not asked and not (tmp_path / "ran").exists()


def test_weights_that_the_digest_does_not_cover_are_refused(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    index = sharded / "model.safetensors.index.json"
    (sharded / "sub").mkdir()
    shard.rename(sharded / "sub" / shard.name)
    index.write_text(index.read_text().replace(shard.name, f"sub/{shard.name}"))
    with pytest.raises(ConfigError, match=f"names 'sub/{shard.name}' as a file of weights"):
        load_model(sharded)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    model = make_model(*FAMILIES["llama"])
    model.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    save_file({"other": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match=r"has neither model\.safetensors nor"):
        load_model(tmp_path)


@pytest.mark.parametrize("impl", ["lean", "transformers"])
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("damage", [math.nan, math.inf])
def test_weights_that_are_no_numbers_are_refused_at_load(
    tmp_path: Path, impl: str, quantization: str | None, damage: float
) -> None:
    make_model(*FAMILIES["llama"]).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = damage
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"not finite|answers other than by itself"):
        load_model(tmp_path, impl=impl, quantization=quantization)


@pytest.mark.parametrize(("family", "warned"), [("gpt2: learned positions", True), ("gemma", False)])
def test_weights_that_int8_does_not_reach_are_told(
    tmp_path: Path, family: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    make_model(*FAMILIES[family]).save_pretrained(tmp_path)
    load_model(tmp_path, quantization="int8")
    assert ("stay float32" in caplog.text) is warned


@pytest.mark.parametrize(
    ("file", "refused"),
    [("a.safetensors", False), ("sub/a.safetensors", True), ("a.bin", True), (5, True), (None, False)],
)
def test_a_configuration_names_weights_only_in_its_directory(tmp_path: Path, file: object, refused: bool) -> None:
    for name in ("a.safetensors", "a.bin", "model.safetensors"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="as a file of weights") if refused else contextlib.nullcontext():
        assert [path.name for path in weight_files(tmp_path, {"transformers_weights": file})] == [
            file or "model.safetensors"
        ]


def other_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(weight) for name, weight in model.state_dict().items()}


@pytest.mark.parametrize("impl", ["lean", "transformers"])
@pytest.mark.parametrize("shard_size", ["20KB", "1GB"])
def test_weights_beside_those_that_count_change_neither_answer_nor_digest(
    tmp_path: Path, shard_size: str, impl: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As hubs have them: a second copy in another format, or of a training's end."""
    model = make_model(*FAMILIES["llama"])
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    alone = load_model(tmp_path, impl=impl)
    assert "not read" not in caplog.text
    torch.save(other_weights(model), tmp_path / "pytorch_model.bin")
    save_file(other_weights(model), tmp_path / "consolidated.safetensors", metadata={"format": "pt"})
    loaded = load_model(tmp_path, impl=impl)
    assert "are not read, such as consolidated.safetensors: the weights are" in caplog.text
    assert loaded.identity == alone.identity and type(loaded.model) is type(alone.model)
    (tokens, _), *_ = engine_run(loaded, [PROMPT], [SamplingParams(temperature=0.0, max_tokens=6)])
    assert tokens == plain_greedy(model, PROMPT, 6)[0]


@pytest.mark.parametrize("impl", ["lean", "transformers"])
def test_a_whole_file_wins_over_shards(sharded: Path, impl: str) -> None:
    other = other_weights(make_model(*FAMILIES["llama"]))
    save_file(other, sharded / "model.safetensors", metadata={"format": "pt"})
    loaded = load_model(sharded, impl=impl)
    assert loaded.identity["weights"] == weights_digest(sharded)
    for shard in sharded.glob("model-*.safetensors"):
        shard.unlink()
    assert load_model(sharded, impl=impl).identity == loaded.identity


@pytest.mark.parametrize("impl", ["auto", "lean", "transformers"])
def test_shards_without_an_index_are_refused(sharded: Path, impl: str) -> None:
    """Nobody says that they are all, or of one model."""
    (sharded / "model.safetensors.index.json").unlink()
    with pytest.raises(ConfigError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"):
        load_model(sharded, impl=impl)


@pytest.mark.parametrize("named", ["{}", '{"weight_map": {}}', '{"weight_map": {"a": ["b"]}}', '{"weight_map": 5}'])
def test_an_index_that_names_no_files_is_refused(sharded: Path, named: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(named)
    with pytest.raises(ConfigError, match=r"has no weight_map|as a file of weights"):
        load_model(sharded)
