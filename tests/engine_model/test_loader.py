"""Checkpoints as they lie in directories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.core.errors import ConfigError
from pdserve.core.sampling import SamplingParams
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
