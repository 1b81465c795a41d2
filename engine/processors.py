"""What sampling parameters ask of logits, as processors in the order in which they are applied:

    allowed_token_ids, bad_words, min_tokens    forbid tokens
    logit_bias                                  is added
    repetition_penalty                          scales the logits of tokens in prompt and output
    frequency_penalty, presence_penalty         are taken from those of tokens in the output

Nothing is kept of a sequence between steps: counts are taken from its tokens each time, so they cannot be stale.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from pdserve.core.sampling import SamplingParams
from pdserve.engine.logits import LogitsProcessor
from pdserve.engine.step import SamplingFailure, ScheduledSequence

Encode = Callable[[str], list[int]]
"""Token ids of a text, without the special tokens that a prompt gets."""

_NUM_KEPT = 256

K = TypeVar("K")
V = TypeVar("V")


def standard_processors(eos_token_ids: frozenset[int], encode: Encode, device: torch.device) -> list[LogitsProcessor]:
    """The processors that every model runner has.

    Args:
        eos_token_ids: End-of-sequence tokens of the model.
        encode: Of the model's tokenizer.
        device: Where logits are.
    """
    return [AllowedTokens(device), BadWords(encode), MinTokens(eos_token_ids), LogitBias(device), Penalties()]


class AllowedTokens:
    """`allowed_token_ids`: forbids all others."""

    def __init__(self, device: torch.device) -> None:
        def tensor(ids: tuple[int, ...]) -> Tensor:
            return torch.tensor(ids, device=device)

        self._ids = _ByIdentity(tensor)

    def wants(self, params: SamplingParams) -> bool:
        """See `LogitsProcessor`."""
        return bool(params.allowed_token_ids)

    def edit(self, logits: Tensor, row: ScheduledSequence) -> None:
        """See `LogitsProcessor`."""
        ids = self._ids.of(_params(row).allowed_token_ids)
        values = logits[ids]
        logits.fill_(-math.inf)
        logits[ids] = values


class BadWords:
    """`bad_words`: forbids the token that would complete a word's tokens at the end of the output.

    Words are tokenised here, not where requests enter: every worker has the tokenizer anyway, for stop strings, and
    messages between router and workers stay as the client wrote them.
    """

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._spellings = _ByIdentity(self._spell)

    def wants(self, params: SamplingParams) -> bool:
        """See `LogitsProcessor`."""
        return bool(params.bad_words)

    def edit(self, logits: Tensor, row: ScheduledSequence) -> SamplingFailure | None:
        """See `LogitsProcessor`."""
        spellings = self._spellings.of(_params(row).bad_words)
        if isinstance(spellings, SamplingFailure):
            return spellings
        known, num_output = row.known, len(row.known) - row.num_prompt
        for *begin, last in spellings:
            if len(begin) <= num_output and list(known[len(known) - len(begin) :]) == begin:
                logits[last] = -math.inf
        return None

    def _spell(self, words: tuple[str, ...]) -> set[tuple[int, ...]] | SamplingFailure:
        spellings = set()
        for word in words:
            found = {tuple(self._encode(begin + word.lstrip())) for begin in ("", " ")} - {()}
            if not found:
                message = f"sampling parameter 'bad_words': {word!r} has no tokens in this model's vocabulary"
                return SamplingFailure("BAD_PARAMETER", message, "INVALID_ARGUMENT")
            spellings |= found
        return spellings


class MinTokens:
    """`min_tokens`: forbids the tokens that would end the stream too early."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos = eos_token_ids

    def wants(self, params: SamplingParams) -> bool:
        """See `LogitsProcessor`."""
        return params.min_tokens > 0

    def edit(self, logits: Tensor, row: ScheduledSequence) -> None:
        """See `LogitsProcessor`."""
        params = _params(row)
        if row.output_index < params.min_tokens:
            for token in self._eos.union(params.stop_token_ids):
                logits[token] = -math.inf


class LogitBias:
    """`logit_bias`: added to the logits of the tokens named."""

    def __init__(self, device: torch.device) -> None:
        def tensors(bias: Mapping[int, float]) -> tuple[Tensor, Tensor]:
            return torch.tensor(list(bias), device=device), torch.tensor(list(bias.values()), device=device)

        self._tensors = _ByIdentity(tensors)

    def wants(self, params: SamplingParams) -> bool:
        """See `LogitsProcessor`."""
        return params.logit_bias is not None

    def edit(self, logits: Tensor, row: ScheduledSequence) -> None:
        """See `LogitsProcessor`."""
        bias = _params(row).logit_bias
        assert bias is not None
        ids, values = self._tensors.of(bias)
        logits[ids] += values


class Penalties:
    """`repetition_penalty` of prompt and output, then `frequency_penalty` and `presence_penalty` of the output."""

    def wants(self, params: SamplingParams) -> bool:
        """See `LogitsProcessor`."""
        return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0

    def edit(self, logits: Tensor, row: ScheduledSequence) -> None:
        """See `LogitsProcessor`."""
        params = _params(row)
        if (factor := params.repetition_penalty) != 1:
            # By way of numpy: ten times as fast as a tensor of a list. A token that comes twice is written twice alike.
            ids = torch.from_numpy(np.array(row.known, np.int64)).to(logits.device)
            values = logits[ids]
            scaled = torch.where(values > 0, values / factor, values * factor)
            logits[ids] = scaled.clamp(max=torch.finfo(logits.dtype).max)  # a tiny factor leaves float32
        if params.frequency_penalty or params.presence_penalty:
            counts = Counter(row.known[row.num_prompt :])
            ids = torch.tensor(list(counts), dtype=torch.int64, device=logits.device)
            times = torch.tensor(list(counts.values()), device=logits.device)
            logits[ids] -= params.frequency_penalty * times + params.presence_penalty


class _ByIdentity(Generic[K, V]):
    """What was made of immutable objects lately. An object that is held here cannot be taken for another one."""

    def __init__(self, make: Callable[[K], V]) -> None:
        self._make = make
        self._made: OrderedDict[int, tuple[K, V]] = OrderedDict()

    def of(self, source: K) -> V:
        """What is made of this object; made anew when it was not asked for lately."""
        if (found := self._made.get(id(source))) is not None:
            self._made.move_to_end(id(source))
            return found[1]
        made = self._make(source)
        self._made[id(source)] = source, made
        if len(self._made) > _NUM_KEPT:
            self._made.popitem(last=False)
        return made


def _params(row: ScheduledSequence) -> SamplingParams:
    assert row.sampling is not None, "a row to sample has parameters"
    return row.sampling
