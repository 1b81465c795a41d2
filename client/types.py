"""What the SDK takes and gives back: frozen dataclasses, and the typed keywords of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

FinishReason = Literal["stop", "length", "cancelled"]


class RequestOptions(TypedDict, total=False):
    """Keywords of `generate`, `stream`, `chat` and `stream_chat`; all optional, None means "not given".

    The first six concern the request, the others are sampling parameters. Their values go to the server as they are:
    it refuses what is out of range, or not honoured yet, by name.
    """

    model: str | None
    """Served model name; default: the only one."""
    request_id: str | None
    """Idempotency key, 1..128 characters of [A-Za-z0-9_.:-]; default: the SDK makes an unguessable one."""
    timeout_s: float | None
    """Deadline of the whole request, seconds; default: none."""
    tenant: str | None
    """Whose request it is, for quotas and fairness."""
    priority: int | None
    """Lower runs first; default 0."""
    cache_salt: str | None
    """Isolates prefix-cache reuse."""
    n: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    include_stop_str_in_output: bool | None
    ignore_eos: bool | None
    max_tokens: int | None
    min_tokens: int | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str] | None
    logprobs: int | None
    prompt_logprobs: int | None
    skip_special_tokens: bool | None
    structured_outputs: Mapping[str, object] | object | None
    """Exactly one of json (a schema: text or mapping), regex, choice (strings), grammar, json_object (True); or a
    `pdserve.StructuredOutputs`."""
    echo: bool | None


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


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of a stream; with n > 1 of one of its choices.

    Attributes:
        index: Output index of the first of `token_ids`, from 0, within the choice.
        token_ids: New tokens, in order; one or several.
        text: New text; may be empty while a multi-byte character or a possible stop string is incomplete.
        logprobs: One entry per token when log-probabilities were asked for, else empty.
        choice: Which of the request's n choices, from 0.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[PositionLogprobs, ...] = ()
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens counted once per request.

    Attributes:
        prompt_tokens: Tokens of the prompt; once, however many choices share it.
        completion_tokens: Tokens generated, of all choices.
        cached_tokens: Prompt tokens whose KV came from a prefix cache.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    """Where the request's time went, as measured by the servers. Seconds; None: did not happen.

    Attributes:
        queue_s: Waiting in the router and in the engine before the first step of the prompt.
        prefill_s: First step of the prompt to the first token sampled.
        transfer_s: First byte of KV asked for to the last page verified, on the decode worker.
        transfer_hidden_s: Part of `transfer_s` that ran before the prompt was fully computed.
        transfer_bytes: Bytes that the transfer put on the wire.
        handoff_gap_s: Token 1 released to token 2 received by the router.
        decode_s: First decode step to the end.
        ttft_s: Arrival at the router to token 1 released.
        tpot_s: (last token - first token) / (tokens - 1).
        e2e_s: Arrival at the router to the end.
        transfer_exposed_s: Manifest received to the begin of the first decode step: what prefill did not hide.
        transfer_pull_s: Time in which pages moved: the sum of the pulls.
        transfer_pull_hidden_s: Part of `transfer_pull_s` before the manifest was received.
        transfer_last_pages: Pages of the last pull.
        transfer_last_bytes: Bytes that the last pull put on the wire.
    """

    queue_s: float | None = None
    prefill_s: float | None = None
    transfer_s: float | None = None
    transfer_hidden_s: float | None = None
    transfer_bytes: int = 0
    handoff_gap_s: float | None = None
    decode_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    transfer_exposed_s: float | None = None
    transfer_pull_s: float | None = None
    transfer_pull_hidden_s: float | None = None
    transfer_last_pages: int = 0
    transfer_last_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """All output of one of a request's n streams.

    Attributes:
        text: All generated text.
        token_ids: All generated tokens.
        finish_reason: "stop", "length" or "cancelled".
        stop_reason: The stop string, or the stop token as decimal text, that matched; None if neither.
        logprobs: One entry per token when log-probabilities were asked for, else empty.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | None
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A finished request. Text, tokens, reasons and log-probabilities are those of the first choice: all, unless n > 1.

    Attributes:
        text: All generated text; with `echo` after that of the prompt.
        token_ids: All generated tokens.
        finish_reason: "stop", "length" or "cancelled".
        stop_reason: The stop string, or the stop token as decimal text, that matched; None if neither.
        usage: Tokens counted.
        timings: Where the time went.
        request_id: The request's id, to look it up.
        model: Model that served it.
        seed: Seed in force: yours, or the one that the router drew; repeat with it to get the same tokens.
        logprobs: One entry per token when log-probabilities were asked for, else empty.
        prompt_logprobs: One entry per prompt token when they were asked for, else empty; the first is None.
        choices: All n of them.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | None
    usage: Usage
    timings: Timings
    request_id: str
    model: str
    seed: int
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs | None, ...] = ()
    choices: tuple[Choice, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRecord:
    """The stored record of a request.

    Attributes:
        request_id: The request.
        state: "queued", "placed", "decoding", "finished", "failed" or "cancelled".
        attempt: Retry number, from 1.
        model: Served model name.
        prefill_worker_id: Worker that computed the prompt; None: none yet.
        decode_worker_id: Worker that generates; None: none yet.
        emitted_tokens: Tokens released to the client.
        finish_reason: Set when the state is "finished".
        error: "REASON: message", set when the state is "failed".
    """

    request_id: str
    state: str
    attempt: int
    model: str
    prefill_worker_id: str | None
    decode_worker_id: str | None
    emitted_tokens: int
    finish_reason: FinishReason | None
    error: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerInfo:
    """A worker as the router sees it.

    Attributes:
        worker_id: Stable name.
        role: "prefill", "decode" or "mixed".
        incarnation: Process start, as hex.
        address: host:port of its gRPC endpoint.
        state: "ready", "draining", "connecting", "connecting: <why the last try failed>" or "incompatible: <reason>".
        num_running: Sequences running.
        num_waiting: Sequences waiting.
        num_free_pages: KV pages free or evictable.
        num_pages: KV pages in all.
    """

    worker_id: str
    role: str
    incarnation: str
    address: str
    state: str
    num_running: int
    num_waiting: int
    num_free_pages: int
    num_pages: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """A served model.

    Attributes:
        name: Name to ask for.
        max_model_len: Prompt and output tokens together, at most.
        vocab_size: Size of the vocabulary.
        ready: True when a request would be routed now.
        workers: The workers that serve it.
    """

    name: str
    max_model_len: int
    vocab_size: int
    ready: bool
    workers: tuple[WorkerInfo, ...]
