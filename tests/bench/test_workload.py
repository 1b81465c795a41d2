"""Workloads: the rates they promise, determinism by seed, and the traces of bench/data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.bench.workload import Item, arrival_times, fit, random_items, read_trace, trace_items
from pdserve.core.errors import ConfigError

DATA = Path(__file__).resolve().parents[2] / "bench" / "data"
VOCAB = 1000


@given(
    st.integers(0, 60),
    st.one_of(st.floats(0.01, 1000), st.just(math.inf)),
    st.floats(0.1, 10),
    st.integers(0, 2**32),
)
def test_arrivals_are_ordered_from_zero_and_repeat_by_seed(num: int, rate: float, burstiness: float, seed: int) -> None:
    times = arrival_times(num, rate, burstiness, seed)
    assert len(times) == num and times == sorted(times) and times[:1] in ([], [0.0])
    assert times == arrival_times(num, rate, burstiness, seed)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_keep_the_rate_and_the_burstiness(burstiness: float) -> None:
    times = arrival_times(20001, 5.0, burstiness, 1)
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((g - mean) ** 2 for g in gaps) / len(gaps)
    assert mean == pytest.approx(0.2, rel=0.06)
    assert mean**2 / variance == pytest.approx(burstiness, rel=0.1)  # the shape of a gamma distribution


@settings(max_examples=50)
@given(st.integers(1, 40), st.integers(1, 40), st.floats(0, 0.99), st.integers(2, 200), st.integers(0, 99))
def test_random_items_stay_in_their_ranges(inputs: int, outputs: int, ratio: float, vocab: int, seed: int) -> None:
    items = random_items([0.0, 0.5], inputs, outputs, ratio, vocab, seed)
    assert [i.arrival_s for i in items] == [0.0, 0.5]
    for item in items:
        assert max(1, math.floor(inputs * (1 - ratio))) <= len(item.prompt_token_ids) <= math.ceil(inputs * (1 + ratio))
        assert max(1, math.floor(outputs * (1 - ratio))) <= item.max_tokens <= math.ceil(outputs * (1 + ratio))
        assert all(0 <= t < vocab for t in item.prompt_token_ids)
    assert items == random_items([0.0, 0.5], inputs, outputs, ratio, vocab, seed)


def test_azure_trace_keeps_its_times() -> None:
    rows = read_trace(DATA / "azure2023_code_2000.csv")
    assert len(rows) == 2000 and (rows[0].input_tokens, rows[0].output_tokens) == (4808, 10)
    assert rows[0].arrival_s == 0 and rows[1].arrival_s == pytest.approx(0.052, abs=1e-4)
    items = trace_items(rows[:2], 16, None, VOCAB, 0)
    assert items[1].arrival_s == pytest.approx(0.052 * 16, abs=2e-3)
    assert (len(items[0].prompt_token_ids), items[0].max_tokens) == (300, 1)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix of two unequal sequences."""
    return next(i for i, (p, q) in enumerate(zip(a, b, strict=False)) if p != q)


@pytest.mark.parametrize("scale", [1.0, 16.0, 7.0])
def test_mooncake_trace_keeps_its_prefix_sharing(scale: float) -> None:
    rows = read_trace(DATA / "mooncake_conversation_907.jsonl")[:60]
    block = round(512 / scale)
    items = trace_items(rows, scale, None, VOCAB, 3)
    for row, item in zip(rows, items, strict=True):
        assert len(item.prompt_token_ids) == max(1, round(row.input_tokens / scale))
    for (a, x), (b, y) in pairwise(zip(rows, items, strict=True)):
        shared = common(a.hash_ids, b.hash_ids)
        assert shared * block <= common(x.prompt_token_ids, y.prompt_token_ids) < (shared + 1) * block
    assert items == trace_items(rows, scale, None, VOCAB, 3) != trace_items(rows, scale, None, VOCAB, 4)


def test_lengths_only_need_a_rate() -> None:
    rows = read_trace(DATA / "arxiv_summarization_lengths_2000.csv")
    assert (rows[0].input_tokens, rows[0].output_tokens, rows[0].arrival_s) == (3772, 54, None)
    with pytest.raises(ConfigError, match="--request-rate"):
        trace_items(rows[:1], 16, None, VOCAB, 0)
    assert trace_items(rows[:1], 16, [2.5], VOCAB, 0)[0].arrival_s == 2.5


@pytest.mark.parametrize(
    "text", ["", "a,b\n1,2\n", '{"timestamp": 1}\n', "TIMESTAMP,ContextTokens,GeneratedTokens\nx,1,2\n"]
)
def test_other_files_are_refused_by_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"trace\.txt"):
        read_trace(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "absent")


@given(st.integers(1, 50), st.integers(1, 50), st.integers(2, 40))
def test_fit_makes_every_request_possible(inputs: int, outputs: int, limit: int) -> None:
    item = Item(0.0, tuple(range(inputs)), outputs)
    [fitted], cut = fit([item], limit)
    assert len(fitted.prompt_token_ids) >= 1 and len(fitted.prompt_token_ids) + fitted.max_tokens <= limit
    assert cut == (fitted != item)
    assert inputs + outputs > limit or outputs > limit // 2 or fitted == item
