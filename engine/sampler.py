"""Chooses tokens from logits. A choice depends on (logits, parameters, seed, output index) alone, never on the batch.

Seeded sampling inverts the cumulative distribution in float64, in vocabulary order, at the noise of (seed, index): any
worker that computes the same logits chooses the same token.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from pdserve.core.errors import EngineError
from pdserve.core.hashing import sampling_uniform
from pdserve.core.request import PositionLogprobs, TokenLogprob
from pdserve.core.sampling import SamplingParams
from pdserve.engine.step import SampledToken


def sample(logits: Tensor, params: Seq[SamplingParams], output_indices: Seq[int]) -> list[SampledToken]:
    """Chooses one token per row.

    Args:
        logits: `[num_rows, vocab_size]`; unchanged.
        params: One per row; `seed` is set unless greedy.
        output_indices: Output index of each row's token.

    Raises:
        EngineError: The logits hold NaN.
    """
    if torch.isnan(logits).any():
        raise EngineError("the model produced NaN logits; its weights or the KV it read are damaged", reason="NAN")
    likeliest = torch.argmax(logits, dim=-1).tolist()
    sampled = []
    for row, (param, index) in enumerate(zip(params, output_indices, strict=True)):
        token = likeliest[row] if param.greedy else draw(logits[row], param, index)
        logprobs = None if param.logprobs is None else position_logprobs(logits[row], token, param.logprobs)
        sampled.append(SampledToken(token, logprobs))
    return sampled


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
    probs = torch.softmax(logits.double() / params.temperature, dim=0)
    if params.min_p > 0:
        probs = torch.where(probs >= params.min_p * probs.max(), probs, 0.0)
    limit = params.top_k if 0 < params.top_k < probs.shape[0] else probs.shape[0]
    if limit == probs.shape[0] and params.top_p == 1.0:
        return probs
    ordered, ids = torch.sort(probs, descending=True, stable=True)
    ordered[limit:] = 0.0
    if params.top_p < 1.0:
        cumulative = torch.cumsum(ordered, dim=0)
        # A token stays while the mass before it is below top_p: the likeliest one always does.
        ordered[1:][cumulative[:-1] >= params.top_p * cumulative[-1]] = 0.0
    return torch.zeros_like(probs).scatter_(0, ids, ordered)


def position_logprobs(logits: Tensor, token_id: int, num_top: int) -> PositionLogprobs:
    """Log-probabilities of the distribution before temperature and filters.

    Args:
        logits: `[vocab_size]`.
        token_id: The chosen token.
        num_top: Likeliest tokens to report.
    """
    logprobs = torch.log_softmax(logits.float(), dim=0)
    chosen = logprobs[token_id]
    rank = int((logprobs > chosen).sum()) + 1
    values, ids = torch.topk(logprobs, min(num_top, logprobs.shape[0]))
    top = tuple(
        TokenLogprob(token, value, i + 1)
        for i, (token, value) in enumerate(zip(ids.tolist(), values.tolist(), strict=True))
    )
    return PositionLogprobs(TokenLogprob(token_id, float(chosen), rank), top)
