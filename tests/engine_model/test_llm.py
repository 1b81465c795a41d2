"""The embedded engine: on the fake runner what it does with streams, on a tiny model how it is built."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve import LLM, SamplingParams
from pdserve.core.errors import ConfigError, RequestError
from pdserve.core.request import FinishReason
from pdserve.engine.build import build_core
from pdserve.engine.config import EngineConfig
from pdserve.engine.fake import expected_tokens
from pdserve.engine.kv_cache import PlainPool
from pdserve.engine.profile import StepMeter
from tests.engine_model.models import VOCAB_SIZE, save_model


@pytest.fixture
def llm() -> LLM:
    return LLM(runner="fake", page_size=4, num_pages=64, max_num_batched_tokens=8, max_num_seqs=8)


def idle(llm: LLM) -> None:
    """Runs what is queued and asserts that no page is held."""
    llm._step()
    core = llm._built.core
    core.check()
    load = core.step(0.0).load
    assert (load.num_running, load.num_waiting, load.num_free_pages) == (0, 0, load.num_pages)


def params(max_tokens: int, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **more)  # type: ignore[arg-type]


def test_text_ids_and_chat(llm: LLM) -> None:
    chat = [{"role": "user", "content": "t7"}]
    results = llm.generate(["t1 t2 t3", [5, 6], chat], params(9))
    assert [r.prompt_token_ids for r in results[:2]] == [(1, 2, 3), (5, 6)]
    for r in results:
        assert list(r.token_ids) == expected_tokens(r.prompt_token_ids, 9)
        assert r.text == "".join(f" t{i}" for i in r.token_ids)
        assert (r.finish_reason, r.stop_reason, r.usage.completion_tokens) == (FinishReason.LENGTH, None, 9)
    assert llm.generate("t1 t2 t3", params(9))[0].token_ids == results[0].token_ids
    idle(llm)


def test_one_prompt_of_any_kind_needs_no_list(llm: LLM) -> None:
    for prompt in ("t1 t2", [1, 2], (1, 2), np.array([1, 2]), [{"role": "user", "content": "t7"}]):
        [one] = llm.generate(prompt, sampling_params=params(5))  # type: ignore[arg-type]
        [same] = llm.generate([prompt], params(5))  # type: ignore[list-item]
        assert one == same and list(one.token_ids) == expected_tokens(one.prompt_token_ids, 5)
    assert llm.generate([], params(5)) == []


@pytest.mark.parametrize(
    "prompt", [["t1", 2], [1, {"role": "user", "content": "t7"}], [[1], [2]], [1.5], None, 7, "\ud800"]
)
def test_what_is_no_prompt_says_what_one_is(llm: LLM, prompt: object) -> None:
    with pytest.raises(RequestError, match="must be text that UTF-8 can encode, a sequence of token ids"):
        llm.generate(["t1", prompt], params(4))  # type: ignore[list-item]


def test_stop_string_ends_in_the_middle_of_a_batch(llm: LLM) -> None:
    tokens = expected_tokens([1, 2], 12)
    stop = f"t{tokens[4]} t{tokens[5]}"
    stopped, other = llm.generate([[1, 2], [3]], [params(12, stop=(stop,)), params(12)])
    assert (stopped.finish_reason, stopped.stop_reason) == (FinishReason.STOP, stop)
    assert list(stopped.token_ids) == tokens[:6]
    assert stopped.text == "".join(f" t{i}" for i in tokens[:4]) + " "
    assert list(other.token_ids) == expected_tokens([3], 12)
    idle(llm)


def test_a_stop_token_ends_and_is_named(llm: LLM) -> None:
    tokens = expected_tokens([1, 2], 12)
    [result] = llm.generate([1, 2], params(12, stop_token_ids=(tokens[3],)))
    assert (result.finish_reason, result.stop_reason) == (FinishReason.STOP, str(tokens[3]))
    assert list(result.token_ids) == tokens[: tokens.index(tokens[3]) + 1]
    idle(llm)


def test_echo_and_prompt_logprobs(llm: LLM) -> None:
    asked = params(3, echo=True, logprobs=1)
    text, ids, chat = llm.generate(["t1  t2 t3", [5], [{"role": "user", "content": "t7"}]], asked)
    for result, echo in ((text, "t1  t2 t3"), (ids, " t5"), (chat, llm.tokenizer.decode(chat.prompt_token_ids))):
        assert result.text == echo + "".join(f" t{i}" for i in result.token_ids)
        first, *others = result.prompt_logprobs
        assert first is None and len(result.logprobs) == 3
        assert [p.chosen.token_id for p in others if p] == list(result.prompt_token_ids[1:])
    deltas = list(llm.stream("t1  t2 t3", asked))
    assert "".join(d.text for d in deltas) == text.text
    assert llm.generate("t1 t2", params(2, prompt_logprobs=0))[0].text == llm.generate("t1 t2", params(2))[0].text
    assert llm.generate("t1 t2", params(2, logprobs=0))[0].prompt_logprobs == ()
    [two] = llm.generate("t1 t2", params(2, n=2, prompt_logprobs=0))
    assert len(two.prompt_logprobs) == 2 and len(two.choices) == 2
    with pytest.raises(RequestError, match="'echo'"):
        params(2, n=2, echo=True)
    idle(llm)


def test_streams_read_in_turns_share_the_engine(llm: LLM) -> None:
    streams = [llm.stream([i], params(6)) for i in range(3)]
    tokens: list[list[int]] = [[], [], []]
    for _ in range(6):
        for i, stream in enumerate(streams):
            tokens[i] += next(stream).token_ids
    assert tokens == [expected_tokens([i], 6) for i in range(3)]
    assert [list(s) for s in streams] == [[], [], []]
    idle(llm)


@pytest.fixture
def fork_llm() -> LLM:
    """Choices of the fake model are equal, but for where they end."""
    return LLM(runner="fake", page_size=4, num_pages=64, max_num_batched_tokens=32, max_num_seqs=8)


def test_n_choices_of_one_prompt(fork_llm: LLM) -> None:
    tokens = tuple(expected_tokens(range(9), 6))
    several, one = fork_llm.generate([range(9), [5]], [params(6, n=3, logprobs=1), params(6)])
    assert [c.token_ids for c in several.choices] == [tokens] * 3
    assert {c.text for c in several.choices} == {"".join(f" t{i}" for i in tokens)}
    assert [len(c.logprobs) for c in several.choices] == [6] * 3
    assert (several.usage.prompt_tokens, several.usage.completion_tokens) == (9, 18)
    first = several.choices[0]
    assert (several.text, several.token_ids, several.logprobs) == (first.text, first.token_ids, first.logprobs)
    assert (several.finish_reason, several.stop_reason) == (first.finish_reason, first.stop_reason)
    assert list(one.token_ids) == expected_tokens([5], 6) and len(one.choices) == 1
    idle(fork_llm)


def test_a_stop_string_ends_each_choice(fork_llm: LLM) -> None:
    tokens = expected_tokens(range(9), 12)
    [result] = fork_llm.generate(range(9), params(12, n=4, stop=(f"t{tokens[4]} t{tokens[5]}",)))
    assert [list(c.token_ids) for c in result.choices] == [tokens[:6]] * 4
    assert {c.finish_reason for c in result.choices} == {FinishReason.STOP}
    idle(fork_llm)


def test_a_stream_of_n_choices_says_whose_each_delta_is(fork_llm: LLM) -> None:
    tokens: list[list[int]] = [[], [], []]
    ended = []
    for delta in fork_llm.stream(range(9), params(7, n=3)):
        assert delta.choice not in ended and delta.index == len(tokens[delta.choice])
        tokens[delta.choice] += delta.token_ids
        if delta.finish_reason is not None:
            ended.append(delta.choice)
    assert tokens == [expected_tokens(range(9), 7)] * 3 and sorted(ended) == [0, 1, 2]
    idle(fork_llm)


@pytest.mark.parametrize("num_deltas", [1, 2, 5])
def test_leaving_a_stream_of_n_choices_frees_all_pages(fork_llm: LLM, num_deltas: int) -> None:
    stream = fork_llm.stream(range(40), params(20, n=4))
    for _ in range(num_deltas):
        next(stream)
    stream.close()
    idle(fork_llm)


def test_more_choices_than_fit_come_one_after_another() -> None:
    llm = LLM(runner="fake", page_size=4, num_pages=5, max_num_batched_tokens=8, max_num_seqs=8)
    [result] = llm.generate(range(13), params(7, n=16))
    assert [list(c.token_ids) for c in result.choices] == [expected_tokens(range(13), 7)] * 16
    idle(llm)


def test_n_is_bounded() -> None:
    for n in (0, 17):
        with pytest.raises(RequestError, match=rf"'n' is {n}; it must be in 1..16"):
            params(1, n=n)


def test_prompts_that_begin_alike_are_reused_within_a_salt(llm: LLM) -> None:
    def cached(salt: str, prompt: list[int]) -> int:
        [result] = llm.generate(prompt, params(5), cache_salt=salt)
        assert list(result.token_ids) == expected_tokens(prompt, 5)
        return result.usage.cached_tokens

    prompt = list(range(11))
    assert [cached("", prompt), cached("a", prompt), cached("a", [*prompt, 99]), cached("", [*prompt[:5], 0])] == [
        0,
        0,
        8,
        4,
    ]
    assert "".join(d.text for d in llm.stream(prompt, params(5))) == llm.generate(prompt, params(5))[0].text
    off = LLM(runner="fake", page_size=4, num_pages=64, enable_prefix_caching=False)
    assert [off.generate(prompt, params(5))[0].usage.cached_tokens for _ in range(2)] == [0, 0]
    idle(llm)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"cache_salt": "\ud800"}, "BAD_CACHE_SALT"),
        ({"cache_salt": "x" * 129}, "BAD_CACHE_SALT"),
        ({"cache_salt": 5}, "BAD_CACHE_SALT"),
        ({"priority": 101}, "BAD_PRIORITY"),
        ({"priority": 0.5}, "BAD_PRIORITY"),
    ],
)
def test_a_bad_salt_or_priority_is_refused_and_the_engine_lives(llm: LLM, options: dict[str, Any], reason: str) -> None:
    for ask in (llm.generate, llm.stream):
        with pytest.raises(RequestError) as refusal:
            ask([1, 2, 3, 4, 5], params(2), **options)
        assert refusal.value.reason == reason and next(iter(options)) in refusal.value.message
    llm.generate([1, 2, 3, 4, 5], params(2), cache_salt="x" * 128)
    idle(llm)


def test_priority_orders_who_starts() -> None:
    llm = LLM(runner="fake", page_size=4, num_pages=64, max_num_seqs=1, scheduling_policy="priority")
    late, early = llm.stream([1, 2], params(3), priority=5), llm.stream([3, 4], params(3), priority=-5)
    next(late)
    assert not llm._open.keys() - {"1"}, "the other one has ended"
    assert len(list(early)) == 1  # all its tokens came while the first waited


def test_leaving_a_stream_frees_its_pages(llm: LLM) -> None:
    stream = llm.stream([1, 2, 3], params(40))
    assert next(stream).index == 0
    stream.close()
    idle(llm)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("", "EMPTY_PROMPT"),
        ([], "EMPTY_PROMPT"),
        ([1, 257], "BAD_TOKEN_ID"),
        ([-1], "BAD_TOKEN_ID"),
        ([1] * 256, "PROMPT_TOO_LONG"),
    ],
)
def test_wrong_prompts_are_refused_before_anything_runs(llm: LLM, prompt: str | list[int], reason: str) -> None:
    with pytest.raises(RequestError) as error:
        llm.generate([[1], prompt], params(4))
    assert error.value.reason == reason
    with pytest.raises(RequestError):
        llm.stream(prompt)
    assert llm.generate([[1]], params(4))[0].usage.completion_tokens == 4


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="max_sequences"):
        LLM(runner="fake", max_sequences=3)
    with pytest.raises(ConfigError, match=r"^page_size is 0"):
        LLM(runner="fake", page_size=0)


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("tiny")
    save_model("llama", directory)
    return directory


def config(directory: Path, **options: object) -> EngineConfig:
    return EngineConfig(model=str(directory), **options)  # type: ignore[arg-type]


def test_the_token_budget_for_a_tpot_slo_is_measured_with_a_full_batch_and_logged(
    tiny_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"page_size": 4, "num_pages": 64, "max_num_seqs": 8}
    with caplog.at_level(logging.INFO, logger="pdserve.engine.measuring"):
        built = build_core(config(tiny_dir, tpot_slo_ms=60_000.0, **options), PlainPool)
        assert built.profile is not None
        assert [tokens for tokens, _ in built.profile.points][:2] == [16, 24]  # chunks beside the eight decodes
        assert 8 + 4 <= built.token_budget == built.profile.token_budget <= 8 + 64 * 4
        assert f"token budget {built.token_budget} for --tpot-slo-ms 60000" in caplog.text
        assert "cannot be held" not in caplog.text


def test_a_machine_too_slow_or_too_busy_for_the_step_target_is_told(
    tiny_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepMeter, "measure", lambda self, tokens, *decodes: 1.0)
    with caplog.at_level(logging.WARNING, logger="pdserve.engine.measuring"):
        build_core(config(tiny_dir, page_size=4, num_pages=64, max_num_seqs=8), PlainPool)
    assert "longer than --step-target-ms 250" in caplog.text and "--max-num-batched-tokens" in caplog.text


def test_what_a_built_engine_says_of_itself(tiny_dir: Path) -> None:
    built = build_core(config(tiny_dir, page_size=4, kv_cache_memory_bytes=1 << 20), PlainPool)
    assert built.layout.page_bytes == 2 * 3 * 2 * 8 * 4 * 4  # K and V, layers, KV heads, head dim, tokens, fp32
    assert built.num_pages == (1 << 20) // built.layout.page_bytes
    assert len(built.pool_memory.buffer) == built.num_pages * built.layout.page_bytes
    assert (built.max_model_len, built.vocab_size, built.model_dir) == (256, VOCAB_SIZE, tiny_dir)
    assert built.model_name == tiny_dir.name
    assert built.profile is not None
    assert built.token_budget == built.profile.token_budget >= 64


def test_the_pool_and_the_options_bound_the_length(tiny_dir: Path) -> None:
    small = build_core(config(tiny_dir, page_size=4, num_pages=5, max_num_batched_tokens=64), PlainPool)
    assert (small.max_model_len, small.token_budget, small.profile) == (20, 64, None)
    with pytest.raises(ConfigError, match="--max-model-len is 300; the model knows 256"):
        build_core(config(tiny_dir, max_model_len=300), PlainPool)
    with pytest.raises(ConfigError, match="one page of this model takes"):
        build_core(config(tiny_dir, kv_cache_memory_bytes=100), PlainPool)


def test_a_pool_whose_size_nobody_says_has_what_the_sequences_are_likely_to_use(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def num_pages(**options: object) -> int:
        return build_core(config(tiny_dir, max_num_batched_tokens=64, **options), PlainPool).num_pages

    page_bytes = 4 * 2 * 3 * 2 * 8 * 4
    assert num_pages(page_size=4, max_num_seqs=2) == 2 * 512 / 4
    assert num_pages(page_size=100, max_num_seqs=1) == 6  # whole pages
    monkeypatch.setattr("pdserve.engine.build.KV_TOKENS_PER_SEQ", 8)
    assert num_pages(page_size=4, max_num_seqs=2) == 256 / 4  # the longest sequence that the model knows
    assert num_pages(page_size=4, max_num_seqs=2, max_model_len=100) == 100 / 4
    monkeypatch.setattr("pdserve.engine.build._MOST_KV_BYTES", 20 * page_bytes)
    assert num_pages(page_size=4, max_num_seqs=2) == 20


@pytest.mark.slow
def test_idle_threads_of_the_model_do_not_spin(tiny_dir: Path) -> None:
    """OpenMP reads its settings when torch is loaded, so only a fresh process can show them."""
    code = f"from pdserve import LLM; LLM({str(tiny_dir)!r}, threads=2, max_num_batched_tokens=64)"
    env = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")} | {
        "OMP_DISPLAY_ENV": "VERBOSE"
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=100, check=True
    )
    assert "GOMP_SPINCOUNT = '0'" in done.stderr


def test_weights_that_cannot_be_read(tiny_dir: Path, tmp_path: Path) -> None:
    for path in tiny_dir.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="cannot load the model"):
        build_core(config(tmp_path), PlainPool)


def test_a_model_gives_the_same_tokens_in_fixed_batches(tiny_dir: Path) -> None:
    """Rows of finished members write into pages that the others' prompts share, or lie beside them."""
    options = {"page_size": 4, "num_pages": 40, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    prompts = [[3, 4, 5, 6, 7, 8, 9, 10 + i][: 8 - i] for i in range(4)] * 2
    each = [params(1 + 5 * (i % 4), ignore_eos=True) for i in range(8)]
    several = {}
    for batching in ("continuous", "static"):
        llm = LLM(tiny_dir, batching=batching, **options)
        several[batching] = [r.token_ids for r in llm.generate(prompts, each)]
        idle(llm)
    assert several["static"] == several["continuous"]
