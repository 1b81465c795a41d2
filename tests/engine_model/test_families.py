"""Families of models through paged attention, in chunks and mixed batches, against the plain model."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from pdserve.core.errors import ConfigError, EngineError
from pdserve.core.sampling import SamplingParams
from pdserve.engine.attention import ATTENTION_NAME, LayerRecorder, attend
from pdserve.engine.kv_cache import PlainPool
from pdserve.engine.loader import prepare_model
from pdserve.engine.runner import ModelRunner
from pdserve.engine.step import PageCopy, PageCopyKind, ScheduledSequence, SchedulerOutput
from tests.engine_model.models import FAMILIES, VOCAB_SIZE, engine_run, make_model, plain_greedy, served

GREEDY = SamplingParams(temperature=0.0)
STEPS = ((8, 0, 0), (5, 3, 0), (1, 3, 6), (6, 1, 1), (1, 1, 5), (1, 1, 1), (1, 0, 1))
"""New tokens of three sequences, step by step."""
REFUSED = {
    "falcon": ("FalconConfig", {"head_dim": ...}),
    "bloom": ("BloomConfig", {"num_attention_heads": ..., "num_hidden_layers": ..., "n_head": 4, "n_layer": 2}),
    "qwen3-next": ("Qwen3NextConfig", {"num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2}),
    "stablelm": ("StableLmConfig", {}),
    "bert, not causal": ("BertConfig", {}),
    "doge, masks of its own": ("DogeConfig", {}),
    "diffllama, two attentions in a layer": ("DiffLlamaConfig", {}),
    "mamba, no attention": ("MambaConfig", {"num_attention_heads": ..., "num_key_value_heads": ..., "head_dim": ...}),
    "llama4, chunked attention": (
        "Llama4TextConfig",
        {"attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 48},
    ),
    "bart, not only a decoder": (
        "BartConfig",
        {
            **dict.fromkeys(("hidden_size", "intermediate_size", "num_key_value_heads", "head_dim"), ...),
            **{"num_hidden_layers": ..., "num_attention_heads": ..., "initializer_range": ..., "d_model": 32},
            **{"decoder_layers": 2, "encoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48},
        },
    ),
}


class SeenLogits:
    """A processor that keeps the logits of every row: key -> (position, logits)."""

    def __init__(self) -> None:
        self.rows: dict[str, list[tuple[int, Tensor]]] = {}

    def wants(self, params: SamplingParams) -> bool:
        return True

    def edit(self, logits: Tensor, row: ScheduledSequence) -> None:
        self.rows.setdefault(row.key, []).append((row.start + len(row.token_ids) - 1, logits.clone()))


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_the_plain_model(name: str) -> None:
    """Chunks, mixed steps and steps of decodes alone, over pages in random order that hold NaN before."""
    model = make_model(*FAMILIES[name])
    loaded, rng = served(model), random.Random(3)
    tokens = [[rng.randrange(VOCAB_SIZE) for _ in range(sum(chunks))] for chunks in zip(*STEPS, strict=True)]
    layout, seen = loaded.layout(4), SeenLogits()
    order = rng.sample(range(20), 20)
    tables = [[order.pop() for _ in range(layout.num_pages(len(known)))] for known in tokens]
    memory = PlainPool(layout, 20)
    memory.buffer[:] = b"\xff" * len(memory.buffer)
    runner = ModelRunner(loaded, layout, 20, memory, processors=[seen])
    done = [0] * len(tokens)
    for number, sizes in enumerate(STEPS):
        rows = []
        for i, (known, start, size) in enumerate(zip(tokens, done, sizes, strict=True)):
            if size:
                new = known[start : start + size]
                rows.append(ScheduledSequence(str(i), start, new, tables[i], GREEDY, 0, known, len(known)))
                done[i] += size
        runner.execute(SchedulerOutput(number, tuple(rows), sum(sizes)))
    for i, known in enumerate(tokens):
        with torch.inference_mode():
            expected = model(input_ids=torch.tensor([known]), use_cache=False).logits[0]
        for position, logits in seen.rows[str(i)]:
            torch.testing.assert_close(logits, expected[position], atol=2e-4 * float(expected.std()), rtol=1e-4)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "llama" else pytest.mark.slow) for n in FAMILIES])
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


def test_a_model_that_keeps_something_between_tokens_is_refused() -> None:
    model = make_model(*FAMILIES["llama"])

    def shift(_: object, args: tuple[Tensor]) -> tuple[Tensor]:
        return (args[0] + 0.1 * args[0].roll(1, dims=1),)

    model.model.layers[1].mlp.register_forward_pre_hook(shift)
    with pytest.raises(ConfigError, match="answers other than by itself"):
        prepare_model(model, "float32", "test")


@pytest.mark.parametrize(
    ("name", "attribute"), [("gemma2: window, softcap", "attn_logit_softcapping"), ("qwen2, window", "sliding_window")]
)
def test_a_layer_that_does_not_ask_for_what_its_configuration_says_is_refused(name: str, attribute: str) -> None:
    model = make_model(*FAMILIES[name])
    attention = model.model.layers[1].self_attn
    setattr(attention, attribute, None)
    with pytest.raises(ConfigError, match=r"layer 1 asks for a (window|softcap) of None, not"):
        prepare_model(model, "float32", "test")


@pytest.mark.parametrize(
    ("argument", "value"), [("position_bias", torch.zeros(1)), ("indices", torch.zeros(1)), ("is_causal", False)]
)
def test_what_a_layer_asks_for_and_we_do_not_have_is_refused(argument: str, value: object) -> None:
    query = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"its (layers ask for|attention is not causal)"):
        attend(torch.nn.Module(), query, query, query, None, pdserve=LayerRecorder(), **{argument: value})


def test_longrope_is_served_as_far_as_all_tokens_have_the_same_factors() -> None:
    assert served(make_model(*FAMILIES["llama, longrope"])).max_model_len == 64
    assert served(make_model(*FAMILIES["llama, dynamic rope"])).max_model_len == 64


def test_the_plain_attention_is_not_left_in_the_model() -> None:
    loaded = served(make_model(*FAMILIES["llama"]))
    assert loaded.model.config._attn_implementation == ATTENTION_NAME


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


@pytest.mark.parametrize(
    ("tokens", "copies"), [([VOCAB_SIZE], ()), ([1], (PageCopy(0, 9, PageCopyKind.COPY),))], ids=["token", "page"]
)
def test_what_does_not_exist_is_an_error_of_the_engine(tokens: list[int], copies: tuple[PageCopy, ...]) -> None:
    loaded = served(make_model(*FAMILIES["llama"]))
    layout = loaded.layout(4)
    row = ScheduledSequence("a", 0, tokens, [0], None, 0, tokens, 1)
    with pytest.raises(EngineError, match="the model failed in step 1: index"):
        ModelRunner(loaded, layout, 2, PlainPool(layout, 2)).execute(SchedulerOutput(1, (row,), 1, copies))
