"""Chooses tokens from logits. A choice depends on its row alone (logits, parameters, known tokens, seed, output index),
never on the batch.

Seeded sampling inverts the cumulative distribution in float64, in vocabulary order, at the noise of (seed, index): any
worker that computes the same logits chooses the same token.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from pdserve.core.hashing import sampling_uniform
from pdserve.core.request import PositionLogprobs, TokenLogprob
from pdserve.core.sampling import SamplingParams
from pdserve.engine.logits import LogitsProcessor
from pdserve.engine.step import SampledToken, SamplingFailure, ScheduledSequence

_FIRST_SORTED = 256
"""Tokens that are sorted at first to find the nucleus of top_p; more only when they do not hold it."""
_BLOCK = 16
"""Prompt positions whose log-probabilities are computed at once; more would leave the caches of a CPU."""
_BAD_LOGITS = SamplingFailure(
    "BAD_LOGITS",
    "the model produced logits that are not finite for this request; its weights or the KV it read are damaged, or "
    "--dtype is too narrow for it",
    kv_suspect=True,
)
_NO_TOKEN_LEFT = SamplingFailure(
    "NO_TOKEN_LEFT",
    "the request's sampling parameters together forbid every token here; allow more of them",
    "INVALID_ARGUMENT",
)


def sample(
    logits: Tensor, rows: Seq[ScheduledSequence], processors: Seq[LogitsProcessor]
) -> list[SampledToken | SamplingFailure]:
    """Chooses one token per row.

    A row fails alone: without a finite maximum (NaN, infinity, nothing but -infinity), or when its processors leave no
    token. Log-probabilities are those of `logits`, before any processor.

    Args:
        logits: `[num_rows, vocab_size]`; unchanged.
        rows: One per row, with `sampling`, whose `seed` is set unless greedy.
        processors: In the order in which they edit a row's logits.
    """
    maxima, likeliest = logits.max(dim=-1)  # of equals the first; NaN is greater than all
    finite, greedy = torch.isfinite(maxima).tolist(), likeliest.tolist()  # once: each may wait for a device
    sampled: list[SampledToken | SamplingFailure] = []
    for at, row in enumerate(rows):
        params = row.sampling
        assert params is not None, "a row to sample has parameters"
        wanted = [p for p in processors if p.wants(params)]
        token: int | SamplingFailure
        if not finite[at]:
            token = _BAD_LOGITS
        elif wanted:
            token = _choose_edited(logits[at].to(torch.float32, copy=True), row, params, wanted)
        else:
            token = greedy[at] if params.greedy else draw(logits[at], params, row.output_index)
        if isinstance(token, SamplingFailure):
            sampled.append(token)
            continue
        logprobs = None if params.logprobs is None else position_logprobs(logits[at], token, params.logprobs)
        sampled.append(SampledToken(token, logprobs))
    return sampled


def _choose_edited(
    logits: Tensor, row: ScheduledSequence, params: SamplingParams, processors: Seq[LogitsProcessor]
) -> int | SamplingFailure:
    for processor in processors:
        if (failure := processor.edit(logits, row)) is not None:
            return failure
    maximum, likeliest = logits.max(dim=-1)
    if not torch.isfinite(maximum):
        return _NO_TOKEN_LEFT
    return int(likeliest) if params.greedy else draw(logits, params, row.output_index)


def draw(logits: Tensor, params: SamplingParams, output_index: int) -> int:
    """Draws from one row with temperature > 0.

    Args:
        logits: `[vocab_size]`.
        params: Parameters with a seed.
        output_index: Output index of the token.
    """
    assert params.seed is not None, "the entrance draws a seed"
    kept = filtered_probabilities(logits, params)
    cumulative = torch.cumsum(kept, dim=0)
    target = cumulative[-1] * sampling_uniform(params.seed, output_index)
    token = int(torch.searchsorted(cumulative, target, right=True))
    # Rounding may put the target at the very end: the last token that can be drawn.
    return token if token < kept.shape[0] else int(torch.nonzero(kept)[-1])


def filtered_probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution after temperature, min_p, top_k and top_p, in this order; not renormalised.

    Of equally likely tokens at the border of top_k or top_p, those with lower ids stay.

    Args:
        logits: `[vocab_size]`; unchanged.
        params: Parameters with temperature > 0.

    Returns:
        `[vocab_size]` float64; 0 where a token is filtered out; at least one is not.
    """
    # Differences to the maximum: dividing logits themselves by a tiny temperature would overflow.
    probs = torch.softmax((logits.double() - logits.max()) / params.temperature, dim=0)
    if params.min_p > 0:
        probs = torch.where(probs >= params.min_p * probs.max(), probs, 0.0)
    if 0 < params.top_k < int(torch.count_nonzero(probs)):
        probs = _only(probs, _largest(probs, params.top_k))
    if params.top_p < 1.0:
        probs = _only(probs, _nucleus(probs, params.top_p))
    return probs


def _only(probs: Tensor, ids: Tensor) -> Tensor:
    return torch.zeros_like(probs).index_copy_(0, ids, probs[ids])


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Ids of the likeliest tokens: a token stays while the mass before it is below `top_p` of all mass."""
    goal = top_p * probs.sum()
    num_possible = int(torch.count_nonzero(probs))
    num_sorted = _FIRST_SORTED
    while True:
        num_sorted = min(num_sorted, num_possible)
        ids = _largest(probs, num_sorted)
        num_kept = 1 + int((torch.cumsum(probs[ids[:-1]], dim=0) < goal).sum())
        if num_kept < num_sorted or num_sorted == num_possible:
            return ids[:num_kept]
        num_sorted *= 16


def _largest(values: Tensor, num: int) -> Tensor:
    """Ids of the `num` largest, in descending order; of equals the lower id first."""
    # Finding the border and sorting what lies above it is many times faster than sorting a vocabulary.
    border = torch.topk(values, num).values[-1]
    ids = torch.nonzero(values >= border).flatten()
    return ids[torch.sort(values[ids], descending=True, stable=True).indices[:num]]


def position_logprobs(logits: Tensor, token_id: int, num_top: int) -> PositionLogprobs:
    """Log-probabilities of the distribution before temperature and filters; of equals the lower id ranks first.

    Args:
        logits: `[vocab_size]`.
        token_id: The chosen token.
        num_top: Likeliest tokens to report.
    """
    return _rows_logprobs(logits[None], [token_id], num_top)[0]


def _rows_logprobs(logits: Tensor, token_ids: Seq[int], num_top: int) -> list[PositionLogprobs]:
    """`position_logprobs` of `[num_rows, vocab_size]` at once, with one token per row."""
    logprobs = torch.log_softmax(logits.float(), dim=1)
    tops = _tops(logprobs, num_top) if num_top else [()] * len(token_ids)
    told = []
    for row, token, top in zip(logprobs, token_ids, tops, strict=True):
        chosen = row[token]
        rank = 1 + int((row[:token] >= chosen).sum()) + int((row[token:] > chosen).sum())
        told.append(PositionLogprobs(TokenLogprob(token, float(chosen), rank), top))
    return told


def _tops(logprobs: Tensor, num_top: int) -> list[tuple[TokenLogprob, ...]]:
    """The likeliest tokens of `[num_rows, vocab_size]`, row by row."""
    num_top = min(num_top, logprobs.shape[1])
    values, ids = torch.topk(logprobs, min(num_top + 1, logprobs.shape[1]), dim=1)
    tied = (values[:, num_top - 1] == values[:, -1]).tolist() if values.shape[1] > num_top else [False] * len(ids)
    ids = ids[:, :num_top].sort(dim=1).values
    values, order = logprobs.gather(1, ids).sort(dim=1, descending=True, stable=True)
    ids = ids.gather(1, order)
    for at in (at for at, is_tied in enumerate(tied) if is_tied):  # which of several equals topk takes is not said
        ids[at] = _largest(logprobs[at], num_top)
    rows = zip(ids.tolist(), values.tolist(), strict=True)
    return [tuple(TokenLogprob(t, v, rank) for rank, (t, v) in enumerate(zip(*row, strict=True), 1)) for row in rows]


def prompt_logprobs(logits: Tensor, sequences: Seq[ScheduledSequence]) -> dict[int, tuple[PositionLogprobs, ...]]:
    """Log-probabilities at the prompt positions that a step tells.

    Args:
        logits: `[num_positions, vocab_size]`: of the rows that predict them, sequence by sequence.
        sequences: Of the step.

    Returns:
        By index of the sequence.
    """
    told: dict[int, tuple[PositionLogprobs, ...]] = {}
    row = 0
    for at, seq in enumerate(sequences):
        if (asked := seq.prompt) is not None:
            tokens = seq.known[asked.first : asked.last + 1]
            positions: list[PositionLogprobs] = []
            for first in range(0, len(tokens), _BLOCK):
                block = tokens[first : first + _BLOCK]
                positions += _rows_logprobs(logits[row : row + len(block)], block, asked.num_top)
                row += len(block)
            told[at] = tuple(positions)
    return told
