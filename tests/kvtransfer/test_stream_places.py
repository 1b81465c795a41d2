"""No decode worker, and not all of them, make a prefill worker keep any number of control streams."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, suppress
from typing import Any

import grpc
import pytest

from pdserve.core.errors import TransferError
from pdserve.kvtransfer.handoff import TransferState
from pdserve.kvtransfer.stream_places import StreamPlaces
from pdserve.v1 import kvtransfer_pb2 as pb
from pdserve.v1.kvtransfer_pb2_grpc import KvTransferStub

from .world import Ref, eventually, hello, reason_of, run, world


def test_a_place_is_refused_when_there_are_enough_and_comes_back() -> None:
    places = StreamPlaces(max_streams=3, max_per_worker=2, max_mute=1)
    with ExitStack() as held:
        held.enter_context(places.mute())
        with pytest.raises(TransferError, match="1 others have not said who they are") as e, places.mute():
            pass
        assert e.value.reason == "TOO_MANY_STREAMS"
    with places.mute(), ExitStack() as held:
        held.enter_context(places.of("a", "1"))
        with places.of("a", "1"):
            with pytest.raises(TransferError, match="this process of a has 2"), places.of("a", "1"):
                pass
            held.enter_context(places.of("a", "2"))  # it was started again
            with pytest.raises(TransferError, match="decode workers have 3"), places.of("b", "1"):
                pass
        held.enter_context(places.of("b", "1"))
    assert not places._of_worker and not places._num_mute


def test_streams_that_are_too_many_are_refused_with_the_reason_and_later_ones_served() -> None:
    async def body() -> None:
        limits = StreamPlaces(max_streams=3, max_per_worker=2, max_mute=2)
        async with (
            world(places=limits) as w,
            grpc.aio.insecure_channel(w.peer.address) as channel,
        ):

            def begin() -> Any:
                return KvTransferStub(channel).Control()  # type: ignore[no-untyped-call]

            async def opened(worker_id: str) -> Any:
                """A stream, once its worker is welcome."""
                said = hello()
                said.worker_id = worker_id
                call = begin()
                with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # what it is told says why
                    await call.write(pb.ControlRequest(hello=said))
                assert (await call.read()).WhichOneof("message") == "welcome"
                return call

            async def refused(worker_id: str) -> str:
                with pytest.raises(grpc.aio.AioRpcError) as e:
                    await opened(worker_id)
                assert e.value.code() is grpc.StatusCode.FAILED_PRECONDITION
                return str(e.value.details())

            mute = [begin() for _ in range(2)]
            await eventually(lambda: limits._num_mute == 2)
            assert (await refused("a")).startswith("TOO_MANY_STREAMS: ")
            for call in mute:
                call.cancel()
            await eventually(lambda: limits._num_mute == 0)

            streams = [await opened("a"), await opened("a")]
            assert "this process of a has 2" in await refused("a")
            streams.append(await opened("b"))
            w.server.offer("t", 1)
            assert await reason_of(w.start("t", 1).result()) == "TOO_MANY_STREAMS"  # the real decode side reads it
            assert w.server.num_streams == 3
            streams.pop().cancel()
            await eventually(lambda: w.server.num_streams == 2)
            incoming = w.start("t", 1)
            w.server.pages_ready("t", 0, [Ref(4)])
            w.complete("t", 1)
            await incoming.result()
            assert (await w.listener.end_of("t"))[0] is TransferState.COMPLETE
            for call in streams:
                call.cancel()

    run(body())
