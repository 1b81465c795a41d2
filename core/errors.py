"""One tree of typed errors. Every failure that a user or a peer can see is one of these.

`status` is the name of a gRPC status code, `reason` a machine-readable UPPER_SNAKE_CASE word, the message says what is
wrong and what to do. `core.grpc_server` maps them to gRPC, `client.errors` maps them back.
"""

from __future__ import annotations


class PdserveError(Exception):
    """Base of all errors of pdserve.

    Args:
        message: What is wrong and what to do about it.
        reason: UPPER_SNAKE_CASE; default is the class's own.
        status: gRPC status name; default is the class's own.
        retry_after_s: Earliest useful retry, seconds; None if unknown or never.
    """

    status: str = "INTERNAL"
    reason: str = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        status: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or type(self).reason
        self.status = status or type(self).status
        self.retry_after_s = retry_after_s


class RequestError(PdserveError):
    """The request is wrong; the same request will fail again."""

    status = "INVALID_ARGUMENT"
    reason = "INVALID_ARGUMENT"


class UnknownError(RequestError):
    """The request names a model or a request that does not exist."""

    status = "NOT_FOUND"
    reason = "NOT_FOUND"


class UnimplementedError(RequestError):
    """The request asks for something that this version does not do."""

    status = "UNIMPLEMENTED"
    reason = "UNIMPLEMENTED"


class CapacityError(PdserveError):
    """There is no room now; the same request may succeed later."""

    status = "RESOURCE_EXHAUSTED"
    reason = "NO_CAPACITY"


class UnavailableError(PdserveError):
    """A worker, a peer or the store is missing, draining or died."""

    status = "UNAVAILABLE"
    reason = "UNAVAILABLE"


class DeadlineError(PdserveError):
    """The request's deadline passed."""

    status = "DEADLINE_EXCEEDED"
    reason = "DEADLINE_EXCEEDED"


class CancelledError(PdserveError):
    """The client, or a newer attempt, ended the request."""

    status = "CANCELLED"
    reason = "CANCELLED"


class TransferError(PdserveError):
    """KV pages did not arrive whole and authentic; nothing of them is used."""

    status = "UNAVAILABLE"
    reason = "TRANSFER_FAILED"


class EngineError(PdserveError):
    """The engine failed; every stream on it ends with this."""

    status = "INTERNAL"
    reason = "ENGINE_FAILED"


class ConfigError(PdserveError):
    """A flag, an environment variable, a file or a model directory is wrong; the process does not start."""

    status = "FAILED_PRECONDITION"
    reason = "BAD_CONFIG"
