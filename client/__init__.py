"""The SDK: `Client` and `AsyncClient`, what they return, and the errors that they raise."""

from pdserve.client.aio import AsyncClient, AsyncTokenStream
from pdserve.client.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    PdserveError,
    ServerError,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from pdserve.client.sync import Client, TokenStream
from pdserve.client.types import (
    Choice,
    Delta,
    ModelInfo,
    PositionLogprobs,
    RequestOptions,
    RequestRecord,
    Result,
    Timings,
    TokenLogprob,
    Usage,
    WorkerInfo,
)

__all__ = [
    "AlreadyExists",
    "AsyncClient",
    "AsyncTokenStream",
    "Cancelled",
    "Choice",
    "Client",
    "DeadlineExceeded",
    "Delta",
    "InvalidRequest",
    "ModelInfo",
    "NotFound",
    "Overloaded",
    "PdserveError",
    "PositionLogprobs",
    "RequestOptions",
    "RequestRecord",
    "Result",
    "ServerError",
    "Timings",
    "TokenLogprob",
    "TokenStream",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "Usage",
    "WorkerInfo",
]
