"""StructuredProcessor: allows only the tokens with which the output can still become what the request demands.

The state of a sequence follows from its constraint and its output tokens alone. A matcher per sequence is kept only so
that a step reads one token; when it does not fit the tokens (hand-off, preemption, resume, tokens taken back) it is
built anew from them. Its grammar was compiled before the request entered the engine (`engine.grammars`):

    compiled grammar ──copy──▶ matcher of one sequence ──▶ mask
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pdserve.core.errors import CapacityError, EngineError, PdserveError
from pdserve.core.sampling import SamplingParams
from pdserve.core.structured import StructuredOutputs, refusal
from pdserve.engine.grammars import Grammars, dead_end, library_errors
from pdserve.engine.step import SamplingFailure, ScheduledSequence

if TYPE_CHECKING:
    from llguidance import LLMatcher

Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]
"""`[vocab_size]`: which tokens may follow."""


@dataclass(slots=True)
class _State:
    """A matcher and the output tokens that it has read."""

    structured: StructuredOutputs
    matcher: LLMatcher
    tokens: list[int] = field(default_factory=list)

    def fits(self, structured: StructuredOutputs, output: list[int]) -> bool:
        return self.structured == structured and output[: len(self.tokens)] == self.tokens

    def allowed(self, output: list[int], vocab_size: int) -> Mask:
        """Reads what it has not read yet; tells which tokens may follow."""
        matcher = self.matcher
        if (new := output[len(self.tokens) :]) and not matcher.consume_tokens(new):
            raise EngineError(
                f"structured_outputs: the output so far does not fit the grammar: {matcher.get_error():.300}",
                reason="GRAMMAR_BROKEN",
            )
        self.tokens += new
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            raise refusal(self.structured, dead_end("no token can follow here", matcher.get_error()))
        return np.unpackbits(bits, count=vocab_size, bitorder="little").view(np.bool_)


class StructuredProcessor:
    """The `LogitsProcessor` of `SamplingParams.structured_outputs`.

    End-of-sequence tokens are allowed exactly where the output may end.

    Args:
        grammars: Compiled grammars of the model.
        max_sequences: Matchers to keep; more sequences at once are right, but slower.
    """

    def __init__(self, grammars: Grammars, max_sequences: int) -> None:
        self._grammars = grammars
        self._max_sequences = max_sequences
        self._states: OrderedDict[str, _State] = OrderedDict()

    def wants(self, params: SamplingParams) -> bool:
        """See `LogitsProcessor`."""
        return params.structured_outputs is not None

    def edit(self, logits: Tensor, row: ScheduledSequence) -> SamplingFailure | None:
        """See `LogitsProcessor`."""
        assert row.sampling is not None and row.sampling.structured_outputs is not None
        try:
            with library_errors():
                matcher, allowed = self._advance(row, row.sampling.structured_outputs, logits.shape[0])
                allowed[self._grammars.eos_token_ids] = matcher.is_accepting()
        except PdserveError as e:
            self._states.pop(row.key, None)
            return SamplingFailure(e.reason, e.message, e.status)
        logits.masked_fill_(torch.from_numpy(~allowed).to(logits.device), -math.inf)
        return None

    def _advance(
        self, row: ScheduledSequence, structured: StructuredOutputs, vocab_size: int
    ) -> tuple[LLMatcher, Mask]:
        output = list(row.known[row.num_prompt :])
        state = self._states.pop(row.key, None)
        if state is None or not state.fits(structured, output):
            state = _State(structured, self._grammars.matcher(structured))
        try:
            allowed = state.allowed(output, vocab_size)
        except (
            PdserveError
        ) as e:  # maybe only because others of this grammar filled its tables: once more with new ones
            self._grammars.renew(structured)
            try:
                state = _State(structured, self._grammars.matcher(structured))
            except CapacityError:
                raise e from None
            allowed = state.allowed(output, vocab_size)
        self._states[row.key] = state
        if len(self._states) > self._max_sequences:
            self._states.popitem(last=False)
        return state.matcher, allowed
