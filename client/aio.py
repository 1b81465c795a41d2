"""AsyncClient: the SDK for asyncio. The same as `Client` with `await`, `async for` and `async with`."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
import grpc.aio

from pdserve.client import convert
from pdserve.client.endpoints import CHANNEL_OPTIONS, Endpoints
from pdserve.client.errors import Cancelled, PdserveError
from pdserve.client.exchange import ControlTries, Exchange
from pdserve.client.types import Delta, ModelInfo, RequestOptions, RequestRecord, Result
from pdserve.v1 import inference_pb2, inference_pb2_grpc

CANCEL_TIMEOUT_S = 2.0
CONTROL_TIMEOUT_S = 10.0


class AsyncTokenStream:
    """One running request: `async for` over its deltas. Made by `AsyncClient.stream` and `AsyncClient.stream_chat`.

    The request is sent when the iteration starts. Leaving early (aclose, the end of an `async with` block, cancellation
    of the waiting task, garbage collection) tells the router to cancel it.
    """

    def __init__(self, client: AsyncClient, exchange: Exchange) -> None:
        self._client = client
        self._exchange = exchange
        self._call: Any = None
        self._closed = False
        self._unregister: weakref.finalize[..., AsyncTokenStream] | None = None

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self._exchange.request_id

    @property
    def result(self) -> Result:
        """The whole result, after the end of the stream.

        Raises:
            RuntimeError: The stream has not ended, or was left early.
        """
        if self._exchange.result is None:
            raise RuntimeError("the stream has not ended properly: there is no result")
        return self._exchange.result

    async def cancel(self) -> None:
        """Asks the router to end the request; the stream then ends with finish reason "cancelled"."""
        if self._call is None:
            self._closed = True
        elif not self._closed:
            await self._client._send_cancel(self._exchange.address, self.request_id)

    async def aclose(self) -> None:
        """Leaves the stream; a request that still runs is cancelled. Idempotent."""
        if (cancelling := self._leave()) is not None:
            await asyncio.wait([cancelling], timeout=CANCEL_TIMEOUT_S)

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if self._closed:
            raise StopAsyncIteration
        try:
            while True:
                if self._call is None:
                    self._start()
                if (delta := await self._receive()) is not None:
                    return delta
        except BaseException:
            self._leave()
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _start(self) -> None:
        attempt = self._exchange.begin()
        self._call = self._client._stub(attempt.address).Generate(attempt.request, timeout=attempt.timeout_s)
        self._forget()
        self._unregister = weakref.finalize(
            self,
            _abandon,
            asyncio.get_running_loop(),
            self._client._cancel_later,
            attempt.address,
            attempt.request.request_id,
            self._call,
        )
        self._unregister.atexit = False

    async def _receive(self) -> Delta | None:
        """One event; None: it was not a delta, or the next router is to be tried."""
        try:
            event = await self._call.read()
        except grpc.aio.AioRpcError as e:
            self._call = None
            _report(self._exchange.failed, e)
            return None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and not task.cancelling():  # another task closed the stream or the client
                raise Cancelled("the stream or its client was closed", request_id=self.request_id) from None
            raise
        if event is grpc.aio.EOF:  # type: ignore[attr-defined]
            self._call = None
            self._exchange.finish()
            raise StopAsyncIteration
        return self._exchange.accept(event)

    def _leave(self) -> asyncio.Task[None] | None:
        """Ends the stream on this side; the returned task, owned by the client, tells the router."""
        if self._closed:
            return None
        self._closed = True
        self._forget()
        # A cancelled read ends the call on this side only (and silently): the router is told all the same.
        if self._call is None or (self._call.done() and not self._call.cancelled()):
            return None
        return self._client._cancel_later(self._exchange.address, self.request_id, self._call)

    def _forget(self) -> None:
        if self._unregister is not None:
            self._unregister.detach()


class AsyncClient:
    """Talks to one router, or to several that share their state, from one event loop.

        async with AsyncClient("127.0.0.1:50051") as client:
            async for delta in client.stream("Hello", max_tokens=32):
                print(delta.text, end="")

    Args:
        addresses: "host:port" of a router, or a sequence of them: requests start at each in turn and go to the next
            when one cannot take them.
    """

    def __init__(self, addresses: str | Sequence[str]) -> None:
        self._endpoints = Endpoints(addresses)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._cancels: set[asyncio.Task[None]] = set()
        self._closed = False

    async def generate(
        self,
        prompt: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Result:
        """Generates and waits for the end; see `Client.generate`."""
        return await _drain(self.stream(prompt, prompt_token_ids=prompt_token_ids, **options))

    def stream(
        self,
        prompt: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncTokenStream:
        """Generates and gives the output piece by piece; see `Client.stream`."""
        return self._open(
            convert.generate_request(prompt=prompt, prompt_token_ids=prompt_token_ids, options=options), options
        )

    async def chat(self, messages: Sequence[Mapping[str, str]], **options: Unpack[RequestOptions]) -> Result:
        """Answers a conversation; see `Client.chat`."""
        return await _drain(self.stream_chat(messages, **options))

    def stream_chat(self, messages: Sequence[Mapping[str, str]], **options: Unpack[RequestOptions]) -> AsyncTokenStream:
        """Answers a conversation piece by piece; see `Client.stream_chat`."""
        return self._open(convert.generate_request(messages=messages, options=options), options)

    async def cancel(self, request_id: str) -> bool:
        """Ends a request, whoever started it; see `Client.cancel`."""
        request = inference_pb2.CancelRequest(request_id=request_id)
        return bool((await self._control("Cancel", request, request_id, everywhere=True)).cancelled)

    async def get_request(self, request_id: str) -> RequestRecord:
        """The stored record of a request."""
        request = inference_pb2.GetRequestRequest(request_id=request_id)
        return convert.to_record(await self._control("GetRequest", request, request_id))

    async def delete_request(self, request_id: str) -> bool:
        """Erases prompt, output and record of a request that has ended; False when nothing was stored."""
        request = inference_pb2.DeleteRequestRequest(request_id=request_id)
        return bool((await self._control("DeleteRequest", request, request_id)).deleted)

    async def models(self) -> tuple[ModelInfo, ...]:
        """The models that can be asked for, and the workers behind them."""
        return convert.to_models(await self._control("ListModels", inference_pb2.ListModelsRequest()))

    async def close(self) -> None:
        """Closes all connections; requests that still run are cancelled. Idempotent."""
        self._closed = True
        if self._cancels:
            await asyncio.wait(self._cancels, timeout=CANCEL_TIMEOUT_S)
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _open(self, request: inference_pb2.GenerateRequest, options: RequestOptions) -> AsyncTokenStream:
        exchange = Exchange(
            request,
            own_id=options.get("request_id") is None,
            addresses=self._endpoints.order(),
            timeout_s=convert.timeout_of(options),
            clock=time.monotonic,
        )
        return AsyncTokenStream(self, exchange)

    def _stub(self, address: str) -> Any:
        if self._closed:
            raise RuntimeError("the client is closed")
        if address not in self._channels:
            self._channels[address] = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        return _stub_of(self._channels[address])

    def _cancel_later(self, address: str, request_id: str, call: Any) -> asyncio.Task[None]:
        """Starts telling the router; `close` waits for it."""

        async def cancel() -> None:
            try:
                await self._send_cancel(address, request_id)
            finally:
                call.cancel()

        task = asyncio.get_running_loop().create_task(cancel())
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)
        return task

    async def _send_cancel(self, address: str, request_id: str) -> None:
        """Best effort: the end of the connection cancels the request as well."""
        channel = self._channels.get(address)
        if channel is None:
            return
        request = inference_pb2.CancelRequest(request_id=request_id)
        try:
            await _stub_of(channel).Cancel(request, timeout=CANCEL_TIMEOUT_S)
        except grpc.aio.AioRpcError:  # unknown by now, or unreachable
            return

    async def _control(self, method: str, request: Any, request_id: str | None = None, everywhere: bool = False) -> Any:
        """Calls the first router that answers."""
        addresses = self._endpoints.order()
        tries = ControlTries(addresses, request_id, everywhere)
        for address in addresses:
            try:
                return await getattr(self._stub(address), method)(request, timeout=CONTROL_TIMEOUT_S)
            except grpc.aio.AioRpcError as e:
                _report(tries.failed, e)
        raise tries.exhausted()


def _stub_of(channel: grpc.aio.Channel) -> Any:
    return inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]


async def _drain(stream: AsyncTokenStream) -> Result:
    async with stream:
        async for _ in stream:
            pass
        return stream.result


def _abandon(
    loop: asyncio.AbstractEventLoop,
    cancel_later: Callable[[str, str, Any], asyncio.Task[None]],
    address: str,
    request_id: str,
    call: Any,
) -> None:
    """A running stream was garbage-collected, at any point of any thread."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(_cancel_if_running, cancel_later, address, request_id, call)


def _cancel_if_running(
    cancel_later: Callable[[str, str, Any], asyncio.Task[None]], address: str, request_id: str, call: Any
) -> None:
    if not call.done():
        cancel_later(address, request_id, call)


def _report(failed: Callable[[str, str, Any], None], error: grpc.aio.AioRpcError) -> None:
    """Tells `failed` of a failure; what it raises replaces the gRPC error."""
    try:
        failed(error.code().name, error.details() or "", tuple(error.trailing_metadata() or ()))
    except PdserveError as typed:
        raise typed from None
