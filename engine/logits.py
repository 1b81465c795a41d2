"""Logits processors: what a request asks of the next token, beyond temperature and filters, as edits of its logits.

A processor is a small object with two methods. The sampler asks each, in order, whether a request's parameters want it,
and lets it edit a copy of that row's logits; rows that want none share the fast path and pay nothing. What a processor
does follows from the row's tokens and parameters alone, so that a sequence that was handed off, preempted or retried
goes on with the same tokens.

Another one is added by implementing `LogitsProcessor` and giving it to `ModelRunner` in `engine.build`.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pdserve.core.sampling import SamplingParams
from pdserve.engine.step import SamplingFailure, ScheduledSequence


class LogitsProcessor(Protocol):
    """Edits the logits of the rows whose requests ask for it."""

    def wants(self, params: SamplingParams) -> bool:
        """Says whether a request with these parameters asks for it; called for every row of every step."""
        ...

    def edit(self, logits: Tensor, row: ScheduledSequence) -> SamplingFailure | None:
        """Edits one row in place; -infinity forbids a token.

        Args:
            logits: `[vocab_size]` float32, this row's own; what processors before it left.
            row: The sequence: `known` tokens, of which `num_prompt` are the prompt, and its parameters in `sampling`.

        Returns:
            Why no token can be chosen, or None. The failure ends this sequence alone.
        """
        ...
