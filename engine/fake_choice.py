"""What the fake runner makes of sampling parameters: noise, but no logits; what needs these is refused by name."""

from __future__ import annotations

from pdserve.core.sampling import SamplingParams
from pdserve.engine.step import SamplingFailure, ScheduledSequence

_NEED_LOGITS = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "bad_words",
    "structured_outputs",
)
_PLAIN = SamplingParams()


def choose(
    token_id: int, noise: int, params: SamplingParams, item: ScheduledSequence, vocab_size: int, eos: int
) -> int | SamplingFailure:
    """The token that is sampled instead of `token_id`, if a parameter asks for another one.

    Args:
        token_id: What is sampled without any wish.
        noise: Decides among the tokens that may be chosen.
        params: Of the sequence.
        item: The sequence.
        vocab_size: Token ids are below it.
        eos: End-of-sequence token.
    """
    for name in _NEED_LOGITS:
        if getattr(params, name) != getattr(_PLAIN, name):
            message = f"sampling parameter '{name}' needs a model; the fake runner has none: leave it out"
            return SamplingFailure("UNSUPPORTED_PARAMETER", message, "UNIMPLEMENTED")
    early = item.output_index < params.min_tokens
    if not (params.allowed_token_ids or early):
        return token_id
    ends = {eos, *params.stop_token_ids} if early else set()
    allowed = [t for t in params.allowed_token_ids or range(vocab_size) if t not in ends]
    if token_id in allowed:
        return token_id
    if not allowed:
        message = "the request's sampling parameters together forbid every token here; allow more of them"
        return SamplingFailure("NO_TOKEN_LEFT", message, "INVALID_ARGUMENT")
    return allowed[noise % len(allowed)]
