"""StructuredProcessor: allows only the tokens with which the output can still become what the request demands.

The state of a sequence follows from its constraint and its output tokens alone. A matcher per sequence is kept only so
that a step reads one token; when it does not fit the tokens (hand-off, preemption, resume, tokens taken back) it is
built anew from them. Grammars are compiled in a thread of their own, from the moment that a request is handed over:

    prepare(request) ──▶ compile thread ──▶ LRU of compiled grammars ──copy──▶ matcher of one sequence ──▶ mask
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pdserve.core.errors import CapacityError, ConfigError, EngineError, PdserveError
from pdserve.core.sampling import SamplingParams
from pdserve.core.structured import StructuredOutputs, grammar_of, parser_limits, refusal
from pdserve.engine.step import SamplingFailure, ScheduledSequence

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_GRAMMARS = 64
"""Compiled grammars that are kept; the worst takes tens of MB (`core.structured.parser_limits`)."""
COMPILE_WAIT_S = 15.0

Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]
"""`[vocab_size]`: which tokens may follow."""


class Grammars:
    """Compiled grammars of one model's tokens; safe to use from several threads.

    Args:
        tokenizer_file: The model's `tokenizer.json`, read when the first grammar is compiled.
        vocab_size: Rows of the model's head.
        eos_token_ids: End-of-sequence tokens.
        max_grammars: Grammars to keep.
        wait_s: Longest wait for a grammar that is being compiled, seconds.

    Attributes:
        eos_token_ids: As given, sorted.
    """

    def __init__(
        self,
        tokenizer_file: Path,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        *,
        max_grammars: int = MAX_GRAMMARS,
        wait_s: float = COMPILE_WAIT_S,
    ) -> None:
        self._file = tokenizer_file
        self._vocab_size = vocab_size
        self.eos_token_ids = sorted(eos_token_ids)
        self._max_grammars = max_grammars
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._compiled: OrderedDict[StructuredOutputs, Future[LLMatcher]] = OrderedDict()
        self._compiler = ThreadPoolExecutor(1, "grammar-compiler")
        self._tokenizer: LLTokenizer | None = None  # compile thread only

    def prepare(self, params: SamplingParams) -> None:
        """Begins to compile what a request will need; returns at once. What is wrong with it `matcher` tells."""
        if params.structured_outputs is not None:
            self._future(params.structured_outputs)

    def matcher(self, structured: StructuredOutputs) -> LLMatcher:
        """A fresh matcher, at the beginning of an output.

        Raises:
            RequestError: The grammar is wrong or too complex.
            CapacityError: It is still not compiled after `wait_s`.
            ConfigError: The library cannot read the model's tokenizer.
        """
        try:
            return self._future(structured).result(self._wait_s).deep_copy()
        except TimeoutError:
            raise CapacityError(
                f"structured_outputs: the grammar is not compiled after {self._wait_s:g} s; retry later",
                reason="GRAMMAR_NOT_READY",
                retry_after_s=self._wait_s,
            ) from None

    def forget(self, structured: StructuredOutputs) -> None:
        """Drops a compiled grammar: matchers of one grammar share tables, which may have become full."""
        with self._lock:
            self._compiled.pop(structured, None)

    def _future(self, structured: StructuredOutputs) -> Future[LLMatcher]:
        with self._lock:
            future = self._compiled.get(structured)
            if future is None:
                future = self._compiled[structured] = self._compiler.submit(self._compile, structured)
                if len(self._compiled) > self._max_grammars:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(structured)
            return future

    def _compile(self, structured: StructuredOutputs) -> LLMatcher:
        from llguidance import LLMatcher

        if self._tokenizer is None:
            self._tokenizer = self._read_tokenizer()
        matcher = LLMatcher(self._tokenizer, grammar_of(structured), log_level=0, limits=parser_limits())
        if matcher.is_error():
            raise refusal(structured, matcher.get_error())
        return matcher

    def _read_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        if not self.eos_token_ids:
            raise ConfigError("structured_outputs: this model has no end-of-sequence token", reason="NO_EOS_TOKEN")
        try:
            text = self._file.read_text(encoding="utf-8")
            return LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self.eos_token_ids)
        except (OSError, ValueError) as e:
            raise ConfigError(
                f"structured_outputs: the library cannot use this model's tokenizer: {e!s:.300}", reason="BAD_TOKENIZER"
            ) from e


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
            raise refusal(self.structured, f"no token can follow here, or it became too complex: {matcher.get_error()}")
        return np.unpackbits(bits, count=vocab_size, bitorder="little").view(np.bool_)


class StructuredProcessor:
    """The `LogitsProcessor` of `SamplingParams.structured_outputs`.

    End-of-sequence tokens and the request's stop tokens are allowed exactly where the output may end.

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
            matcher, allowed = self._advance(row, row.sampling.structured_outputs, logits.shape[0])
        except PdserveError as e:
            return SamplingFailure(e.reason, e.message, e.status)
        ends = [*self._grammars.eos_token_ids, *row.sampling.stop_token_ids]
        allowed[ends] = matcher.is_accepting()
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
        except PdserveError:  # maybe only because others of the same grammar filled its tables: once more with new ones
            self._grammars.forget(structured)
            state = _State(structured, self._grammars.matcher(structured))
            allowed = state.allowed(output, vocab_size)
        self._states[row.key] = state
        if len(self._states) > self._max_sequences:
            self._states.popitem(last=False)
        return state.matcher, allowed
