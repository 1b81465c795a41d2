"""SamplingParams: how tokens are chosen and when a stream ends, validated once for all entrances.

Names are the field's (vLLM's set).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, fields, replace

from pdserve.core.errors import RequestError, UnimplementedError
from pdserve.core.sampling_types import typed
from pdserve.core.structured import StructuredOutputs

MAX_N = 16
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 1 << 16
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
BIAS_LIMIT = 100.0
MAX_PROMPT_LOGPROBS = 1 << 18
"""Log-probabilities of one prompt: its tokens times 1 + `prompt_logprobs`."""
DEFAULT_MAX_TOKENS = 256

_MOST = {
    "stop": MAX_STOP_STRINGS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "logit_bias": MAX_LOGIT_BIASES,
    "allowed_token_ids": MAX_ALLOWED_TOKEN_IDS,
    "bad_words": MAX_BAD_WORDS,
}
_NOT_WITH_STRUCTURE = ("ignore_eos", "min_tokens", "stop_token_ids", "allowed_token_ids", "bad_words")
"""Fields that say, as structured_outputs does, which tokens may come and where the end is: together they may leave no
token, or end the text in one that is not of the form."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when a stream ends.

    Attributes:
        n: Output streams ("choices") per prompt, 1..`MAX_N`. Choice 0 draws with `seed`, choice i with
            `core.hashing.choice_seed(seed, i)`.
        temperature: >= 0; 0 is greedy.
        top_p: Nucleus mass in (0, 1].
        top_k: Keep the k likeliest tokens; 0 keeps all.
        min_p: Keep tokens with probability >= min_p * max probability, in [0, 1].
        presence_penalty: Taken from the logit of every token that is in the output so far, in [-2, 2].
        frequency_penalty: Taken once for every time that a token is in the output so far, in [-2, 2].
        repetition_penalty: > 0; the positive logits of tokens in prompt and output are divided by it, the negative ones
            multiplied.
        seed: Noise key in [0, 2**64); None: drawn at the entrance.
        stop: Strings that end the stream.
        stop_token_ids: Token ids that end the stream; at most `MAX_STOP_TOKEN_IDS`.
        include_stop_str_in_output: Keep the matched stop string in the text.
        ignore_eos: Do not stop at the end-of-sequence token.
        max_tokens: Tokens to generate at most, >= 1; None: `DEFAULT_MAX_TOKENS` or what the context leaves.
        min_tokens: So many tokens come before an end-of-sequence token, stop token or stop string may end the stream.
        logit_bias: Added to logits by token id; values are clamped to [-BIAS_LIMIT, BIAS_LIMIT].
        allowed_token_ids: Only these may be chosen; empty: all.
        bad_words: Words that must not appear in the output. The tokens of a word, with and without a space before it,
            are never completed; another way to spell it with tokens is not found.
        logprobs: Likeliest tokens to report per position, 0..20; None: no log-probabilities.
        prompt_logprobs: The same for the tokens of the prompt, which is then computed as a whole, without cached KV.
            None: no log-probabilities, or as many as `logprobs` with `echo`.
        skip_special_tokens: Leave special tokens out of the text.
        structured_outputs: Form that the output must have; not beside what else says so
            (`_NOT_WITH_STRUCTURE`). Cut off at max_tokens, an output is only the beginning of such a form.
        echo: The text begins with the prompt's.

    Raises:
        RequestError: A value is out of range; the message names the field.
        UnimplementedError: A combination that is not supported yet.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None
    echo: bool = False

    def __post_init__(self) -> None:
        for f in fields(self):
            if (value := getattr(self, f.name)) is f.default:
                continue
            if f.name in _MOST and isinstance(value, Sized) and not isinstance(value, str):
                check_size(f.name, len(value))
            object.__setattr__(self, f.name, typed(f.name, value))
        if not 1 <= self.n <= MAX_N:
            _refuse("n", self.n, f"in 1..{MAX_N}")
        if self.echo and self.n > 1:
            raise UnimplementedError(
                f"sampling parameter 'echo' is not supported with n = {self.n}; leave one of them out",
                reason="UNSUPPORTED_PARAMETER",
            )
        if self.echo and self.prompt_logprobs is None:
            object.__setattr__(self, "prompt_logprobs", self.logprobs)
        self._check_choice()
        self._check_penalties()
        self._check_end()

    def _check_choice(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            _refuse("temperature", self.temperature, "a finite number >= 0 (0 is greedy)")
        if not 0 < self.top_p <= 1:
            _refuse("top_p", self.top_p, "in (0, 1]")
        if self.top_k < 0:
            _refuse("top_k", self.top_k, "0 (all tokens) or more")
        if not 0 <= self.min_p <= 1:
            _refuse("min_p", self.min_p, "in [0, 1]")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            _refuse("seed", self.seed, "in [0, 2**64)")
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None and not 0 <= value <= MAX_LOGPROBS:
                _refuse(name, value, f"in 0..{MAX_LOGPROBS}")
        _check_token_ids("allowed_token_ids", self.allowed_token_ids)
        _check_strings("bad_words", self.bad_words, MAX_BAD_WORD_CHARS)
        if any(not word.strip() for word in self.bad_words):
            _refuse("bad_words", list(self.bad_words), "words that are not blank")

    def _check_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                _refuse(name, getattr(self, name), "in [-2, 2]")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            _refuse("repetition_penalty", self.repetition_penalty, "a finite number > 0 (1 is none)")
        if self.logit_bias is not None:
            _check_token_ids("logit_bias", tuple(self.logit_bias))
            if any(math.isnan(bias) for bias in self.logit_bias.values()):
                _refuse("logit_bias", dict(self.logit_bias), "numbers by token id")
            clamped = {t: min(BIAS_LIMIT, max(-BIAS_LIMIT, float(bias))) for t, bias in self.logit_bias.items()}
            object.__setattr__(self, "logit_bias", clamped or None)

    def _check_end(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            _refuse("max_tokens", self.max_tokens, "at least 1")
        if self.min_tokens < 0 or (self.max_tokens is not None and self.min_tokens > self.max_tokens):
            _refuse("min_tokens", self.min_tokens, f"in 0..max_tokens ({self.max_tokens or DEFAULT_MAX_TOKENS})")
        _check_strings("stop", self.stop, MAX_STOP_STRING_CHARS)
        _check_token_ids("stop_token_ids", self.stop_token_ids)
        _check_form(self.structured_outputs)
        if self.structured_outputs is not None:
            for f in fields(self):
                if f.name in _NOT_WITH_STRUCTURE and (value := getattr(self, f.name)) != f.default:
                    _refuse(f.name, value, "left out beside 'structured_outputs', which says what may come and when")

    def check_request(self, num_prompt_tokens: int, vocab_size: int) -> None:
        """Checks what depends on the prompt and the model.

        Raises:
            RequestError: A token id is not in [0, vocab_size), or the prompt's log-probabilities are too many; the
                message names the field.
        """
        if self.prompt_logprobs is not None and num_prompt_tokens * (1 + self.prompt_logprobs) > MAX_PROMPT_LOGPROBS:
            raise RequestError(
                f"sampling parameter 'prompt_logprobs' is {self.prompt_logprobs}: with {num_prompt_tokens} prompt "
                f"tokens that is more than {MAX_PROMPT_LOGPROBS} log-probabilities; ask for less or shorten the prompt",
                reason="TOO_MANY_LOGPROBS",
            )
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            check_token_ids(f"sampling parameter '{name}'", tuple(getattr(self, name) or ()), vocab_size)

    def tokens_to_generate(self, num_prompt_tokens: int, max_model_len: int) -> int:
        """`max_tokens`, or what it is when it is None.

        Args:
            num_prompt_tokens: Tokens of the prompt, fewer than `max_model_len`.
            max_model_len: Prompt and output tokens together, at most.

        Raises:
            RequestError: MAX_TOKENS_TOO_LARGE.
        """
        room = max_model_len - num_prompt_tokens
        if self.max_tokens is None:
            return min(DEFAULT_MAX_TOKENS, room)
        if self.max_tokens > room:
            raise RequestError(
                f"sampling parameter 'max_tokens' is {self.max_tokens}; the prompt of {num_prompt_tokens} tokens "
                f"leaves {room} of the model's {max_model_len}: ask for at most {room}, or leave it out",
                reason="MAX_TOKENS_TOO_LARGE",
            )
        return self.max_tokens

    def without_prompt(self) -> SamplingParams:
        """The same for one who tells nothing of the prompt."""
        return replace(self, prompt_logprobs=None, echo=False)

    @property
    def greedy(self) -> bool:
        """True when the likeliest token is always chosen."""
        return self.temperature == 0.0


def _refuse(name: str, value: object, expected: str) -> None:
    raise RequestError(f"sampling parameter '{name}' is {value!r:.200}; it must be {expected}", reason="BAD_PARAMETER")


def _check_form(value: object) -> None:
    if value is not None and not isinstance(value, StructuredOutputs):
        _refuse("structured_outputs", value, "a StructuredOutputs, e.g. StructuredOutputs(regex='[0-9]+')")


def check_token_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Checks that token ids are in the vocabulary.

    Raises:
        RequestError: One is not in [0, vocab_size); the message begins with `name`.
    """
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        position, bad = next((i, t) for i, t in enumerate(ids) if not 0 <= t < vocab_size)
        raise RequestError(
            f"{name}: token id {bad} at position {position} is outside the vocabulary; ids are 0 to {vocab_size - 1}",
            reason="BAD_TOKEN_ID",
        )


def check_size(name: str, size: int) -> None:
    """Checks how many parts a field has; before they are read, for millions of them would hold up an event loop.

    Raises:
        RequestError: They are too many; the message names the field.
    """
    if (most := _MOST.get(name)) is not None and size > most:
        _refuse(name, f"{size} entries", f"at most {most}")


def _check_token_ids(name: str, ids: Sequence[int]) -> None:
    if any(t < 0 for t in ids):
        _refuse(name, list(ids), "token ids >= 0")


def _check_strings(name: str, strings: Sequence[str], most_chars: int) -> None:
    if any(not s or len(s) > most_chars for s in strings):
        _refuse(name, list(strings), f"non-empty strings of at most {most_chars} characters")
