"""The stored record of a request, its states and the changes to it. Data only.

Request: QUEUED -> PLACED -> DECODING -> FINISHED | FAILED | CANCELLED; a retry is (attempt + 1, PLACED). A change
applies only if the stored epoch is the owner's, the stored state is not terminal, and (attempt, phase) goes not back.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum

from pdserve.core.errors import PdserveError


class RequestState(StrEnum):
    """State of a request."""

    QUEUED = "queued"
    PLACED = "placed"
    DECODING = "decoding"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


PHASES: Mapping[RequestState, int] = {
    RequestState.QUEUED: 0,
    RequestState.PLACED: 1,
    RequestState.DECODING: 2,
    RequestState.FINISHED: 3,
    RequestState.FAILED: 3,
    RequestState.CANCELLED: 3,
}
TERMINAL_PHASE = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRecord:
    """What is stored of a request.

    Attributes:
        request_id: The request.
        state: Its state.
        attempt: Retry number, from 1.
        owner_epoch: Epoch of the owning router, decided by the store; 0: not stored yet.
        owner: Name of the owning router.
        model: Served model name.
        request_digest: SHA-256 of the client's message, for idempotency.
        tenant: Whose request it is.
        priority: Lower starts first.
        deadline_ms: Time that the request had left at acceptance; 0: no deadline.
        sampling: Serialised `pdserve.v1.SamplingParams`; erased at the end.
        prompt: Prompt ids as little-endian uint32; erased at the end.
        prefill_worker: Where the prompt is computed; empty: none yet.
        decode_worker: Where tokens are generated; empty: none yet.
        emitted_tokens: Tokens released to the client.
        finish_reason: Set when FINISHED or CANCELLED.
        error_status: gRPC status name, when FAILED.
        error_reason: UPPER_SNAKE_CASE, when FAILED.
        error_message: What went wrong, when FAILED.
    """

    request_id: str
    state: RequestState = RequestState.QUEUED
    attempt: int = 1
    owner_epoch: int = 0
    owner: str = ""
    model: str = ""
    request_digest: bytes = b""
    tenant: str = ""
    priority: int = 0
    deadline_ms: int = 0
    sampling: bytes = b""
    prompt: bytes = b""
    prefill_worker: str = ""
    decode_worker: str = ""
    emitted_tokens: int = 0
    finish_reason: str = ""
    error_status: str = ""
    error_reason: str = ""
    error_message: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordChange:
    """One step of a request's life, as its owner writes it.

    Attributes:
        request_id: The request.
        attempt: Retry number.
        owner_epoch: The writer's epoch.
        state: New state.
        fields: Other fields of `RequestRecord` to set, as text.
    """

    request_id: str
    attempt: int
    owner_epoch: int
    state: RequestState
    fields: Mapping[str, str]

    def merged(self, older: RecordChange) -> RecordChange:
        """This change after an older one of the same request that was not written yet."""
        return RecordChange(
            request_id=self.request_id,
            attempt=self.attempt,
            owner_epoch=self.owner_epoch,
            state=self.state,
            fields={**older.fields, **self.fields},
        )


_BINARY = frozenset({"request_digest", "sampling", "prompt"})
_NUMBERS = frozenset({"attempt", "owner_epoch", "priority", "deadline_ms", "emitted_tokens"})


def record_to_hash(record: RequestRecord) -> list[str | bytes]:
    """Field, value, field, value, … of a new record's hash. The store adds `owner_epoch`; the key has the id."""
    flat: list[str | bytes] = ["phase", str(PHASES[record.state])]
    for f in fields(record):
        if f.name not in ("request_id", "owner_epoch"):
            value = getattr(record, f.name)
            flat += [f.name, value if isinstance(value, bytes) else str(value)]
    return flat


def record_from_hash(request_id: str, raw: Mapping[bytes, bytes]) -> RequestRecord:
    """A record from its hash; it has a state, other fields that are missing have their default."""
    values: dict[str, object] = {}
    for f in fields(RequestRecord):
        value = raw.get(f.name.encode())
        if value is None:
            continue
        if f.name in _BINARY:
            values[f.name] = value
        elif f.name in _NUMBERS:
            values[f.name] = int(value)
        else:
            values[f.name] = value.decode()
    values["state"] = RequestState(str(values["state"]))
    return RequestRecord(request_id=request_id, **values)  # type: ignore[arg-type]


class DuplicateRequestError(PdserveError):
    """A request with this id exists."""

    status = "ALREADY_EXISTS"
    reason = "REQUEST_EXISTS"


def duplicate_error(request_id: str, same_digest: bool, state: RequestState) -> DuplicateRequestError:
    """The refusal of a second Generate with a known id."""
    if same_digest:
        return DuplicateRequestError(
            f"request {request_id!r} was sent before and is {state}; following it (Attach) comes later: "
            "look it up with GetRequest, or send it under another request_id"
        )
    return DuplicateRequestError(
        f"request_id {request_id!r} belongs to a different request; use another request_id",
        reason="REQUEST_ID_REUSED",
    )


def pack_prompt(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)
