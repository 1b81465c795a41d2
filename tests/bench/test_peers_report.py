"""The arithmetic of `pdserve bench peers`: medians, the best peer, goals, and what the machine allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.bench import peers_report
from pdserve.bench.peers_limits import Limits, Work, best_tokens_per_s
from pdserve.bench.peers_measure import Level, Measured, Run
from pdserve.bench.peers_report import Summary, summaries

LIMITS = Limits(read_bytes_per_s=10e9, gemm_flops_per_s=50e9)


def measured(tokens_per_s: float, ttft_ms: float = 100.0, itl_p99_ms: float = 10.0) -> Measured:
    return Measured(
        tokens_per_s=tokens_per_s,
        ttft_p50_ms=ttft_ms,
        ttft_p99_ms=ttft_ms,
        tpot_p50_ms=1.0,
        tpot_p99_ms=1.0,
        itl_p50_ms=1.0,
        itl_p99_ms=itl_p99_ms,
        tokens_per_cpu_s=1.0,
        cores_busy=1.0,
        outputs_per_token=1.0,
        duration_s=1.0,
    )


def run(system: str, levels: dict[int, Measured] | None = None, **more: object) -> Run:
    return Run(system=system, levels=levels or {}, **more)  # type: ignore[arg-type]


def found() -> dict[str, Summary]:
    return summaries(
        [
            run("pdserve-mixed", {1: measured(20), 8: measured(50)}, ready_s=8.0, peak_process_bytes=1_200_000_000),
            run("pdserve-pd", {8: measured(39)}, ready_s=11.0),
            run("vllm", {1: measured(10), 8: measured(30)}),
            run("llamacpp-f32", {8: measured(25)}),
            run("llamacpp-q8_0", {8: measured(90)}),
        ]
    )


def test_medians_are_over_the_rounds_that_were_measured() -> None:
    runs = [run("a", {8: measured(v)}, ready_s=r, answer="x") for v, r in ((3, 1.0), (9, 4.0), (5, 2.0))]
    runs += [run("a", {}, failure="it broke"), run("a", {}, failure="it broke")]
    summary = summaries(runs)["a"]
    assert summary.levels[8].tokens_per_s == 5 and summary.ready_s == 2.0 and summary.rounds == 5
    assert summary.failures == ("it broke",) and summary.answer == "x" and summary.peak_bytes is None


def test_goals_stand_beside_ratios_against_the_best_peer() -> None:
    rows = {row.name: row for row in peers_report.peer_rows(found(), {1, 8, 16})}
    best = rows["at 8: tokens/s, pdserve-mixed / the best fp32 peer (vllm)"]
    assert best.value == pytest.approx(50 / 30) and best.goal == ">= 1.3: met"
    assert rows["at 8: tokens/s, pdserve-pd / the best fp32 peer (vllm)"].goal == ">= 1.3: met"
    assert rows["at 1: tokens/s, pdserve-mixed / vllm"].value == 2
    missing = rows["at 1: tokens/s, pdserve-pd / vllm"]
    assert missing.value is None and missing.goal == ">= 1.5: not measured"
    assert rows["at 8: tokens/s, pdserve-int8 / llamacpp-q8_0"].value is None
    assert rows["pdserve-mixed: peak resident memory of the worker"].goal == "<= 1.3: met"
    assert rows["pdserve-pd: time to ready"].goal == "<= 10: NOT met"


def test_levels_that_were_not_asked_for_have_no_rows() -> None:
    names = [row.name for row in peers_report.peer_rows(found(), {8})]
    assert "at 8: tokens/s, pdserve-int8 / llamacpp-q8_0" in names and "pdserve-pd: time to ready" in names
    assert not [name for name in names if name.startswith("at ") and not name.startswith("at 8:")]


def test_disaggregation_goals() -> None:
    both = summaries(
        [
            run("pdserve-pd", {4: measured(30, ttft_ms=300, itl_p99_ms=200)}),
            run("pdserve-mixed", {4: measured(35, itl_p99_ms=400)}),
            run("vllm-disaggregated", {4: measured(20, ttft_ms=600, itl_p99_ms=300)}),
        ]
    )
    goals = {row.name: (row.value, row.goal) for row in peers_report.disaggregation_rows(both, 4)}
    assert goals == {
        "at 4: tokens/s, pdserve-pd / vllm-disaggregated": (1.5, ">= 1.5: met"),
        "at 4: TTFT p50, pdserve-pd / vllm-disaggregated": (0.5, "<= 0.6: met"),
        "at 4: ITL p99, pdserve-pd / vllm-disaggregated": (pytest.approx(2 / 3), "<= 0.7: met"),
        "at 4: ITL p99, pdserve-pd / pdserve-mixed": (0.5, "<= 0.4: NOT met"),
        "at 4: tokens/s, pdserve-pd / pdserve-mixed": (pytest.approx(6 / 7), ">= 0.9: NOT met"),
    }


def test_less_is_better_where_it_is() -> None:
    assert peers_report.ratio(found(), "vllm", ("llamacpp-f32", "pdserve-mixed"), 8, "ttft_p50_ms", best=False) == (
        1.0,
        "llamacpp-f32",
    )
    assert peers_report.ratio(found(), "vllm", ("nobody",), 8, "tokens_per_s") is None
    assert peers_report.ratio(found(), "llamacpp-f32", ("vllm",), 1, "tokens_per_s") is None


def test_the_limit_is_memory_alone_and_products_together() -> None:
    def limit(concurrency: int, input_tokens: int = 0) -> float:
        work = Work(
            num_params=10**8, input_tokens=input_tokens, output_tokens=80 * concurrency, concurrency=concurrency
        )
        return best_tokens_per_s(LIMITS, work)

    assert limit(1) == pytest.approx(1 / 0.04), "400 MB at 10 GB/s a token"
    assert limit(8) == pytest.approx(8 / 0.04), "8 x 0.2 GFLOP at 50 GFLOP/s take 32 ms: memory still bounds"
    assert limit(16) == pytest.approx(16 / 0.064), "the products bound"
    assert limit(16, input_tokens=1000) == pytest.approx(1280 / (80 * 0.064 + 1000 * 0.004))


def test_shares_of_the_limit_are_those_of_fp32_systems() -> None:
    rows = {
        r.name: r.value for r in peers_report.limit_rows(found(), LIMITS, 10**8, [Level(concurrency=8, num_prompts=48)])
    }
    most = rows["at 8: limit in fp32"]
    assert most is not None and rows["at 8: vllm, share of it"] == pytest.approx(100 * 30 / most)
    assert "at 8: llamacpp-q8_0, share of it" not in rows and rows["memory read, measured"] == 10


def test_answers_are_compared_with_ours() -> None:
    runs = [run("pdserve-mixed", answer=" Paris."), run("vllm", answer="Paris."), run("llamacpp-q8_0", answer="Rome")]
    notes = peers_report.answer_notes(summaries(runs))
    assert notes == ["the same greedy answer ' Paris.': pdserve-mixed, vllm", "another one: llamacpp-q8_0 ('Rome')"]
    assert peers_report.answer_notes(summaries([run("vllm", answer="x")])) == []


def test_gguf_has_the_weights_of_the_model(tmp_path: Path) -> None:
    """Written from a converted model and read by the converter of `engine`, the weights are the same."""
    import json

    import numpy as np
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    from pdserve.bench import peers_gguf, peers_prepare
    from pdserve.engine import gguf_convert

    config = {
        "model_type": "llama", "max_position_embeddings": 64, "hidden_size": 64, "num_hidden_layers": 1,
        "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 7,
        "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
    }  # fmt: skip
    shapes = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64)}
    layer = {f"self_attn.{name}": shape for name, shape in shapes.items()}
    layer |= {"mlp.gate_proj": (32, 64), "mlp.up_proj": (32, 64), "mlp.down_proj": (64, 32)}
    layer |= {"input_layernorm": (64,), "post_attention_layernorm": (64,)}
    names = {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()}
    names |= {"model.embed_tokens.weight": (7, 64), "model.norm.weight": (64,)}
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in names.items()}
    source = tmp_path / "source"
    source.mkdir()
    save_file(weights, source / "model.safetensors")
    save_file({"other": np.zeros(5)}, source / "consolidated.safetensors")  # which nobody reads
    (source / "config.json").write_text(json.dumps(config))
    added = [{"id": 1, "content": "<s>"}]
    vocabulary = {"a": 0, "<s>": 1, "b": 2, "c": 3, "ab": 4, "abc": 5, "d": 6}
    tokenizer = {"added_tokens": added, "model": {"vocab": vocabulary, "merges": [["a", "b"], ["ab", "c"]]}}
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert peers_prepare.num_params(source) == sum(weight.size for weight in weights.values())

    peers_gguf.write(source, tmp_path / "f32.gguf", "F32")
    reader = GGUFReader(tmp_path / "f32.gguf")
    assert reader.fields["tokenizer.ggml.token_type"].contents() == [1, 3, 1, 1, 1, 1, 1]
    read = {}
    heads = {"attn_q": 4, "attn_k": 2}
    for tensor in reader.tensors:
        data, kind = np.array(tensor.data), tensor.name.split(".")[-2]
        data = gguf_convert._rope_halves(data, heads[kind]) if kind in heads else data
        read[gguf_convert._weight_name(tensor.name, gguf_convert._FAMILIES["llama"])] = data
    assert set(read) == set(weights) and all(np.array_equal(read[name], weights[name]) for name in weights)

    peers_gguf.write(source, tmp_path / "q8.gguf", "Q8_0")
    kinds = {t.name: t.tensor_type.name for t in GGUFReader(tmp_path / "q8.gguf").tensors}
    assert kinds["blk.0.attn_q.weight"] == "Q8_0" and kinds["blk.0.attn_norm.weight"] == "F32"
