"""Prefill's end of a control stream on its own: opens that wait for their offer, and a peer that does not read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from pdserve.core.clock import MonotonicClock
from pdserve.kvtransfer.control_messages import closed
from pdserve.kvtransfer.fake import FakePageSource
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.served_stream import MAX_OUTBOX, ServedStream
from pdserve.v1 import kvtransfer_pb2 as pb

from .world import SMALL, eventually, run


def with_stream(body: Callable[[ServedStream], Any], max_waiting: int = 2) -> None:
    """Runs a test over a stream whose source is a fake."""

    async def main() -> None:
        pool = KvPool(SMALL, 1)
        await body(ServedStream("d", "fake", FakePageSource(pool), max_waiting))
        pool.close()

    run(main())


def test_opens_that_wait_are_bounded_and_an_open_that_came_twice_counts_once() -> None:
    async def body(stream: ServedStream) -> None:
        assert stream.wait_for_offer("a", 1, 10.0) and stream.wait_for_offer("b", 0, 11.0)
        assert not stream.wait_for_offer("c", 0, 12.0)
        assert stream.wait_for_offer("a", 3, 12.0), "it waits already, though there is no room for another"
        assert stream.take("a") == 1 and stream.take("a") is None
        assert stream.take("b") == 0, "nothing cached is an open, too"
        assert stream.wait_for_offer("c", 0, 12.0)

    with_stream(body)


def test_opens_that_waited_too_long_are_given_up_and_the_others_wait_on() -> None:
    async def body(stream: ServedStream) -> None:
        for i, transfer_id in enumerate("abc"):
            assert stream.wait_for_offer(transfer_id, 0, 10.0 + i)
        assert stream.take_overdue(9.0) == []
        assert stream.take_overdue(11.0) == ["a", "b"]
        assert stream.take_overdue(11.0) == [] and stream.take("c") == 0

    with_stream(body, max_waiting=3)


def test_a_peer_that_does_not_read_overflows_and_one_that_reads_again_gets_its_answers() -> None:
    async def body(stream: ServedStream) -> None:
        for _ in range(MAX_OUTBOX):
            stream.send(closed("t", "X"))
        assert not stream.overflow.is_set()
        waits = asyncio.create_task(stream.answer(closed("asked", "X")))
        await asyncio.sleep(0)
        assert not waits.done() and not stream.overflow.is_set(), "its own answers do not end a stream"
        stream.send(closed("too many", "X"))
        assert stream.overflow.is_set()

        said = list[pb.ControlResponse]()

        async def write(message: pb.ControlResponse) -> None:
            said.append(message)

        context: Any = SimpleNamespace(write=write)
        writer = asyncio.create_task(stream.write(context, pb.TransferWelcome(lease_ms=7), MonotonicClock(), 3600.0))
        await eventually(lambda: len(said) == MAX_OUTBOX + 2)
        writer.cancel()
        await waits
        assert said[0].welcome.lease_ms == 7
        assert {m.closed.transfer_id for m in said[1:-1]} == {"t"} and said[-1].closed.transfer_id == "asked"

    with_stream(body)
