"""Packed and quantized linears inside models."""

from __future__ import annotations

import random
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pdserve.core.errors import ConfigError
from pdserve.core.sampling import SamplingParams
from pdserve.engine import loader
from pdserve.engine.build import build_core
from pdserve.engine.config import EngineConfig
from pdserve.engine.kv_cache import PlainPool
from pdserve.engine.loader import LoadedModel, load_model
from pdserve.engine.models.linear import TorchLinear, linear_maker, replace_linears
from pdserve.kernels.cpu import library
from tests.engine_model.models import FAMILIES, VOCAB_SIZE, engine_run, make_model, plain_greedy, save_model, served

compiled = pytest.mark.usefixtures("compiled_kernels")
SOME = (
    *("llama", "gemma2: window, softcap", "gpt-oss: sinks, window, experts", "phi: partial rope"),
    *("deepseek-v3: keys wider than values", "opt: learned positions"),
)


def assert_greedy(loaded: LoadedModel, model: Any, tolerance: float = 2e-4) -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(n)] for n in (1, 4, 21)]
    results = engine_run(loaded, prompts, [SamplingParams(temperature=0.0, max_tokens=5, logprobs=0)] * 3)
    for prompt, (tokens, logprobs) in zip(prompts, results, strict=True):
        expected_tokens, expected_logprobs = plain_greedy(model, prompt, 5)
        assert tokens == expected_tokens
        assert logprobs == pytest.approx(expected_logprobs, abs=tolerance)


@pytest.mark.parametrize("family", SOME)
def test_a_model_of_transformers_with_our_linears_gives_the_same_tokens(family: str) -> None:
    model = make_model(*FAMILIES[family])
    loaded = served(model)
    replace_linears(loaded.model, linear_maker(None))
    assert not any(type(module) is nn.Linear for module in loaded.model.modules())
    assert_greedy(loaded, model)


def test_a_replaced_linear_still_shows_its_weight() -> None:
    model = nn.Sequential(nn.Linear(5, 37), nn.Linear(37, 3, bias=False))
    weights, x = [layer.weight.detach().clone() for layer in model], torch.randn(4, 5)  # type: ignore[union-attr]
    expected = model(x)
    replace_linears(model, linear_maker(None))
    torch.testing.assert_close(model(x), expected)
    assert all(torch.equal(layer.weight, w) for layer, w in zip(model, weights, strict=True))  # type: ignore[arg-type]
    assert [layer.bias is None for layer in model] == [False, True]  # type: ignore[union-attr]


@compiled
@pytest.mark.parametrize("impl", ["lean", "transformers"])
def test_int8_computes_with_rounded_weights_and_its_kv_is_not_exchangeable(impl: str, tmp_path: Path) -> None:
    model = make_model("LlamaConfig", {"tie_word_embeddings": True})
    model.save_pretrained(tmp_path)
    exact, loaded = load_model(tmp_path, impl=impl), load_model(tmp_path, impl=impl, quantization="int8")
    assert loaded.identity_digest("m") != exact.identity_digest("m")
    round_ = linear_maker("int8")
    for module in model.modules():
        if type(module) is nn.Linear:
            rows = torch.arange(module.out_features)
            module.weight = nn.Parameter(round_(module.weight.detach(), None).rows(rows), requires_grad=False)
    if impl == "lean":  # its embedding is the rounded head
        model.model.embed_tokens.weight = model.lm_head.weight
    assert_greedy(loaded, model, tolerance=1e-3)  # activations are rounded to 16 bits


@pytest.mark.parametrize(
    ("flags", "what"),
    [({"dtype": "bfloat16"}, "--dtype"), ({"device": "cuda"}, "--device"), ({"runner": "fake"}, "--runner")],
)
def test_int8_is_refused_where_it_cannot_be(flags: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=f"--quantization is 'int8' and {what} is"):
        EngineConfig(quantization="int8", **flags)


def test_without_compiled_kernels_torch_serves_but_not_in_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "why_not", lambda: "they are not built")
    assert linear_maker(None) is TorchLinear
    with pytest.raises(ConfigError, match=r"--quantization is 'int8', which needs .* they are not built"):
        linear_maker("int8")


def test_no_two_weights_exist_twice_at_once() -> None:
    inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model = nn.Sequential(inner, nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)))
    kept = [weakref.ref(module.weight) for module in model.modules() if type(module) is nn.Linear]
    alive: list[int] = []
    del inner

    def make(weight: Tensor, bias: Tensor | None) -> TorchLinear:
        alive.append(sum(ref() is not None for ref in kept))
        return TorchLinear(weight.clone(), bias)

    replace_linears(model, make)
    assert alive == [4, 3, 2, 1]


def test_what_is_checked_at_load_is_what_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("LlamaConfig", {}).save_pretrained(tmp_path)
    checked: list[type] = []
    monkeypatch.setattr(loader, "check_answers", lambda model, *_: checked.extend(type(m) for m in model.modules()))
    load_model(tmp_path, impl="transformers")
    assert checked and nn.Linear not in checked


@compiled
def test_threads_that_cannot_be_started_are_refused_by_flag(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    before = torch.get_num_threads()
    with pytest.raises(ConfigError, match="--threads is 257"):
        build_core(EngineConfig(model=str(tmp_path), threads=257), PlainPool)
    assert torch.get_num_threads() == before
