"""SamplingParams: how tokens are chosen and when a stream ends, validated once for all entrances.

Names are the field's (vLLM's set). All exist from the first day; one that is not honoured yet is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from pdserve.core.errors import RequestError, UnimplementedError

MAX_N = 16
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
DEFAULT_MAX_TOKENS = 256

_NOT_HONOURED = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
    "structured_outputs",
    "echo",
)
"""Fields whose only accepted value is their default."""


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
        presence_penalty: Not honoured yet.
        frequency_penalty: Not honoured yet.
        repetition_penalty: Not honoured yet.
        seed: Noise key in [0, 2**64); None: drawn at the entrance.
        stop: Strings that end the stream.
        stop_token_ids: Token ids that end the stream; at most `MAX_STOP_TOKEN_IDS`.
        include_stop_str_in_output: Keep the matched stop string in the text.
        ignore_eos: Do not stop at the end-of-sequence token.
        max_tokens: Tokens to generate at most, >= 1; None: `DEFAULT_MAX_TOKENS` or what the context leaves.
        min_tokens: Not honoured yet.
        logit_bias: Not honoured yet.
        allowed_token_ids: Not honoured yet.
        bad_words: Not honoured yet.
        logprobs: Likeliest tokens to report per position, 0..20; None: no log-probabilities.
        prompt_logprobs: Not honoured yet.
        skip_special_tokens: Leave special tokens out of the text.
        structured_outputs: Not honoured yet.
        echo: Not honoured yet.

    Raises:
        RequestError: A value is out of range; the message names the field.
        UnimplementedError: A field that is not honoured yet has another value than its default.
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
    structured_outputs: Mapping[str, object] | None = field(default=None)
    echo: bool = False

    def __post_init__(self) -> None:
        for f in fields(self):
            if f.name in _NOT_HONOURED and getattr(self, f.name) != f.default:
                raise UnimplementedError(
                    f"sampling parameter '{f.name}' is not supported yet; leave it out",
                    reason="UNSUPPORTED_PARAMETER",
                )
        if not 1 <= self.n <= MAX_N:
            _refuse("n", self.n, f"in 1..{MAX_N}")
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
        if self.max_tokens is not None and self.max_tokens < 1:
            _refuse("max_tokens", self.max_tokens, "at least 1")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            _refuse("logprobs", self.logprobs, f"in 0..{MAX_LOGPROBS}")
        if len(self.stop) > MAX_STOP_STRINGS:
            _refuse("stop", f"{len(self.stop)} strings", f"at most {MAX_STOP_STRINGS}")
        if any(not s or len(s) > MAX_STOP_STRING_CHARS for s in self.stop):
            _refuse("stop", list(self.stop), f"non-empty strings of at most {MAX_STOP_STRING_CHARS} characters")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            _refuse("stop_token_ids", f"{len(self.stop_token_ids)} ids", f"at most {MAX_STOP_TOKEN_IDS}")
        if any(t < 0 for t in self.stop_token_ids):
            _refuse("stop_token_ids", list(self.stop_token_ids), "token ids >= 0")

    @property
    def greedy(self) -> bool:
        """True when the likeliest token is always chosen."""
        return self.temperature == 0.0


def _refuse(name: str, value: object, expected: str) -> None:
    raise RequestError(f"sampling parameter '{name}' is {value!r}; it must be {expected}", reason="BAD_PARAMETER")
