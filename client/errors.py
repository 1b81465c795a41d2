"""What can go wrong, as typed errors: one class per kind of gRPC status, with the server's reason and message.

try:
    client.generate("Hi", max_tokens=16)
except Overloaded as e:
    time.sleep(e.retry_after_s or 1.0)
"""

from __future__ import annotations

from collections.abc import Iterable

REASON_KEY = "pdserve-reason"
RETRY_AFTER_KEY = "pdserve-retry-after-ms"


class PdserveError(Exception):
    """Base of all errors that a server, or the way to it, gives.

    Args:
        message: What is wrong and what to do about it.
        status: gRPC status name, e.g. "RESOURCE_EXHAUSTED"; default: the class's own.
        reason: Machine-readable reason in UPPER_SNAKE_CASE, e.g. "QUEUE_FULL"; default: the status.
        retry_after_s: Earliest useful retry, seconds from now; None: unknown or never.
        request_id: The request, where one is concerned.
    """

    status: str = "UNKNOWN"

    def __init__(
        self,
        message: str,
        *,
        status: str | None = None,
        reason: str | None = None,
        retry_after_s: float | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status or type(self).status
        self.reason = reason or self.status
        self.retry_after_s = retry_after_s
        self.request_id = request_id


class InvalidRequest(PdserveError):
    """The request is wrong; the same request will fail again."""

    status = "INVALID_ARGUMENT"


class NotFound(PdserveError):
    """No such model, or no such request."""

    status = "NOT_FOUND"


class AlreadyExists(PdserveError):
    """Another request has this request_id."""

    status = "ALREADY_EXISTS"


class Overloaded(PdserveError):
    """No room now (queue full, over quota); retry after `retry_after_s`."""

    status = "RESOURCE_EXHAUSTED"


class Unavailable(PdserveError):
    """The router cannot be reached, has no worker for the request, or is draining."""

    status = "UNAVAILABLE"


class DeadlineExceeded(PdserveError):
    """`timeout_s` passed; the server has ended the request."""

    status = "DEADLINE_EXCEEDED"


class Cancelled(PdserveError):
    """The request was cancelled."""

    status = "CANCELLED"


class Unimplemented(PdserveError):
    """This version of the server does not do that."""

    status = "UNIMPLEMENTED"


class Unauthenticated(PdserveError):
    """Credentials are missing or wrong."""

    status = "UNAUTHENTICATED"


class ServerError(PdserveError):
    """A fault of the server, or an answer that breaks the protocol."""

    status = "INTERNAL"


_CLASSES: dict[str, type[PdserveError]] = {
    cls.status: cls
    for cls in (
        InvalidRequest,
        NotFound,
        AlreadyExists,
        Overloaded,
        Unavailable,
        DeadlineExceeded,
        Cancelled,
        Unimplemented,
        Unauthenticated,
        ServerError,
    )
}
_CLASSES["FAILED_PRECONDITION"] = InvalidRequest
_CLASSES["OUT_OF_RANGE"] = InvalidRequest
_CLASSES["PERMISSION_DENIED"] = Unauthenticated


def error_from_status(
    status: str,
    message: str,
    trailing_metadata: Iterable[tuple[str, str | bytes]] = (),
    request_id: str | None = None,
) -> PdserveError:
    """The typed error for a gRPC status.

    Args:
        status: gRPC status name.
        message: Status details.
        trailing_metadata: Pairs; `pdserve-reason` and `pdserve-retry-after-ms` are read.
        request_id: The request concerned.
    """
    metadata = {k: v.decode("ascii", "replace") if isinstance(v, bytes) else v for k, v in trailing_metadata}
    retry_ms = metadata.get(RETRY_AFTER_KEY, "")
    return _CLASSES.get(status, ServerError)(
        message or f"the server answered {status} without a message",
        status=status,
        reason=metadata.get(REASON_KEY),
        retry_after_s=int(retry_ms) / 1000 if retry_ms.isdecimal() and int(retry_ms) > 0 else None,
        request_id=request_id,
    )
