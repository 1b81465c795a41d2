"""A network on virtual time with the face of grpc.aio: streams between processes, with delays, stalls and deaths.

What is real: servicers, stubs, serialisation, and the interceptor that turns our errors into gRPC status. What is not:
HTTP/2. A stream keeps its order; what a process sent before its death arrives; afterwards each peer is told as by a TCP
reset. A stalled link delivers late and loses nothing, as TCP does.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast

import grpc
import grpc.aio

from pdserve.core.grpc_server import ErrorInterceptor

Observe = Callable[[str, bytes], None]


class Process:
    """One process: what it serves, and the streams that it has. It dies once."""

    def __init__(self, address: str) -> None:
        self.address, self.alive = address, True
        self.streams: dict[_Stream, None] = {}  # ordered, unlike a set
        self._handlers: list[grpc.GenericRpcHandler[Any, Any]] = []
        self._interceptor = ErrorInterceptor(lambda: True)

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler[Any, Any]]) -> None:
        """See `grpc.aio.Server`."""
        self._handlers += handlers

    def add_registered_method_handlers(self, service_name: str, method_handlers: object) -> None:
        """Nothing: a shortcut of gRPC's look-up."""

    async def handler(self, method: str) -> Any:
        """The handler of a method, behind the interceptor of our servers."""
        details: Any = _Details(method)

        async def look_up(details: grpc.HandlerCallDetails) -> Any:
            return next((h for g in self._handlers if (h := g.service(details)) is not None), None)

        return await self._interceptor.intercept_service(look_up, details)


class _Details:
    invocation_metadata = ()

    def __init__(self, method: str) -> None:
        self.method = method


class Network:
    """All processes and links.

    Args:
        rng: Draws delays.
        latency_s: A message takes between this and twice this, seconds.
        observe: Sees every message that arrives, with the name of its link.
    """

    def __init__(self, rng: random.Random, latency_s: float, observe: Observe) -> None:
        self._rng, self._latency_s, self.observe = rng, latency_s, observe
        self._processes: dict[str, Process] = {}
        self._stalled_until_s: dict[str, float] = {}

    def join(self, address: str) -> Process:
        """A new process that serves at the address."""
        process = self._processes[address] = Process(address)
        return process

    def kill(self, process: Process) -> None:
        """The process is gone: nothing more leaves or reaches it, its peers see broken streams."""
        process.alive = False
        if self._processes.get(process.address) is process:
            del self._processes[process.address]
        for stream in list(process.streams):
            stream.lose(process)

    def stall(self, address: str, seconds: float) -> None:
        """What is sent to or from the address from now on arrives when the stall is over, not before."""
        until_s = asyncio.get_running_loop().time() + seconds
        self._stalled_until_s[address] = max(until_s, self._stalled_until_s.get(address, 0.0))

    def channels(self, process: Process) -> Callable[[str], grpc.aio.Channel]:
        """How a process opens channels."""
        return lambda address: cast(grpc.aio.Channel, _Channel(self, process, address))

    def find(self, address: str) -> Process | None:
        """Who serves at the address."""
        return self._processes.get(address)

    def arrival_s(self, *addresses: str) -> float:
        """When what is sent now arrives."""
        sent_s = max(asyncio.get_running_loop().time(), *(self._stalled_until_s.get(a, 0.0) for a in addresses))
        return sent_s + self._latency_s * (1 + self._rng.random())


class _Channel:
    """Client channel; only streams both ways exist here."""

    def __init__(self, network: Network, client: Process, address: str) -> None:
        self._network, self._client, self._address = network, client, address

    async def __aenter__(self) -> _Channel:
        return self

    async def __aexit__(self, *exc: object) -> None: ...

    def stream_stream(
        self, method: str, request_serializer: Any, response_deserializer: Any, _registered_method: bool = False
    ) -> Callable[..., _Stream]:
        """See `grpc.aio.Channel`."""

        def call(requests: AsyncIterator[Any] | None = None) -> _Stream:
            return _Stream(
                self._network, self._client, self._address, method, request_serializer, response_deserializer, requests
            )

        return call


class _Inbox:
    """What has arrived at one end; the last item is how the stream ended, and stays."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[bytes | BaseException] = asyncio.Queue()
        self._end: BaseException | None = None

    def put(self, item: bytes | BaseException) -> None:
        self._queue.put_nowait(item)

    def end_now(self, end: BaseException) -> None:
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(end)

    async def get(self) -> bytes:
        """The next message; raises how the stream ended."""
        if self._end is None:
            item = await self._queue.get()
            if isinstance(item, bytes):
                return item
            self._end = item
        raise self._end


class _Stream:
    """One call, both ends: the client's `grpc.aio.StreamStreamCall` and, inside, the server's context."""

    def __init__(
        self,
        network: Network,
        client: Process,
        address: str,
        method: str,
        serializer: Callable[[Any], bytes],
        deserializer: Callable[[bytes], Any],
        requests: AsyncIterator[Any] | None,
    ) -> None:
        self._network, self._client, self._method = network, client, method
        self._server = network.find(address)
        self._serializer, self._deserializer = serializer, deserializer
        self._inboxes = {True: _Inbox(), False: _Inbox()}  # by "to the server"
        self._last_s = {True: 0.0, False: 0.0}
        self._links = {True: f"{client.address}>{address}", False: f"{address}>{client.address}"}
        self._addresses = (client.address, address)
        self._over = {True: False, False: False}  # the server's end, the client's end
        self._task: asyncio.Task[None] | None = None
        self._pump: asyncio.Task[None] | None = None
        client.streams[self] = None
        if self._server is None:
            self._carry(False, lambda: self._inboxes[False].put(_error(grpc.StatusCode.UNAVAILABLE, "refused")))
            return
        self._server.streams[self] = None
        self._carry(True, self._start)
        if requests is not None:
            self._pump = asyncio.get_running_loop().create_task(self._send_all(requests))

    # ---- the client's end

    async def write(self, message: Any) -> None:
        """See `grpc.aio.StreamStreamCall`."""
        if self._over[False]:
            raise asyncio.InvalidStateError("the call has ended")
        self._send(True, self._serializer(message))

    async def read(self) -> Any:
        """See `grpc.aio.StreamStreamCall`."""
        try:
            return self._deserializer(await self._inboxes[False].get())
        except EOFError:
            self._leave(False)
            return grpc.aio.EOF  # type: ignore[attr-defined]  # missing in the stubs
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as e:
            if isinstance(e, grpc.aio.AioRpcError):
                self._leave(False)
            raise

    def cancel(self) -> None:
        """See `grpc.aio.StreamStreamCall`."""
        if not self._over[False]:
            self._leave(False)
            self._inboxes[False].end_now(asyncio.CancelledError())
            self._carry(True, self._stop_serving)

    async def _send_all(self, requests: AsyncIterator[Any]) -> None:
        async for request in requests:
            await self.write(request)

    # ---- the server's end

    def _start(self) -> None:
        assert self._server is not None
        if self._server.alive and not self._over[True]:
            self._task = asyncio.get_running_loop().create_task(self._serve(self._server))

    async def _serve(self, server: Process) -> None:
        handler = await server.handler(self._method)
        context = _Context(self, handler)
        end: BaseException = EOFError()
        try:
            await handler.stream_stream(context.messages(), context)
        except grpc.aio.AbortError:
            assert context.error is not None
            end = context.error
        finally:
            self._leave(True)
        self._carry(False, lambda: self._inboxes[False].put(end))

    def _stop_serving(self) -> None:
        self._leave(True)
        if self._task is not None:
            self._task.cancel()

    # ---- both

    def lose(self, dead: Process) -> None:
        """One of the two processes died."""
        if dead is self._client:
            self._leave(False)
            self._inboxes[False].end_now(asyncio.CancelledError())
            self._carry(True, self._stop_serving, always=True)
        else:
            self._stop_serving()
            error = _error(grpc.StatusCode.UNAVAILABLE, "connection reset")
            self._carry(False, lambda: self._inboxes[False].put(error), always=True)

    def _send(self, to_server: bool, data: bytes) -> None:
        def arrive() -> None:
            if not self._over[to_server]:
                self._network.observe(self._links[to_server], data)
                self._inboxes[to_server].put(data)

        self._carry(to_server, arrive)

    def _carry(self, to_server: bool, arrive: Callable[[], None], *, always: bool = False) -> None:
        sender = self._client if to_server else self._server
        if sender is not None and not sender.alive and not always:
            return
        at_s = max(self._network.arrival_s(*self._addresses), self._last_s[to_server] + 1e-7)
        self._last_s[to_server] = at_s
        asyncio.get_running_loop().call_at(at_s, arrive)

    def _leave(self, server: bool) -> None:
        self._over[server] = True
        process = self._server if server else self._client
        if process is not None:
            process.streams.pop(self, None)
        if not server and self._pump is not None:
            self._pump.cancel()


class _Context:
    """What a servicer sees of its call."""

    def __init__(self, stream: _Stream, handler: Any) -> None:
        self._stream, self._handler = stream, handler
        self.error: grpc.aio.AioRpcError | None = None

    async def read(self) -> Any:
        """See `grpc.aio.ServicerContext`."""
        return self._handler.request_deserializer(await self._stream._inboxes[True].get())

    async def messages(self) -> AsyncIterator[Any]:
        """The request iterator."""
        while True:
            yield await self.read()

    async def write(self, message: Any) -> None:
        """See `grpc.aio.ServicerContext`."""
        self._stream._send(False, self._handler.response_serializer(message))

    async def send_initial_metadata(self, metadata: Any) -> None:
        """See `grpc.aio.ServicerContext`; nothing here reads any."""

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        """See `grpc.aio.ServicerContext`."""
        self.error = _error(code, details, trailing_metadata)
        raise grpc.aio.AbortError(details)


def _error(code: grpc.StatusCode, details: str, trailing: Any = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details, None)
