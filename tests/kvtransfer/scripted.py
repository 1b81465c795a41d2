"""Peers made of a list of messages: the real server and the real client, without gRPC in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import grpc.aio

from pdserve.core.clock import MonotonicClock
from pdserve.kvtransfer.control_client import TransferClient, TransferPeer
from pdserve.kvtransfer.control_server import TransferServer
from pdserve.kvtransfer.transport import PageSink
from pdserve.v1 import kvtransfer_pb2 as pb

from .world import DIGEST, INCARNATION, SMALL, hello


class Refused(Exception):
    """The server ended the stream with a status."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name} {details}")
        self.code, self.details = code, details


class ScriptedDecode:
    """One control stream into a `TransferServer`: says its messages, then ends; `heard` gets the answers.

    Args:
        messages: What it says; the first is the hello.
        keep: How many of the latest answers are kept.
    """

    def __init__(self, messages: Iterable[pb.ControlRequest], keep: int = 100) -> None:
        self._messages, self._keep = iter(messages), keep
        self.num_said = self.num_heard = 0
        self.heard: list[pb.ControlResponse] = []

    async def run(self, server: TransferServer) -> None:
        """Runs the stream to its end.

        Raises:
            Refused: The server refused the pair.
        """
        await server.Control(None, cast("Any", self))

    async def send_initial_metadata(self, metadata: object) -> None:
        """See `grpc.aio.ServicerContext`."""

    async def read(self) -> object:
        """See `grpc.aio.ServicerContext`."""
        if self.num_said % 16 == 0:
            await asyncio.sleep(0)  # the server's other tasks get their turn
        for message in self._messages:
            self.num_said += 1
            return message
        await asyncio.sleep(0)
        return grpc.aio.EOF

    async def write(self, message: pb.ControlResponse) -> None:
        """See `grpc.aio.ServicerContext`."""
        self.num_heard += 1
        self.heard.append(message)
        del self.heard[: -self._keep]

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        """See `grpc.aio.ServicerContext`."""
        raise Refused(code, details)


class ScriptedPrefill:
    """The channel of a `TransferClient` to a prefill side that says the given messages and then is silent.

    Args:
        messages: What it says, once decode has opened a transfer; the first is the welcome, said at once.
        at_end: Called when all is said.
    """

    def __init__(self, messages: Iterable[pb.ControlResponse], at_end: Callable[[], None] = lambda: None) -> None:
        self._messages: Iterator[pb.ControlResponse] = iter(messages)
        self._opened, self._at_end, self._num_said = asyncio.Event(), at_end, 0
        self.heard: list[pb.ControlRequest] = []

    def stream_stream(self, *_: object, **__: object) -> Callable[[], ScriptedPrefill]:
        """See `grpc.aio.Channel`."""
        return lambda: self

    async def __aenter__(self) -> ScriptedPrefill:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def write(self, message: pb.ControlRequest) -> None:
        """See `grpc.aio.StreamStreamCall`."""
        self.heard.append(message)
        if message.WhichOneof("message") == "open":
            self._opened.set()

    async def read(self) -> object:
        """See `grpc.aio.StreamStreamCall`."""
        if self._num_said:
            await self._opened.wait()
            await asyncio.sleep(0)
        for message in self._messages:
            self._num_said += 1
            return message
        self._at_end()
        return await asyncio.get_running_loop().create_future()

    def cancel(self) -> None:
        """See `grpc.aio.StreamStreamCall`."""


def scripted_client(sink: PageSink, channel: ScriptedPrefill, name: str = "tcp") -> TransferClient:
    """Decode's control side over a scripted prefill."""
    return TransferClient(
        worker_id="d",
        incarnation="b1",
        identity_digest=DIGEST,
        layout=SMALL,
        sinks={name: sink},
        clock=MonotonicClock(),
        open_channel=lambda _: cast("Any", channel),
    )


def fake_hello() -> pb.TransferHello:
    """The hello of a decode worker with the fake plane."""
    message = hello()
    message.transports.append("fake")
    return message


def welcome(**fields: object) -> pb.ControlResponse:
    """Prefill's first message, with fields replaced."""
    values = {
        "protocol_version": 1,
        "incarnation": INCARNATION,
        "data_address": "127.0.0.1:1",
        "data_token": bytes(16),
        "lease_ms": 10_000,
        "integrity": "host",
        "layout": SMALL.to_json(),
    }
    return pb.ControlResponse(welcome=pb.TransferWelcome(**{**values, **fields}))


SCRIPTED = TransferPeer("prefill-0", "scripted", INCARNATION)
"""The peer that a scripted prefill plays."""
