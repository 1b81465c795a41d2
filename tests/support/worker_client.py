"""A router's end of `Worker.Session`, for tests: sends what it is told, keeps what it gets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from pdserve.core.grpc_server import channel_options, error_from_rpc
from pdserve.v1 import common_pb2, worker_pb2, worker_pb2_grpc


def fence(request_id: str, attempt: int = 1, epoch: int = 1) -> common_pb2.Fence:
    """A fence in phase PLACED."""
    return common_pb2.Fence(request_id=request_id, attempt=attempt, phase=1, owner_epoch=epoch)


class RouterEnd:
    """One session seen from the router."""

    def __init__(self, call) -> None:
        self._call = call

    async def send(self, **message) -> None:
        """Sends one SessionRequest, e.g. `submit=worker_pb2.Submit(...)`."""
        await self._call.write(worker_pb2.SessionRequest(**message))

    async def receive(self, kind: str | None = None, timeout_s: float = 10.0):
        """The next message; with `kind` the next one of that kind, others are skipped. None at the end."""
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    message = await self._call.read()
                except grpc.aio.AioRpcError as e:
                    raise error_from_rpc(e) from None
                if message is grpc.aio.EOF:
                    return None
                if kind is None:
                    return message
                if message.WhichOneof("message") == kind:
                    return getattr(message, kind)

    async def close(self) -> None:
        """Ends the router's side in order."""
        await self._call.done_writing()

    def cancel(self) -> None:
        """Breaks the session, as a dying router does."""
        self._call.cancel()


@asynccontextmanager
async def router_session(
    address: str, router_id: str = "router-1", version: int = 1, hello: bool = True
) -> AsyncIterator[RouterEnd]:
    """Opens a session; Hello is sent unless told otherwise, Welcome is left to be received."""
    async with grpc.aio.insecure_channel(address, options=channel_options(16 << 20)) as channel:
        end = RouterEnd(worker_pb2_grpc.WorkerStub(channel).Session())
        if hello:
            await end.send(hello=worker_pb2.Hello(router_id=router_id, protocol_version=version))
        try:
            yield end
        finally:
            end.cancel()
