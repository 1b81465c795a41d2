"""Families of models through paged attention, in chunks and mixed batches, against the plain model."""

from __future__ import annotations

import random

import pytest

from pdserve.core.errors import ConfigError, EngineError
from pdserve.core.sampling import SamplingParams
from pdserve.engine.kv_cache import PlainPool
from pdserve.engine.runner import ModelRunner
from pdserve.engine.step import ScheduledSequence, SchedulerOutput
from tests.engine_model.models import FAMILIES, VOCAB_SIZE, engine_run, make_model, plain_greedy, served

REFUSED = {
    "falcon": ("FalconConfig", {"head_dim": ...}),
    "bloom": ("BloomConfig", {"num_attention_heads": ..., "num_hidden_layers": ..., "n_head": 4, "n_layer": 2}),
    "qwen3-next": ("Qwen3NextConfig", {"num_hidden_layers": 4}),
    "stablelm": ("StableLmConfig", {}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_equal_the_plain_model(name: str) -> None:
    model = make_model(*FAMILIES[name])
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(n)] for n in (1, 3, 4, 5, 30)]
    greedy = SamplingParams(temperature=0.0, max_tokens=7, logprobs=0)
    results = engine_run(served(model), prompts, [greedy] * len(prompts))
    for prompt, (tokens, logprobs) in zip(prompts, results, strict=True):
        expected_tokens, expected_logprobs = plain_greedy(model, prompt, 7)
        assert tokens == expected_tokens
        assert logprobs == pytest.approx(expected_logprobs, abs=2e-4)


def test_preempted_sequences_give_the_same_tokens() -> None:
    model = make_model(*FAMILIES["llama"])
    rng = random.Random(4)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(n)] for n in (9, 12, 6, 11)]
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    loaded = served(model)
    roomy = engine_run(loaded, prompts, [greedy] * 4)
    assert engine_run(loaded, prompts, [greedy] * 4, num_pages=8) == roomy


def test_seeded_sampling_does_not_depend_on_the_batch() -> None:
    loaded = served(make_model(*FAMILIES["llama"]))
    rng = random.Random(5)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20))] for _ in range(16)]
    sampling = [SamplingParams(temperature=1.0, top_p=0.9, seed=i, max_tokens=6) for i in range(16)]
    together = engine_run(loaded, prompts, sampling, budget=32, num_pages=256)
    alone = [engine_run(loaded, [p], [s])[0] for p, s in zip(prompts, sampling, strict=True)]
    assert together == alone


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_do_not_call_our_attention_are_refused(name: str) -> None:
    model = make_model(*REFUSED[name])
    with pytest.raises(ConfigError, match=r"cannot be served"):
        served(model)


def test_layers_of_unequal_kv_shape_form_groups() -> None:
    loaded = served(make_model(*FAMILIES["deepseek-v3: keys wider than values"]))
    assert loaded.kv_shapes == ((4, 12, 6),) * 3
    assert [(g.layers, g.k_dim, g.v_dim) for g in loaded.layout(4).groups] == [((0, 1, 2), 12, 6)]


def test_identity_tells_models_apart() -> None:
    one = served(make_model("LlamaConfig", {}))
    rope = served(make_model("LlamaConfig", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}))
    assert one.identity_digest("m") == served(make_model("LlamaConfig", {})).identity_digest("m")
    assert one.identity_digest("m") != rope.identity_digest("m")
    assert one.identity_digest("m") != one.identity_digest("other")


def test_a_row_without_a_page_for_each_of_its_tokens_is_refused_before_any_page_is_written() -> None:
    loaded = served(make_model(*FAMILIES["llama"]))
    layout = loaded.layout(4)
    memory = PlainPool(layout, 2)
    before = bytes(memory.buffer)
    row = ScheduledSequence("a", 3, [1, 1], [0], None, 0, [1] * 5, 5)
    with pytest.raises(EngineError, match="sequence a has 1 pages, but computes up to position 4"):
        ModelRunner(loaded, layout, 2, memory).execute(SchedulerOutput(1, (row,), 2))
    assert bytes(memory.buffer) == before
