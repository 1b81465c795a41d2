"""Workloads: which prompts arrive when. Pure and seeded: the same arguments give the same workload on any machine.

Lengths come from numbers (`random_items`) or from a trace of real traffic (`read_trace`, `trace_items`). A trace keeps
its own arrival times unless a request rate is given.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate
from pathlib import Path

from pdserve.core.errors import ConfigError

MOONCAKE_BLOCK_TOKENS = 512
_FIRST_ORDINARY_TOKEN = 3
"""Ids below are special tokens in most vocabularies; a prompt full of them is not a prompt."""


@dataclass(frozen=True, slots=True)
class Item:
    """One request to send.

    Attributes:
        arrival_s: Seconds after the start.
        prompt_token_ids: The prompt.
        max_tokens: Tokens to generate.
    """

    arrival_s: float
    prompt_token_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace.

    Attributes:
        arrival_s: Seconds after the first row; None: the trace has lengths only.
        input_tokens: Tokens of the prompt.
        output_tokens: Tokens generated.
        hash_ids: One id per block of `MOONCAKE_BLOCK_TOKENS` prompt tokens, equal for equal content; empty: unknown.
    """

    arrival_s: float | None
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


def arrival_times(num: int, request_rate: float, burstiness: float, seed: int) -> list[float]:
    """Arrival times with gamma-distributed gaps, the first at 0.

    Args:
        num: Requests.
        request_rate: Mean requests per second; infinity: all at once.
        burstiness: Shape of the gamma distribution, > 0: 1 is a Poisson process, less is burstier, more is steadier.
        seed: Of the gaps.
    """
    if math.isinf(request_rate):
        return [0.0] * num
    rng = random.Random(f"arrivals {seed}")
    gaps = (rng.gammavariate(burstiness, 1 / (request_rate * burstiness)) for _ in range(num - 1))
    return list(accumulate(gaps, initial=0.0)) if num else []


def random_items(
    arrivals: Sequence[float], input_len: int, output_len: int, range_ratio: float, vocab_size: int, seed: int
) -> list[Item]:
    """Prompts of random tokens.

    Args:
        arrivals: Seconds after the start, one per request.
        input_len: Prompt tokens.
        output_len: Tokens to generate.
        range_ratio: Lengths are uniform in [len * (1 - range_ratio), len * (1 + range_ratio)], in [0, 1).
        vocab_size: Size of the vocabulary.
        seed: Of lengths and tokens.
    """
    rng = random.Random(f"items {seed}")
    return [
        Item(
            at,
            _tokens(rng, _spread(rng, input_len, range_ratio), vocab_size),
            _spread(rng, output_len, range_ratio),
        )
        for at in arrivals
    ]


def chat_items(num: int, scale: float, vocab_size: int, seed: int) -> list[Item]:
    """Prompts of random tokens that all arrive at once, with the spread of lengths of shared chats.

    Log-normal with means of 161 prompt and 338 output tokens, those of ShareGPT, cut to [4, 2048] before scaling.
    Source of the means: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", SOSP 2023, figure 11.

    Args:
        num: Requests.
        scale: Divides lengths, >= 1.
        vocab_size: Size of the vocabulary.
        seed: Of lengths and tokens.
    """
    rng = random.Random(f"chat {seed}")

    def length(mean: float) -> int:
        tokens = min(2048.0, max(4.0, rng.lognormvariate(math.log(mean) - 0.5, 1.0)))
        return max(1, round(tokens / scale))

    return [Item(0.0, _tokens(rng, length(161), vocab_size), length(338)) for _ in range(num)]


def read_trace(path: Path) -> list[TraceRow]:
    """Reads an Azure CSV (TIMESTAMP, ContextTokens, GeneratedTokens), a Mooncake JSONL or a CSV of lengths.

    Raises:
        ConfigError: It cannot be read, or has none of these forms.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            first = file.readline()
            file.seek(0)
            rows = list(_mooncake_rows(file)) if first.startswith("{") else list(_csv_rows(csv.DictReader(file)))
    except OSError as e:
        raise ConfigError(f"--trace {path}: {e.strerror}") from e
    except (KeyError, ValueError, TypeError) as e:
        raise ConfigError(
            f"--trace {path}: not a trace of a known form ({e!r}); known are the files in bench/data (see its README)"
        ) from e
    if not rows:
        raise ConfigError(f"--trace {path}: no rows")
    start = min((r.arrival_s for r in rows if r.arrival_s is not None), default=0.0)
    return [r if r.arrival_s is None else replace(r, arrival_s=r.arrival_s - start) for r in rows]


def trace_items(
    rows: Sequence[TraceRow], scale: float, arrivals: Sequence[float] | None, vocab_size: int, seed: int
) -> list[Item]:
    """Requests of a trace, made smaller: lengths divided by `scale`, gaps between arrivals multiplied by it.

    Equal hash ids give equal tokens, so the trace's prefix sharing is kept.

    Args:
        rows: The trace.
        scale: >= 1.
        arrivals: Replaces the trace's arrival times; needed when it has none.
        vocab_size: Size of the vocabulary.
        seed: Of the tokens.

    Raises:
        ConfigError: The trace has no arrival times and none are given.
    """
    block_tokens = max(1, round(MOONCAKE_BLOCK_TOKENS / scale))
    items = []
    for i, row in enumerate(rows):
        if arrivals is None and row.arrival_s is None:
            raise ConfigError("this trace has lengths only; give --request-rate")
        at = arrivals[i] if arrivals is not None else (row.arrival_s or 0.0) * scale
        length = max(1, round(row.input_tokens / scale))
        if row.hash_ids:
            prompt = _blocks(row.hash_ids, block_tokens, length, vocab_size, seed, i)
        else:
            prompt = _tokens(random.Random(f"row {seed} {i}"), length, vocab_size)
        items.append(Item(at, prompt, max(1, round(row.output_tokens / scale))))
    return items


def fit(items: Sequence[Item], max_model_len: int) -> tuple[list[Item], int]:
    """Cuts what a model cannot take: first the output to half the context, then the prompt's end.

    Returns:
        The items, and how many of them were cut.
    """
    fitted = []
    for item in items:
        output = min(item.max_tokens, max(1, max_model_len // 2))
        prompt = item.prompt_token_ids[: max_model_len - output]
        fitted.append(Item(item.arrival_s, prompt, output))
    return fitted, sum(a != b for a, b in zip(items, fitted, strict=True))


def _blocks(
    hash_ids: Sequence[int], block_tokens: int, length: int, vocab_size: int, seed: int, row: int
) -> tuple[int, ...]:
    tokens: list[int] = []
    for hash_id in hash_ids:
        tokens += _tokens(random.Random(f"block {seed} {hash_id}"), block_tokens, vocab_size)
    if len(tokens) < length:  # rounding, or a prompt longer than its blocks
        tokens += _tokens(random.Random(f"row {seed} {row}"), length - len(tokens), vocab_size)
    return tuple(tokens[:length])


def _tokens(rng: random.Random, num: int, vocab_size: int) -> tuple[int, ...]:
    first = min(_FIRST_ORDINARY_TOKEN, vocab_size - 1)
    return tuple(first + int(rng.random() * (vocab_size - first)) for _ in range(num))


def _spread(rng: random.Random, length: int, ratio: float) -> int:
    return max(1, rng.randint(math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio))))


def _mooncake_rows(lines: Iterator[str]) -> Iterator[TraceRow]:
    for line in lines:
        if line.strip():
            r = json.loads(line)
            yield TraceRow(r["timestamp"] / 1000, r["input_length"], r["output_length"], tuple(r["hash_ids"]))


def _csv_rows(reader: csv.DictReader[str]) -> Iterator[TraceRow]:
    azure = "TIMESTAMP" in (reader.fieldnames or ())
    for r in reader:
        if azure:
            yield TraceRow(_azure_seconds(r["TIMESTAMP"]), int(r["ContextTokens"]), int(r["GeneratedTokens"]))
        else:
            yield TraceRow(None, int(r["num_prefill_tokens"]), int(r["num_decode_tokens"]))


def _azure_seconds(stamp: str) -> float:
    """ "2023-11-16 18:17:03.9799600": seven digits of fraction, one more than datetime takes."""
    whole, _, fraction = stamp.partition(".")
    base = datetime.fromisoformat(f"{whole}+00:00").timestamp()
    return base + (float(f"0.{fraction}") if fraction else 0.0)
