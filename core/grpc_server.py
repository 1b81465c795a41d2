"""A gRPC server with health, reflection and typed errors; the one table between our errors and gRPC status.

Health: "" is liveness, a full service name is readiness. Until `open` is called, everything but health and reflection
answers UNAVAILABLE with reason LOADING, so that a port can be bound before a model is loaded.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdserve.core.errors import (
    CancelledError,
    CapacityError,
    ConfigError,
    DeadlineError,
    PdserveError,
    RequestError,
    UnavailableError,
    UnimplementedError,
    UnknownError,
)
from pdserve.core.net import check_port_free, format_address
from pdserve.core.tls import Tls
from pdserve.v1 import common_pb2

REASON_KEY = "pdserve-reason"
RETRY_AFTER_KEY = "pdserve-retry-after-ms"
KEEPALIVE_S = 10.0
CONNECT_MS = 3000
STOP_TIMEOUT_S = 3.0
HANDSHAKE_TIMEOUT_S = 5.0
MAX_PROBES = 64
WRITE_FAILED = "Internal error from Core"  # grpc.aio's words when a write meets an end that it has not read yet
MAX_DETAILS_BYTES = 1500  # details travel percent-encoded (up to 3 bytes each) in a header; 8 KiB is the usual limit

_log = logging.getLogger(__name__)
_TLS_FAILURES = ("Tls handshake failed", "verification check failed")  # gRPC's words when we refuse a peer
_ALWAYS_OPEN = ("/grpc.health.v1.", "/grpc.reflection.")
_BY_STATUS: dict[str, type[PdserveError]] = {
    "INVALID_ARGUMENT": RequestError,
    "NOT_FOUND": UnknownError,
    "UNIMPLEMENTED": UnimplementedError,
    "RESOURCE_EXHAUSTED": CapacityError,
    "UNAVAILABLE": UnavailableError,
    "DEADLINE_EXCEEDED": DeadlineError,
    "CANCELLED": CancelledError,
}


# ---- errors --------------------------------------------------------------------------------------------------------


def error_detail(error: PdserveError) -> common_pb2.ErrorDetail:
    """An error as a message of the protocol."""
    return common_pb2.ErrorDetail(
        status=error.status,
        reason=error.reason,
        message=error.message,
        retry_after_ms=_retry_after_ms(error),
    )


def error_from_detail(detail: common_pb2.ErrorDetail) -> PdserveError:
    """The error that a peer put into a message."""
    return _make_error(detail.status, detail.message, detail.reason, detail.retry_after_ms)


def error_from_rpc(error: grpc.aio.AioRpcError) -> PdserveError:
    """The error with which a call to another server of ours ended."""
    if error.code() is grpc.StatusCode.INTERNAL and error.details() == WRITE_FAILED:
        return UnavailableError("the stream had ended when it was written to", reason="STREAM_ENDED")
    details = error.details() or ""
    if error.code() is grpc.StatusCode.UNAVAILABLE and any(words in details for words in _TLS_FAILURES):
        return UnavailableError(details, reason="TLS_FAILED")
    metadata: dict[str, object] = dict(cast(Any, error.trailing_metadata()) or ())
    retry_after = str(metadata.get(RETRY_AFTER_KEY, "0"))
    return _make_error(
        error.code().name,
        details or error.code().name,
        str(metadata.get(REASON_KEY, "")),
        int(retry_after) if retry_after.isdecimal() else 0,
    )


def _make_error(status: str, message: str, reason: str, retry_after_ms: int) -> PdserveError:
    kind = _BY_STATUS.get(status, PdserveError)
    if not reason:
        reason = kind.reason if kind is not PdserveError else status
    return kind(message, reason=reason, status=status, retry_after_s=retry_after_ms / 1000 if retry_after_ms else None)


def _retry_after_ms(error: PdserveError) -> int:
    return 0 if error.retry_after_s is None else max(1, round(error.retry_after_s * 1000))


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: PdserveError) -> NoReturn:
    trailing = [(REASON_KEY, error.reason)]
    if retry_after_ms := _retry_after_ms(error):
        trailing.append((RETRY_AFTER_KEY, str(retry_after_ms)))
    code = grpc.StatusCode.__members__.get(error.status, grpc.StatusCode.INTERNAL)
    details = error.message.encode()[:MAX_DETAILS_BYTES].decode(errors="ignore")
    await context.abort(code, details, tuple(trailing))
    raise AssertionError("abort always raises")


async def _abort_unknown(context: grpc.aio.ServicerContext[Any, Any], method: str) -> NoReturn:
    reference = secrets.token_hex(4)
    _log.exception("internal error %s in %s", reference, method)
    await _abort(context, PdserveError(f"internal error; the server's log has it under {reference}"))


# ---- the interceptor -----------------------------------------------------------------------------------------------


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Turns every exception of a handler into a typed status, and refuses calls while `is_open()` is False.

    Args:
        is_open: Asked at each call.
        peer_name: Callers must carry it in their certificate; None: anybody may call.
    """

    def __init__(self, is_open: Callable[[], bool], peer_name: str | None = None) -> None:
        self._is_open, self._peer_name = is_open, peer_name

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """See `grpc.aio.ServerInterceptor`."""
        method = handler_call_details.method
        if not self._is_open() and not method.startswith(_ALWAYS_OPEN):
            return grpc.unary_unary_rpc_method_handler(_refuse_loading)
        handler: Any = await continuation(handler_call_details)
        return _wrap_handler(handler, method, self._peer_name)  # type: ignore[no-any-return]


def _wrap_handler(handler: Any, method: str, peer_name: str | None) -> Any:
    if handler is None:
        return None  # gRPC answers UNIMPLEMENTED
    for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
        behaviour = getattr(handler, kind)
        if behaviour is not None:
            wrap: Any = _wrap_stream if inspect.isasyncgenfunction(behaviour) else _wrap_call
            make: Any = getattr(grpc, f"{kind}_rpc_method_handler")
            deserialize = handler.request_deserializer
            if kind.startswith("unary_") and deserialize is not None:
                deserialize = _typed_deserializer(deserialize)
            return make(wrap(behaviour, method, peer_name), deserialize, handler.response_serializer)
    raise AssertionError(f"{method} has no behaviour")


@dataclass(frozen=True, slots=True)
class _Undecodable:
    """Stands for a request that is no message of the expected type; gRPC itself would answer UNKNOWN."""

    error: str


def _typed_deserializer(deserialize: Callable[[bytes], object]) -> Callable[[bytes], object]:
    def typed(data: bytes) -> object:
        try:
            return deserialize(data)
        except DecodeError as e:
            return _Undecodable(str(e))

    return typed


def _check_decoded(request: object) -> None:
    if isinstance(request, _Undecodable):
        raise RequestError(f"the request cannot be decoded: {request.error}", reason="BAD_MESSAGE")


def _check_caller(context: grpc.aio.ServicerContext[Any, Any], peer_name: str | None) -> None:
    """The handshake proved that the certificate is of our authority; this, that it is a member's."""
    if peer_name is None:
        return
    if peer_name.encode() not in context.auth_context().get("x509_subject_alternative_name", ()):
        message = f"the certificate does not name {peer_name!r} (--tls-peer-name)"
        raise PdserveError(message, reason="NOT_A_MEMBER", status="UNAUTHENTICATED")


async def _refuse_loading(request: object, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
    await _abort(context, UnavailableError("this process is still loading; try again soon", reason="LOADING"))


@asynccontextmanager
async def _typed_errors(context: grpc.aio.ServicerContext[Any, Any], method: str) -> AsyncIterator[None]:
    try:
        yield
    except PdserveError as e:
        await _abort(context, e)
    except grpc.aio.AioRpcError as e:
        await _abort(context, error_from_rpc(e))
    except grpc.aio.AbortError:
        raise
    except Exception:  # noqa: BLE001 - the interceptor is the last place that can turn it into a status
        await _abort_unknown(context, method)


def _wrap_call(behaviour: Callable[..., Any], method: str, peer_name: str | None) -> Callable[..., Awaitable[object]]:
    async def call(request: object, context: grpc.aio.ServicerContext[Any, Any]) -> object:
        async with _typed_errors(context, method):
            _check_caller(context, peer_name)
            _check_decoded(request)
            result = behaviour(request, context)
            return await result if inspect.isawaitable(result) else result

    return call


def _wrap_stream(
    behaviour: Callable[..., Any], method: str, peer_name: str | None
) -> Callable[..., AsyncIterator[object]]:
    async def stream(request: object, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[object]:
        async with _typed_errors(context, method):
            _check_caller(context, peer_name)
            _check_decoded(request)
            async with aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    yield response

    return stream


# ---- server and channel --------------------------------------------------------------------------------------------


def channel_options(max_message_bytes: int) -> list[tuple[str, int | str]]:
    """Options of a client channel to one of our servers: message limit, keepalive, short reconnect backoff."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
        ("grpc.keepalive_timeout_ms", 5000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", CONNECT_MS),  # no backoff, but the least time that an attempt has
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.use_local_subchannel_pool", 1),
    ]


def _server_options(max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),  # a port in use is an error, never shared
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
        ("grpc.keepalive_timeout_ms", 5000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5000),  # permits pings every 10 s
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_TIMEOUT_S * 1000)),
    ]


def open_channel(address: str, *, max_message_bytes: int, tls: Tls | None = None) -> grpc.aio.Channel:
    """A client channel to one of our servers.

    Args:
        address: host:port.
        max_message_bytes: Largest message either way.
        tls: Shows this process's certificate, as it is now, to a member; None: plain.
    """
    options = channel_options(max_message_bytes)
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    options.append(("grpc.ssl_target_name_override", tls.peer_name))
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=options)


class Servicers:
    """What `add_XServicer_to_server` needs of a server; unlike gRPC's own it takes servicers after the start too."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler[Any, Any]]) -> None:
        """See `grpc.aio.Server`."""
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service_name: str, method_handlers: object) -> None:
        """Nothing: a shortcut of gRPC's look-up, which works before the start only."""


class GrpcServer:
    """A grpc.aio server: `bind`, `start`, `open`, `set_serving`, `stop`.

    Servicers may be added to `.server` (by the generated functions) at any time before `open`, also after `start`.

    Args:
        service_names: Full names of the services, for reflection and as the names of readiness.
        max_message_bytes: Larger messages are refused by gRPC with RESOURCE_EXHAUSTED.
        tls: Callers must be members; None: plain.
    """

    def __init__(self, service_names: Sequence[str], *, max_message_bytes: int, tls: Tls | None = None) -> None:
        self._is_open = False
        self._service_names = tuple(service_names)
        self._credentials = tls.server_credentials() if tls else None
        interceptor = ErrorInterceptor(lambda: self._is_open, tls.peer_name if tls else None)
        self._server = grpc.aio.server(interceptors=[interceptor], options=_server_options(max_message_bytes))
        self.server = Servicers(self._server)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # missing in the stubs
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self._probes: grpc.aio.Server | None = None

    def bind(self, host: str, port: int) -> int:
        """Binds the port; call once, before `start`.

        Args:
            host: Address or name to listen on.
            port: 0 picks a free one.

        Returns:
            The port bound.

        Raises:
            ConfigError: The port is in use, or the host is not ours.
        """
        check_port_free(host, port)  # gRPC itself would log to stderr and raise RuntimeError
        try:
            if self._credentials is not None:
                return self._server.add_secure_port(format_address(host, port), self._credentials)
            return self._server.add_insecure_port(format_address(host, port))
        except RuntimeError as e:
            raise ConfigError(f"cannot listen on {host}:{port}: {e}", reason="PORT_IN_USE") from e

    def bind_health(self, host: str, port: int) -> int:
        """Binds a plain port that answers health and nothing else, for probes without a certificate.

        As `bind`; also before `start`.
        """
        check_port_free(host, port, "--health-port")
        self._probes = grpc.aio.server(options=_server_options(1 << 16), maximum_concurrent_rpcs=MAX_PROBES)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._probes)
        return self._probes.add_insecure_port(format_address(host, port))

    async def start(self) -> None:
        """Begins to answer health; liveness is SERVING, readiness NOT_SERVING."""
        for name in self._service_names:
            await self.set_serving(name, False)
        await self._server.start()
        if self._probes is not None:
            await self._probes.start()

    def open(self) -> None:
        """Lets calls through."""
        self._is_open = True

    async def set_serving(self, service: str, serving: bool) -> None:
        """Sets the health of a service; "" is liveness."""
        status = health_pb2.HealthCheckResponse
        await self._health.set(service, status.SERVING if serving else status.NOT_SERVING)

    async def set_ready(self, ready: bool) -> None:
        """Sets readiness of every service of this server."""
        for name in self._service_names:
            await self.set_serving(name, ready)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, gives running ones `grace_s` seconds, then cancels them; bounded, whatever gRPC does.

        gRPC has been seen to wait forever for connections that never became one (strangers' bytes on the port).
        """
        if self._probes is not None:
            await self._stop(self._probes, 0)
        await self._stop(self._server, grace_s)

    async def _stop(self, server: grpc.aio.Server, grace_s: float) -> None:
        stopping = asyncio.create_task(server.stop(grace_s))
        await asyncio.wait({stopping}, timeout=grace_s + STOP_TIMEOUT_S)
        if stopping.done():
            stopping.result()
        else:
            _log.warning("the gRPC server did not stop within %g s; going on without it", grace_s + STOP_TIMEOUT_S)
            stopping.cancel()
