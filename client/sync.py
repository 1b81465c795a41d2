"""Client: the blocking face of the SDK. Safe to use from several threads."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from pdserve.client import convert
from pdserve.client.endpoints import CHANNEL_OPTIONS, Endpoints
from pdserve.client.errors import PdserveError
from pdserve.client.exchange import ControlTries, Exchange
from pdserve.client.types import Delta, ModelInfo, RequestOptions, RequestRecord, Result
from pdserve.v1 import inference_pb2, inference_pb2_grpc

CANCEL_TIMEOUT_S = 2.0
CONTROL_TIMEOUT_S = 10.0


class TokenStream:
    """One running request: iterate over its deltas. Made by `Client.stream` and `Client.stream_chat`.

    The request is sent when the iteration starts. Leaving early (close, the end of a `with` block, an exception while
    waiting, garbage collection) tells the router to cancel it.
    """

    def __init__(self, client: Client, exchange: Exchange) -> None:
        self._client = client
        self._exchange = exchange
        self._call: Any = None
        self._closed = False
        self._unregister: weakref.finalize[..., TokenStream] | None = None

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

    def cancel(self) -> None:
        """Asks the router to end the request; the stream then ends with finish reason "cancelled". Any thread."""
        if self._call is None:
            self._closed = True
        elif not self._closed:
            self._client._send_cancel(self._exchange.address, self.request_id)

    def close(self) -> None:
        """Leaves the stream; a request that still runs is cancelled. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._forget()
        if self._call is not None and not self._call.done():
            self._client._send_cancel(self._exchange.address, self.request_id)
            self._call.cancel()

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        if self._closed:
            raise StopIteration
        try:
            while True:
                if self._call is None:
                    self._start()
                if (delta := self._receive()) is not None:
                    return delta
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        attempt = self._exchange.begin()
        self._call = self._client._stub(attempt.address).Generate(attempt.request, timeout=attempt.timeout_s)
        self._forget()
        self._unregister = weakref.finalize(
            self, self._client._abandoned.put, (attempt.address, attempt.request.request_id, self._call)
        )
        self._unregister.atexit = False

    def _receive(self) -> Delta | None:
        """One event; None: it was not a delta, or the next router is to be tried."""
        try:
            event = next(self._call)
        except StopIteration:
            self._call = None
            self._exchange.finish()
            raise
        except grpc.RpcError as e:
            self._call = None
            _report(self._exchange.failed, e)
            return None
        return self._exchange.accept(event)

    def _forget(self) -> None:
        if self._unregister is not None:
            self._unregister.detach()


class Client:
    """Talks to one router, or to several that share their state.

        with Client("127.0.0.1:50051") as client:
            print(client.generate("Hello", max_tokens=32, temperature=0).text)

    Args:
        addresses: "host:port" of a router, or a sequence of them: requests start at each in turn and go to the next
            when one cannot take them.
    """

    def __init__(self, addresses: str | Sequence[str]) -> None:
        self._endpoints = Endpoints(addresses)
        self._lock = threading.Lock()
        self._channels: dict[str, grpc.Channel] = {}
        self._closed = False
        # Streams that were garbage-collected while running. A finalizer may run at any point of any thread, so all it
        # does is a reentrant put; the thread, started with the first stream, talks to the network.
        self._abandoned: queue.SimpleQueue[tuple[str, str, Any] | None] = queue.SimpleQueue()
        self._reaper: threading.Thread | None = None
        weakref.finalize(self, self._abandoned.put, None).atexit = False

    def generate(
        self,
        prompt: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Result:
        """Generates and waits for the end.

        Args:
            prompt: Text; or give
            prompt_token_ids: token ids.
            **options: See `RequestOptions`.

        Raises:
            PdserveError: See `pdserve.client.errors`.
            TypeError: A keyword is unknown or has the wrong type.
        """
        return _drain(self.stream(prompt, prompt_token_ids=prompt_token_ids, **options))

    def stream(
        self,
        prompt: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        **options: Unpack[RequestOptions],
    ) -> TokenStream:
        """Generates and gives the output piece by piece; arguments and errors as in `generate`."""
        return self._open(
            convert.generate_request(prompt=prompt, prompt_token_ids=prompt_token_ids, options=options), options
        )

    def chat(self, messages: Sequence[Mapping[str, str]], **options: Unpack[RequestOptions]) -> Result:
        """Answers a conversation, rendered by the model's chat template.

        Args:
            messages: Mappings with "role" ("system", "user", "assistant") and "content".
            **options: See `RequestOptions`.
        """
        return _drain(self.stream_chat(messages, **options))

    def stream_chat(self, messages: Sequence[Mapping[str, str]], **options: Unpack[RequestOptions]) -> TokenStream:
        """Answers a conversation piece by piece; arguments as in `chat`."""
        return self._open(convert.generate_request(messages=messages, options=options), options)

    def cancel(self, request_id: str) -> bool:
        """Ends a request, whoever started it.

        Returns:
            False when it had already ended, or no router knows it.

        Raises:
            Unavailable: The router that runs it does not answer.
        """
        request = inference_pb2.CancelRequest(request_id=request_id)
        return bool(self._control("Cancel", request, request_id, everywhere=True).cancelled)

    def get_request(self, request_id: str) -> RequestRecord:
        """The stored record of a request."""
        request = inference_pb2.GetRequestRequest(request_id=request_id)
        return convert.to_record(self._control("GetRequest", request, request_id))

    def delete_request(self, request_id: str) -> bool:
        """Erases prompt, output and record of a request that has ended; False when nothing was stored."""
        request = inference_pb2.DeleteRequestRequest(request_id=request_id)
        return bool(self._control("DeleteRequest", request, request_id).deleted)

    def models(self) -> tuple[ModelInfo, ...]:
        """The models that can be asked for, and the workers behind them."""
        return convert.to_models(self._control("ListModels", inference_pb2.ListModelsRequest()))

    def close(self) -> None:
        """Closes all connections; requests that still run are cancelled. Idempotent."""
        with self._lock:
            self._closed = True
            channels, self._channels = list(self._channels.values()), {}
            reaper = self._reaper
        if reaper is not None:
            self._abandoned.put(None)
            reaper.join(CANCEL_TIMEOUT_S)
        for channel in channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, request: inference_pb2.GenerateRequest, options: RequestOptions) -> TokenStream:
        exchange = Exchange(
            request,
            own_id=options.get("request_id") is None,
            addresses=self._endpoints.order(),
            timeout_s=convert.timeout_of(options),
            clock=time.monotonic,
        )
        with self._lock:
            if self._reaper is None:
                self._reaper = threading.Thread(
                    target=_reap, args=(weakref.ref(self), self._abandoned), name="pdserve-client", daemon=True
                )
                self._reaper.start()
        return TokenStream(self, exchange)

    def _stub(self, address: str) -> Any:
        with self._lock:
            if self._closed:
                raise RuntimeError("the client is closed")
            if address not in self._channels:
                self._channels[address] = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
            return inference_pb2_grpc.InferenceStub(self._channels[address])  # type: ignore[no-untyped-call]

    def _send_cancel(self, address: str, request_id: str) -> None:
        """Best effort: the end of the connection cancels the request as well."""
        try:
            self._stub(address).Cancel(inference_pb2.CancelRequest(request_id=request_id), timeout=CANCEL_TIMEOUT_S)
        except (grpc.RpcError, RuntimeError, ValueError):  # unknown by now, unreachable, or the client is closed
            return

    def _control(self, method: str, request: Any, request_id: str | None = None, everywhere: bool = False) -> Any:
        """Calls the first router that answers."""
        addresses = self._endpoints.order()
        tries = ControlTries(addresses, request_id, everywhere)
        for address in addresses:
            try:
                return getattr(self._stub(address), method)(request, timeout=CONTROL_TIMEOUT_S)
            except grpc.RpcError as e:
                _report(tries.failed, e)
        raise tries.exhausted()


def _drain(stream: TokenStream) -> Result:
    with stream:
        for _ in stream:
            pass
        return stream.result


def _reap(client_ref: weakref.ref[Client], abandoned: queue.SimpleQueue[tuple[str, str, Any] | None]) -> None:
    """Cancels abandoned streams until None comes. Holds the client only while it works."""
    while (item := abandoned.get()) is not None:
        address, request_id, call = item
        client = client_ref()
        if not call.done() and client is not None:
            client._send_cancel(address, request_id)
        call.cancel()
        del client, call, item


def _report(failed: Callable[[str, str, Any], None], error: grpc.RpcError) -> None:
    """Tells `failed` of a failure; what it raises replaces the gRPC error."""
    code: grpc.StatusCode = error.code()
    try:
        failed(code.name, error.details() or "", error.trailing_metadata() or ())
    except PdserveError as typed:
        raise typed from None
