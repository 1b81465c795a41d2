"""Who gets in: every check of a GenerateRequest before it is queued. Pure; randomness and limits are arguments.

Two halves, because tokenising lies between them: `check_envelope` needs only the message, `admit` the prompt's token
ids. Every message says what to do.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdserve.core.errors import CapacityError, RequestError, UnimplementedError, UnknownError
from pdserve.core.hashing import token_digest
from pdserve.core.request import check_cache_salt, check_priority
from pdserve.core.sampling import SamplingParams, check_token_ids
from pdserve.router.worker_table import Limits
from pdserve.v1 import inference_pb2 as pb

MAX_TENANT_CHARS = 64
QUEUE_FULL_RETRY_S = 1.0
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Admitted:
    """A request that passed every check; immutable over all its attempts.

    Attributes:
        request_id: The client's, or one that the router made.
        model: Served model name.
        prompt_token_ids: The prompt; at least one id, each within the vocabulary.
        sampling: Validated; `seed` and `max_tokens` are set and fit into the model's length.
        request_digest: SHA-256 of the client's message without its id, for idempotency.
        prompt_digest: `token_digest` of the prompt.
        tenant: Whose request it is.
        echo: Text of the prompt, if its client wants it back.
        priority: Lower starts first.
        cache_salt: Computed prompts are reused only among requests of the same salt; empty: shared.
    """

    request_id: str
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    request_digest: bytes
    prompt_digest: bytes
    tenant: str = ""
    echo: str = ""
    priority: int = 0
    cache_salt: str = ""


def check_envelope(request: pb.GenerateRequest, served_model: str) -> None:
    """Checks everything but the prompt's tokens and the sampling parameters.

    Raises:
        RequestError: A field is malformed; UnknownError: another model; UnimplementedError: not supported yet.
    """
    if request.request_id:
        check_request_id(request.request_id)
    if request.model not in ("", served_model):
        raise UnknownError(
            f"model {request.model!r} is not served here; ask for {served_model!r} or leave the model empty",
            reason="UNKNOWN_MODEL",
        )
    if request.WhichOneof("prompt") is None:
        raise RequestError("the request has no prompt; set text, chat or tokens", reason="EMPTY_PROMPT")
    check_priority(request.priority)
    check_cache_salt(request.cache_salt)
    if request.on_disconnect == pb.ON_DISCONNECT_DETACH:
        raise UnimplementedError(
            "on_disconnect = DETACH is not supported yet; use CANCEL or leave it out", reason="UNSUPPORTED_PARAMETER"
        )
    if len(request.tenant) > MAX_TENANT_CHARS:
        raise RequestError(
            f"tenant has {len(request.tenant)} characters; it may have at most {MAX_TENANT_CHARS}", reason="BAD_TENANT"
        )


def check_request_id(request_id: str) -> None:
    """Checks the form of a client's request id.

    Raises:
        RequestError: It has another form.
    """
    if not _REQUEST_ID.fullmatch(request_id):
        raise RequestError(
            f"request_id {request_id[:140]!r} is malformed; use 1 to 128 characters of A-Z a-z 0-9 _ . : - "
            "(leave it empty in Generate to let the router make one)",
            reason="BAD_REQUEST_ID",
        )


def check_queue(num_open: int, max_queue: int) -> None:
    """Refuses when the router already has as many open requests as it may.

    Raises:
        CapacityError: It has; with retry-after.
    """
    if num_open >= max_queue:
        raise CapacityError(
            f"{num_open} requests are open and --max-queue is {max_queue}; retry after "
            f"{QUEUE_FULL_RETRY_S:g} s, or add workers",
            reason="QUEUE_FULL",
            retry_after_s=QUEUE_FULL_RETRY_S,
        )


def admit(
    request: pb.GenerateRequest,
    *,
    request_id: str,
    model: str,
    prompt_token_ids: Sequence[int],
    sampling: SamplingParams,
    limits: Limits,
    drawn_seed: int,
) -> Admitted:
    """Checks prompt and parameters against the model and fills in what the client left out.

    Args:
        request: The client's message, past `check_envelope`.
        request_id: The client's, or the one that the router made.
        model: Served model name.
        prompt_token_ids: The prompt after tokenisation.
        sampling: Validated parameters; `seed` and `max_tokens` may be None.
        limits: What the workers accept.
        drawn_seed: Used when the client gave no seed.

    Raises:
        RequestError: The prompt is empty or too long, max_tokens does not fit, or an id is outside the vocabulary.
    """
    prompt = tuple(prompt_token_ids)
    check_prompt_length(len(prompt), limits)
    check_token_ids("prompt", prompt, limits.vocab_size)
    sampling.check_request(len(prompt), limits.vocab_size)
    max_tokens = sampling.tokens_to_generate(len(prompt), limits.max_model_len)
    seed = drawn_seed if sampling.seed is None else sampling.seed
    return Admitted(
        request_id=request_id,
        model=model,
        prompt_token_ids=prompt,
        sampling=replace(sampling, max_tokens=max_tokens, seed=seed),
        request_digest=request_digest(request),
        prompt_digest=token_digest(prompt),
        tenant=request.tenant,
        priority=request.priority,
        cache_salt=request.cache_salt,
    )


def check_prompt_length(num_tokens: int, limits: Limits) -> None:
    """Checks that a prompt is not empty and leaves room for one token.

    Raises:
        RequestError: EMPTY_PROMPT or PROMPT_TOO_LONG.
    """
    if not num_tokens:
        raise RequestError("the prompt is empty; send at least one token", reason="EMPTY_PROMPT")
    if num_tokens >= limits.max_model_len:
        raise RequestError(
            f"the prompt has {num_tokens} tokens; this model takes at most {limits.max_model_len - 1} "
            f"(--max-model-len {limits.max_model_len}, one is left for the output): shorten the prompt",
            reason="PROMPT_TOO_LONG",
        )


def request_digest(request: pb.GenerateRequest) -> bytes:
    """SHA-256 of a request without its id: equal for a repeated one."""
    bare = pb.GenerateRequest()
    bare.CopyFrom(request)
    bare.ClearField("request_id")
    return hashlib.sha256(bare.SerializeToString(deterministic=True)).digest()
