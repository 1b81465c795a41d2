"""FakeRunner: no model. KV is hash(token, position), written into real pages; a token derives from all KV read back.

So a stale, foreign, swapped or missing page becomes a wrong token. `expected_tokens` is the same without any page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from pdserve.core.layout import KVLayout
from pdserve.core.request import PositionLogprobs, TokenLogprob
from pdserve.engine.step import RunnerOutput, SampledToken, ScheduledSequence, SchedulerOutput

U64 = npt.NDArray[np.uint64]
FAKE_VOCAB_SIZE = 257
FAKE_EOS = 256
_MASK = 2**64 - 1
_Word = TypeVar("_Word", int, U64)


def fake_layout(page_size: int = 16) -> KVLayout:
    """Layout of the fake: 16 bytes per token, a 64-bit key and a 64-bit value."""
    return KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=2, page_size=page_size, dtype="float32")


def _mix(word: _Word) -> _Word:
    """A bijection of 64-bit words that scatters them. Source: splitmix64, Steele, Lea and Flood 2014."""
    w: Any = word  # numpy's types for mixed operands are too wide
    w = (w + 0x9E3779B97F4A7C15) & _MASK
    w = ((w ^ (w >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    w = ((w ^ (w >> 27)) * 0x94D049BB133111EB) & _MASK
    return cast(_Word, w ^ (w >> 31))


def expected_tokens(tokens: Sequence[int], num_tokens: int, eos_period: int | None = None) -> list[int]:
    """What a right engine samples after `tokens` (prompt and emitted): `num_tokens` of them, fewer at an EOS."""
    fold, known, sampled = 0, 0, list(tokens)
    while len(sampled) - len(tokens) < num_tokens and (known < len(tokens) or sampled[-1] != FAKE_EOS):
        for position in range(known, len(sampled)):
            key = _mix(sampled[position] << 32 | position)
            fold += (key + (key ^ _mix(key)) * 3) * (_mix(position) | 1)
        known, noise = len(sampled), _mix(fold & _MASK)
        sampled.append(FAKE_EOS if eos_period and noise // 256 % eos_period == 0 else noise % 256)
    return sampled[len(tokens) :]


class FakeRunner:
    """Computes steps over a page buffer.

    Args:
        buffer: Writable bytes of all pages.
        layout: `fake_layout(page_size)`.
        eos_period: About every eos_period-th token is `FAKE_EOS`; None: never.
    """

    def __init__(self, buffer: memoryview, layout: KVLayout, eos_period: int | None = None) -> None:
        self._page_size = layout.page_size
        self._kv: U64 = np.frombuffer(buffer, np.uint64).reshape(-1, 2, layout.page_size)  # [page][K|V][token]
        self._weights: U64 = _mix(np.arange(self._kv[:, 0].size, dtype=np.uint64)) | np.uint64(1)
        self._weights = self._weights.reshape(-1, layout.page_size)
        self._eos_period = eos_period

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """See `Runner`."""
        pages: list[int] = []
        first_page, ends = [], []
        for item in output.sequences:
            first_page.append(len(pages))
            ends.append(item.start + len(item.token_ids))
            pages += item.page_table[: -(-ends[-1] // self._page_size)]
        table, first = np.array(pages), np.array(first_page)
        self._write(output.sequences, table, first)
        counts = np.diff(first, append=len(pages))
        ordinal = np.arange(len(pages)) - np.repeat(first, counts)
        valid = np.repeat(np.array(ends), counts) - ordinal * self._page_size
        kv = self._kv[table]
        terms = (kv[:, 0] + kv[:, 1] * np.uint64(3)) * self._weights[ordinal]
        terms[np.arange(self._page_size) >= valid[:, None]] = 0
        noise = _mix(np.add.reduceat(terms.sum(axis=1), first)).tolist()
        return RunnerOutput(tuple(map(self._sample, output.sequences, noise)))

    def _write(
        self, items: Sequence[ScheduledSequence], table: npt.NDArray[np.int64], first: npt.NDArray[np.int64]
    ) -> None:
        tokens = np.array([t for item in items for t in item.token_ids], dtype=np.uint64)
        positions = np.array([p for i in items for p in range(i.start, i.start + len(i.token_ids))])
        base = np.repeat(first, [len(item.token_ids) for item in items])
        page, slot = table[base + positions // self._page_size], positions % self._page_size
        key = _mix(tokens << np.uint64(32) | positions.astype(np.uint64))
        self._kv[page, 0, slot] = key
        self._kv[page, 1, slot] = key ^ _mix(key)

    def _sample(self, item: ScheduledSequence, noise: int) -> SampledToken | None:
        if item.sampling is None:
            return None
        token = FAKE_EOS if self._eos_period and noise // 256 % self._eos_period == 0 else noise % 256
        if item.sampling.logprobs is None:
            return SampledToken(token)
        chosen = TokenLogprob(token, 0.0, 1)
        return SampledToken(token, PositionLogprobs(chosen, (chosen,) if item.sampling.logprobs else ()))
