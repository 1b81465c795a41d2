"""What a client asked, and the names of the states that it goes through. Immutable."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from pdserve.core.errors import RequestError
from pdserve.core.hashing import choice_seed
from pdserve.core.sampling import SamplingParams

MAX_PRIORITY = 100
"""Bounds how long priorities can make anybody wait."""
MAX_SALT_CHARS = 128
_CHOICE_MARK = "#"


class Role(StrEnum):
    """What a worker computes."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class FinishReason(StrEnum):
    """Why a token stream ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token.

    Attributes:
        token_id: The token.
        logprob: Natural logarithm, of the distribution before temperature and filters.
        rank: 1 is the likeliest token of the vocabulary.
    """

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Log-probabilities at one output index.

    Attributes:
        chosen: The sampled token.
        top: The likeliest tokens, best first.
    """

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One attempt of a generation request as the engine sees it.

    Attributes:
        key: Unique on this engine while the attempt lives; chosen by the caller (e.g. "request_id/attempt").
        prompt_token_ids: The prompt; at least one id.
        emitted_token_ids: Output that the client already holds; computed like prompt tokens, never sent again. The
            first token sampled has output index len(emitted_token_ids).
        sampling: Validated parameters; `seed` and `max_tokens` are set. max_tokens counts emitted tokens too.
        eos_token_ids: End-of-sequence tokens of the model.
        priority: Lower starts first, in [-MAX_PRIORITY, MAX_PRIORITY]; not every scheduling policy takes it.
        arrival_s: When the request came, in seconds of a clock that all requests of one engine share: its place in the
            order, which it keeps over attempts.
        tenant: Whose request it is; empty: nobody's in particular.
        cache_salt: KV is reused only among requests of the same salt; empty: shared.
    """

    key: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    eos_token_ids: frozenset[int]
    arrival_s: float
    emitted_token_ids: tuple[int, ...] = ()
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""

    def choices(self) -> tuple[Request, ...]:
        """One request per output stream, `sampling.n` of them, with n = 1 and their own keys and seeds.

        The first has this request's key and seed, and its emitted tokens; the others have emitted nothing, and tell
        nothing of the prompt.
        """
        sampling, seed = self.sampling, self.sampling.seed
        if sampling.n == 1:
            return (self,)
        assert seed is not None, "the entrance draws a seed"
        first = replace(self, sampling=replace(sampling, n=1))
        return (
            first,
            *(
                replace(
                    first,
                    key=f"{self.key}{_CHOICE_MARK}{i}",
                    sampling=replace(first.sampling.without_prompt(), seed=choice_seed(seed, i)),
                    emitted_token_ids=(),
                )
                for i in range(1, sampling.n)
            ),
        )


def split_key(key: str) -> tuple[str, int]:
    """The key of the whole request and the choice, of a key that `Request.choices` gave.

    Args:
        key: Of a request whose own key has no "#".
    """
    whole, _, choice = key.partition(_CHOICE_MARK)
    return whole, int(choice or 0)


def check_priority(priority: object) -> None:
    """Checks a priority that a client gave.

    Raises:
        RequestError: BAD_PRIORITY.
    """
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MAX_PRIORITY:
        raise RequestError(
            f"priority is {priority!r:.80}; it must be an integer in [-{MAX_PRIORITY}, {MAX_PRIORITY}]",
            reason="BAD_PRIORITY",
        )


def check_cache_salt(salt: object) -> None:
    """Checks a cache salt that a client gave.

    Raises:
        RequestError: BAD_CACHE_SALT.
    """
    if not isinstance(salt, str):
        raise RequestError(f"cache_salt is {salt!r:.80}; it must be text", reason="BAD_CACHE_SALT")
    if len(salt) > MAX_SALT_CHARS:
        raise RequestError(
            f"cache_salt has {len(salt)} characters; it may have at most {MAX_SALT_CHARS}", reason="BAD_CACHE_SALT"
        )
    try:
        salt.encode()
    except UnicodeEncodeError as e:
        raise RequestError(
            f"cache_salt is {salt!a:.80}; it must be text that UTF-8 can encode", reason="BAD_CACHE_SALT"
        ) from e
