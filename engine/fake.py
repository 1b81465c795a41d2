"""FakeRunner: no model. KV is hash(token, position), written into real pages; a token derives from all KV read back.

So a stale, foreign, swapped or missing page becomes a wrong token. `expected_tokens` is the same without any page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pdserve.core.layout import KVLayout
from pdserve.core.request import PositionLogprobs, TokenLogprob
from pdserve.engine.fake_choice import choose
from pdserve.engine.page_copies import PageCopies
from pdserve.engine.step import RunnerOutput, SampledToken, SamplingFailure, ScheduledSequence, SchedulerOutput
from pdserve.engine.swap import PreemptionCosts

FAKE_VOCAB_SIZE = 257
FAKE_EOS = 256


def fake_layout(page_size: int = 16) -> KVLayout:
    """Layout of the fake: 16 bytes per token, a 64-bit key and a 64-bit value."""
    return KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=2, page_size=page_size, dtype="float32")


def fake_costs(page_size: int, token_budget: int) -> PreemptionCosts:
    """Costs that are the same in every run: a millisecond per step, and 0.1 per token and per page copied."""
    return PreemptionCosts(
        step_points=((1, 0.001), (1001, 0.101)),
        context_s=0.0,
        token_budget=token_budget,
        page_copy_s=0.0001,
        swap_fixed_s=0.002,
        page_size=page_size,
    )


def expected_tokens(tokens: Sequence[int], num_tokens: int, eos_period: int | None = None) -> list[int]:
    """What a right engine samples after `tokens` (prompt and emitted): `num_tokens` of them, fewer at an EOS."""
    fold, folded, known = 0, 0, list(tokens)
    while len(known) < len(tokens) + num_tokens and (folded < len(tokens) or known[-1] != FAKE_EOS):
        for position in range(folded, len(known)):
            key = _mix(known[position] << 32 | position)
            fold += (key + (key ^ _mix(key)) * 3) * (_mix(position) | 1)
        folded = len(known)
        known.append(_token(_mix(fold % 2**64), eos_period))
    return known[len(tokens) :]


class FakeRunner:
    """Computes steps over `buffer`, the bytes of all pages in `fake_layout`.

    Args:
        buffer: The pool's bytes.
        layout: See `fake_layout`.
        eos_period: See `_token`.
        host: Bytes of the host pool; None: nothing is swapped.
    """

    def __init__(
        self, buffer: memoryview, layout: KVLayout, eos_period: int | None = None, host: memoryview | None = None
    ) -> None:
        self._copies = PageCopies(layout.page_bytes, buffer, host)
        self._page_size = layout.page_size
        self._kv = np.frombuffer(buffer, np.uint64).reshape(-1, 2, layout.page_size)  # [page][K|V][token]
        positions = np.arange(len(self._kv) * layout.page_size, dtype=np.uint64)
        self._weights = (_mix(positions) | np.uint64(1)).reshape(-1, layout.page_size)
        self._eos_period = eos_period

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """See `Runner`."""
        output.require_pages(self._page_size)
        self._copies.apply(output.copies)
        if not output.sequences:
            return RunnerOutput(())
        items, size = output.sequences, self._page_size
        ends = [item.start + len(item.token_ids) for item in items]
        counts = np.array([-(-end // size) for end in ends])
        table = np.array([p for i, n in zip(items, counts.tolist(), strict=True) for p in i.page_table[:n]])
        first = np.cumsum(counts) - counts
        # Write the new tokens' KV ...
        tokens = np.array([t for item in items for t in item.token_ids], dtype=np.uint64)
        at = np.array([p for item, end in zip(items, ends, strict=True) for p in range(item.start, end)])
        pages = table[np.repeat(first, [len(item.token_ids) for item in items]) + at // size]
        key = _mix(tokens << np.uint64(32) | at.astype(np.uint64))
        self._kv[pages, :, at % size] = np.stack((key, key ^ _mix(key)), axis=1)
        # ... and read all of every sequence.
        ordinal = np.arange(len(table)) - np.repeat(first, counts)
        valid = np.repeat(np.array(ends), counts) - ordinal * size
        kv = self._kv[table]
        terms = (kv[:, 0] + kv[:, 1] * np.uint64(3)) * self._weights[ordinal]
        terms[np.arange(size) >= valid[:, None]] = 0
        noise = _mix(np.add.reduceat(terms.sum(axis=1), first)).tolist()
        prompts = {i: _prompt_logprobs(item) for i, item in enumerate(items) if item.prompt is not None}
        return RunnerOutput(tuple(map(self._sample, items, noise)), prompts)

    def _sample(self, item: ScheduledSequence, noise: int) -> SampledToken | SamplingFailure | None:
        if item.sampling is None:
            return None
        token = choose(_token(noise, self._eos_period), noise, item.sampling, item, FAKE_VOCAB_SIZE, FAKE_EOS)
        if isinstance(token, SamplingFailure):
            return token
        num_logprobs = item.sampling.logprobs
        chosen = TokenLogprob(token, 0.0, 1)
        return SampledToken(token, None if num_logprobs is None else PositionLogprobs(chosen, (chosen,)[:num_logprobs]))


def _prompt_logprobs(item: ScheduledSequence) -> tuple[PositionLogprobs, ...]:
    """Every token of the prompt was certain."""
    assert item.prompt is not None
    chosen = (TokenLogprob(t, 0.0, 1) for t in item.known[item.prompt.first : item.prompt.last + 1])
    return tuple(PositionLogprobs(c, (c,)[: item.prompt.num_top]) for c in chosen)


def _token(noise: int, eos_period: int | None) -> int:
    """About every eos_period-th token is `FAKE_EOS`; with None, none is."""
    return FAKE_EOS if eos_period and noise // 256 % eos_period == 0 else noise % 256


def _mix(word: Any) -> Any:  # int or uint64 array
    """A bijection of 64-bit words that scatters them. Source: splitmix64, Steele, Lea and Flood 2014."""
    word = (word + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return word ^ (word >> 31)
