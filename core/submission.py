"""Reads and checks what a router submits to a worker; the engine only ever sees what passed here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.core.errors import RequestError, UnavailableError
from pdserve.core.hashing import token_digest
from pdserve.core.request import Request
from pdserve.core.sampling_proto import sampling_from_proto
from pdserve.v1 import common_pb2, worker_pb2


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelLimits:
    """What a prompt is checked against.

    Attributes:
        max_model_len: Prompt and output tokens together, at most.
        vocab_size: Token ids are in [0, vocab_size).
        eos_token_ids: End-of-sequence tokens.
    """

    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]


def sequence_key(fence: common_pb2.Fence) -> str:
    """Name of an attempt in the engine; unlike any other one's, also when the request id is used again."""
    return f"{fence.request_id}/{fence.owner_epoch}/{fence.attempt}"


def read_request(message: worker_pb2.Submit, limits: ModelLimits) -> Request:
    """Checks a submission's prompt and parameters.

    Args:
        message: From the router.
        limits: Of this worker's model.

    Raises:
        RequestError: Something is out of range; nothing was started.
    """
    prompt, emitted = tuple(message.prompt_token_ids), tuple(message.emitted_token_ids)
    known = prompt + emitted
    if not prompt:
        raise RequestError("the prompt is empty; send at least one token", reason="EMPTY_PROMPT")
    if (worst := max(known)) >= limits.vocab_size:
        raise RequestError(
            f"token id {worst} is not in the vocabulary (0..{limits.vocab_size - 1})", reason="BAD_TOKEN_ID"
        )
    if len(known) >= limits.max_model_len:
        raise RequestError(
            f"the prompt has {len(known)} tokens; the model takes {limits.max_model_len} with at least one of output",
            reason="PROMPT_TOO_LONG",
        )
    if message.prompt_digest != token_digest(known):
        raise RequestError("prompt_digest does not match the token ids", reason="BAD_PROMPT_DIGEST")
    sampling = sampling_from_proto(message.sampling)
    sampling.check_request(len(prompt), limits.vocab_size)
    if message.part == common_pb2.ROLE_DECODE:
        sampling = sampling.without_prompt()  # who computes the prompt tells of it
    if sampling.seed is None or sampling.max_tokens is None:
        raise RequestError("a submission must set sampling.seed and sampling.max_tokens", reason="BAD_SUBMIT")
    sampling.tokens_to_generate(len(prompt), limits.max_model_len)  # a router that knew another worker may let it in
    if len(emitted) >= sampling.max_tokens:
        raise RequestError(
            f"{len(emitted)} tokens are emitted and max_tokens is {sampling.max_tokens}: nothing is left to generate",
            reason="BAD_SUBMIT",
        )
    if emitted and sampling.n > 1:
        raise RequestError("a submission with n > 1 cannot have emitted tokens", reason="BAD_SUBMIT")
    return Request(
        key=sequence_key(message.fence),
        prompt_token_ids=prompt,
        emitted_token_ids=emitted,
        sampling=sampling,
        eos_token_ids=limits.eos_token_ids,
        priority=message.priority,
        # The epoch is the time of acceptance on the store's clock, in microseconds, whichever router took it: a request
        # that comes again after a refusal has the place of its first time, so that younger ones cannot starve it.
        arrival_s=message.fence.owner_epoch / 1e6,
        tenant=message.tenant,
        cache_salt=message.cache_salt,
    )


def check_part(message: worker_pb2.Submit, parts: Sequence[common_pb2.Role], incarnation: str) -> None:
    """Checks that the submission is meant for this process and a part that it plays.

    Raises:
        RequestError: Another part, or ids are missing.
        UnavailableError: The router knows an earlier process at this address.
    """
    if message.part not in parts:
        played = ", ".join(common_pb2.Role.Name(p) for p in parts)
        raise RequestError(f"part {message.part} was submitted; this worker plays {played}", reason="WRONG_PART")
    if message.part == common_pb2.ROLE_MIXED:
        return
    if not message.transfer_id or not message.reservation_id:
        raise RequestError("a submission of one part must set transfer_id and reservation_id", reason="BAD_SUBMIT")
    me = message.prefill if message.part == common_pb2.ROLE_PREFILL else message.decode
    if me.incarnation != incarnation:
        raise UnavailableError(
            f"worker {me.worker_id} was restarted: this process is {incarnation}, not {me.incarnation or 'unnamed'}",
            reason="WRONG_INCARNATION",
        )
