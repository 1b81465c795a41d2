"""Checkpoints as they lie in directories."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.core.errors import ConfigError
from pdserve.core.sampling import SamplingParams
from pdserve.engine import loader
from pdserve.engine.loader import load_model
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
