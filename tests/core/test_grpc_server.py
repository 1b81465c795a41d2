"""Errors, health, reflection and limits of the gRPC server, over real connections."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from unittest.mock import Mock

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pdserve.core.errors import CapacityError, ConfigError, EngineError, PdserveError, RequestError, UnavailableError
from pdserve.core.grpc_server import (
    WRITE_FAILED,
    GrpcServer,
    channel_options,
    error_detail,
    error_from_detail,
    error_from_rpc,
)
from pdserve.v1 import inference_pb2, inference_pb2_grpc

INFERENCE = "pdserve.v1.Inference"
LIMIT = 1 << 16


class Faulty(inference_pb2_grpc.InferenceServicer):
    """Fails as it is told by the request id."""

    async def GetRequest(self, request, context):
        if request.request_id == "full":
            raise CapacityError("queue is full", reason="QUEUE_FULL", retry_after_s=1.5)
        if request.request_id == "bug":
            raise KeyError("secret detail")
        if request.request_id == "long":
            raise RequestError("\N{GRINNING FACE}" * 10_000)
        if request.request_id == "odd":
            raise PdserveError("from a newer peer", status="NEW_STATUS", reason="ODD")
        if request.request_id == "peer":
            async with grpc.aio.insecure_channel(context_address(context)) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                await stub.GetRequest(inference_pb2.GetRequestRequest(request_id="full"))
        return inference_pb2.GetRequestResponse(request_id=request.request_id)

    async def Attach(self, request, context):
        yield inference_pb2.AttachResponse()
        if request.request_id == "bug":
            raise KeyError("secret detail")
        raise EngineError("the engine died")


def context_address(context) -> str:
    return dict(context.invocation_metadata())["self-address"]


@asynccontextmanager
async def running(open_it: bool = True):
    server = GrpcServer([INFERENCE], max_message_bytes=LIMIT)
    port = server.bind("127.0.0.1", 0)
    await server.start()
    inference_pb2_grpc.add_InferenceServicer_to_server(Faulty(), server.server)
    if open_it:
        server.open()
    address = f"127.0.0.1:{port}"
    try:
        async with grpc.aio.insecure_channel(address, options=channel_options(1 << 20)) as channel:
            yield server, channel, address
    finally:
        await server.stop(0)


async def get(channel, request_id: str, address: str = "") -> PdserveError | inference_pb2.GetRequestResponse:
    stub = inference_pb2_grpc.InferenceStub(channel)
    try:
        metadata = (("self-address", address),)
        request = inference_pb2.GetRequestRequest(request_id=request_id)
        return await stub.GetRequest(request, timeout=10, metadata=metadata)
    except grpc.aio.AioRpcError as e:
        return error_from_rpc(e)


def test_typed_errors_arrive_whole():
    async def main():
        async with running() as (_, channel, address):
            for request_id in ("full", "peer"):  # "peer": the error of a server called by the server
                error = await get(channel, request_id, address)
                assert isinstance(error, CapacityError)
                assert (error.status, error.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
                assert (error.message, error.retry_after_s) == ("queue is full", 1.5)

    asyncio.run(main())


def test_long_messages_and_unknown_statuses_still_arrive():
    async def main():
        async with running() as (_, channel, _):
            error = await get(channel, "long")
            assert isinstance(error, RequestError)
            assert set(error.message) == {"\N{GRINNING FACE}"}
            error = await get(channel, "odd")
            assert (error.status, error.reason) == ("INTERNAL", "ODD")

    asyncio.run(main())


def test_unknown_errors_hide_their_text_and_are_logged_with_a_reference(caplog):
    async def main():
        async with running() as (_, channel, _):
            unary = await get(channel, "bug")
            stub = inference_pb2_grpc.InferenceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                async for _ in stub.Attach(inference_pb2.AttachRequest(request_id="bug")):
                    pass
            assert (await get(channel, "fine")).request_id == "fine"
            return unary, error_from_rpc(raised.value)

    with caplog.at_level(logging.ERROR):
        errors = asyncio.run(main())
    for error in errors:
        assert (error.status, error.reason) == ("INTERNAL", "INTERNAL")
        assert "secret" not in error.message
        reference = error.message.rsplit(" ", 1)[1]
        record = next(r for r in caplog.records if reference in r.getMessage())
        assert record.exc_info is not None


def test_stream_errors_come_after_the_items():
    async def main():
        async with running() as (_, channel, _):
            items = []
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                call = inference_pb2_grpc.InferenceStub(channel).Attach(inference_pb2.AttachRequest())
                items.append(await call.read())
                await call.read()
            assert len(items) == 1
            error = error_from_rpc(raised.value)
            assert (error.status, error.reason, error.message) == ("INTERNAL", "ENGINE_FAILED", "the engine died")

    asyncio.run(main())


def test_message_over_the_limit_is_refused_and_the_server_stays_well():
    async def main():
        async with running() as (_, channel, _):
            error = await get(channel, "x" * (LIMIT + 1))
            assert error.status == "RESOURCE_EXHAUSTED"
            assert (await get(channel, "fine")).request_id == "fine"

    asyncio.run(main())


def test_bytes_that_are_no_message_are_an_invalid_argument():
    async def main():
        async with running() as (_, channel, _address):
            for method, call in (("GetRequest", channel.unary_unary), ("Attach", channel.unary_stream)):
                rpc = call(f"/{INFERENCE}/{method}")(b"\x0a\x02\xff\xfe", timeout=10)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await (rpc if method == "GetRequest" else rpc.read())
                error = error_from_rpc(caught.value)
                assert (error.status, error.reason) == ("INVALID_ARGUMENT", "BAD_MESSAGE")
                assert "UTF-8" in error.message

    asyncio.run(main())


def test_unknown_method_is_unimplemented():
    async def main():
        async with running() as (_, channel, _):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await channel.unary_unary("/pdserve.v1.Inference/Nothing")(b"")
            assert error_from_rpc(raised.value).status == "UNIMPLEMENTED"

    asyncio.run(main())


def test_health_and_calls_while_loading():
    async def main():
        async with running(open_it=False) as (server, channel, _):
            health = health_pb2_grpc.HealthStub(channel)

            async def status(name):
                return (await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)).status

            serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
            assert (await status(""), await status(INFERENCE)) == (serving, not_serving)
            error = await get(channel, "fine")
            assert isinstance(error, UnavailableError)
            assert error.reason == "LOADING"
            server.open()
            await server.set_ready(True)
            assert await status(INFERENCE) == serving
            assert (await get(channel, "fine")).request_id == "fine"
            await server.set_serving("", False)
            assert await status("") == not_serving

    asyncio.run(main())


def test_reflection_lists_the_services():
    async def main():
        async with running() as (_, channel, _):
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            asked = reflection_pb2.ServerReflectionRequest(list_services="")
            answer = await stub.ServerReflectionInfo(iter([asked])).read()
            return {service.name for service in answer.list_services_response.service}

    assert {INFERENCE, "grpc.health.v1.Health"} <= asyncio.run(main())


def test_port_in_use_is_a_config_error():
    async def main():
        async with running() as (_, _, address):
            port = int(address.rpartition(":")[2])
            with pytest.raises(ConfigError, match=rf"port {port} is in use.*--port"):
                GrpcServer([], max_message_bytes=LIMIT).bind("127.0.0.1", port)

    asyncio.run(main())


def test_foreign_host_is_a_config_error():
    async def main():
        with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
            GrpcServer([], max_message_bytes=LIMIT).bind("192.0.2.1", 0)

    asyncio.run(main())


@pytest.mark.parametrize(
    "error",
    [
        RequestError("wrong"),
        CapacityError("full", reason="QUEUE_FULL", retry_after_s=0.25),
        PdserveError("taken", status="ALREADY_EXISTS", reason="REQUEST_EXISTS"),
    ],
)
def test_error_detail_round_trip(error):
    back = error_from_detail(error_detail(error))
    assert (back.status, back.reason, back.message, back.retry_after_s) == (
        error.status,
        error.reason,
        error.message,
        error.retry_after_s,
    )


def test_stop_is_bounded_when_grpc_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        server = GrpcServer([], max_message_bytes=1 << 20)
        server.bind("127.0.0.1", 0)
        await server.start()
        stop = server._server.stop
        monkeypatch.setattr("pdserve.core.grpc_server.STOP_TIMEOUT_S", 0.05)
        monkeypatch.setattr(server, "_server", Mock(stop=lambda grace_s: asyncio.Event().wait()))
        async with asyncio.timeout(10):
            await server.stop(0)
        await stop(0)

    asyncio.run(main())


def test_a_write_to_a_stream_that_has_ended_is_typed() -> None:
    empty = grpc.aio.Metadata()
    error = error_from_rpc(grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, empty, empty, details=WRITE_FAILED))
    assert isinstance(error, UnavailableError)
    assert (error.status, error.reason) == ("UNAVAILABLE", "STREAM_ENDED")
    other = error_from_rpc(grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, empty, empty, details="else"))
    assert (other.status, other.reason) != ("UNAVAILABLE", "STREAM_ENDED")
