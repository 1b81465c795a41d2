"""Chunks: how a step's tokens are dealt out to prompts. Pure.

1. Decodes are in the step in any case. Prompts get what they leave of the token budget, but at least `least_tokens` (or
   the whole budget, if that is less): a full set of decodes must not starve them, whatever the budget.
2. In the order in which they are dealt (running ones by age, then those that start) each takes what it needs; a long
   prompt no more than its cap, so that those behind it get some too.
3. What is left in the end goes to the long ones after all, in the same order.
4. A token whose log-probability is asked takes `SCORED_COST` of the budget, for its row of logits costs about what the
   token does; and prompts with such tokens take `SCORED_TOKENS` of a step together, whatever is left.
5. Beside decodes, which wait for the step, a token takes more of the budget the more tokens are before it, for it
   attends to all of them: 1 + (tokens before its chunk) / `context_unit`. Without decodes nobody waits: larger chunks
   take less time in all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pdserve.engine.sequence import Sequence

LEAST_TOKENS = 16
"""Tokens of prompts in a step, unless told otherwise; a budget that is measured is never less."""
SCORED_TOKENS = 32
"""Tokens per step of prompts whose log-probabilities are asked."""
SCORED_COST = 2
"""Tokens of the budget that one of them takes: with a vocabulary of 49,152 on a CPU its row of logits was measured to
take 2.6 ms and its log-probabilities 0.5, about what a token takes in the layers before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerLimits:
    """What a step and a sequence may take.

    Attributes:
        page_size: Tokens per page.
        max_num_seqs: Sequences that run at once.
        max_num_batched_tokens: Token budget of a step; prefill chunks get what the running decodes leave of it.
        max_model_len: Known tokens of one sequence.
        least_tokens: Of prompts in a step, however many decodes there are.
        long_tokens: A prompt with more tokens than this to compute is long, and takes no more of a step while others
            want some; None: none is long.
        max_num_long: Long prompts that are computed at once.
        max_unreserved_fraction: Share of the pool that hand-offs without a reserved destination may hold together; one
            alone may hold more.
        retry_after_s: What a reservation refused for want of pages is told.
        context_unit: Tokens of context with which a prompt's token takes twice as much of a step as without, where the
            step has decodes; inf: context is not counted.
    """

    page_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    least_tokens: int = LEAST_TOKENS
    long_tokens: int | None = None
    max_num_long: int = 1
    max_unreserved_fraction: float = 0.25
    retry_after_s: float = 1.0
    context_unit: float = math.inf


class Chunks:
    """Deals out one step.

    Args:
        limits: The step's limits.
        num_decodes: Tokens that are in the step already.

    Attributes:
        left: What is left of the budget, in tokens without context.
        sequences: Those dealt some, in order.
    """

    __slots__ = ("_context_unit", "_left_scored", "_limits", "_num_long", "_num_tokens", "left", "sequences")

    def __init__(self, limits: SchedulerLimits, num_decodes: int) -> None:
        budget = limits.max_num_batched_tokens
        self.left: float = max(budget - num_decodes, min(limits.least_tokens, budget))
        self.sequences: list[Sequence] = []
        self._limits = limits
        self._context_unit = limits.context_unit if num_decodes else math.inf
        self._left_scored = SCORED_TOKENS
        self._num_long = 0
        self._num_tokens: list[int] = []

    @property
    def may_add_long(self) -> bool:
        """Says whether one more long prompt may be computed."""
        return self._num_long < self._limits.max_num_long

    def deal(self, seq: Sequence, least: int = 0) -> None:
        """Gives a sequence its share.

        Args:
            seq: A sequence that runs and has tokens to compute, dealt once per step.
            least: Tokens that it gets in any case.
        """
        wanted = cap = seq.goal - seq.num_computed
        assert wanted >= max(1, least), f"sequence {seq.key} wants {wanted} tokens"
        if seq.long and wanted > 1:
            self._num_long += 1
            cap = self._limits.long_tokens or wanted
        if seq.scores_prompt:
            cap = min(cap, self._left_scored)
        if num_tokens := max(least, min(wanted, cap, self._room(seq))):
            self._take(seq, num_tokens)
            if seq.scores_prompt:
                self._left_scored = max(0, self._left_scored - num_tokens)
            self.sequences.append(seq)
            self._num_tokens.append(num_tokens)

    def _cost(self, seq: Sequence) -> float:
        """What one of its tokens takes of the budget."""
        return (SCORED_COST if seq.scores_prompt else 1) + seq.num_computed / self._context_unit

    def _room(self, seq: Sequence) -> int:
        """Tokens of it that fit into what is left; while anything is left at least one, or it might never get on."""
        return max(1, int(self.left / self._cost(seq))) if self.left >= 1 else 0

    def _take(self, seq: Sequence, num_tokens: int) -> None:
        self.left = max(0, self.left - num_tokens * self._cost(seq))

    @property
    def num_tokens(self) -> int:
        """Tokens dealt so far."""
        return sum(self._num_tokens)

    def shares(self) -> list[int]:
        """Tokens of each of `sequences`, with what was left."""
        if self._num_long and self.left:
            for i, seq in enumerate(self.sequences):
                if seq.scores_prompt:
                    continue
                more = min(self._room(seq), seq.goal - seq.num_computed - self._num_tokens[i])
                self._num_tokens[i] += more
                self._take(seq, more)
        return self._num_tokens
