"""Control messages that come twice, out of their order, or make no sense."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import xxhash

from pdserve.core.clock import MonotonicClock
from pdserve.core.errors import TransferError
from pdserve.kvtransfer.control_server import TransferServer
from pdserve.kvtransfer.fake import FakePageSource
from pdserve.kvtransfer.handoff import TransferState
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.tcp import TcpPageSink
from pdserve.kvtransfer.timeline import TransferResult
from pdserve.kvtransfer.transport import SourcePageRef
from pdserve.v1 import kvtransfer_pb2 as pb

from .accounts import Borrower, Lender, assert_received
from .planes import PATIENT_S, PLANES, Plane, planes
from .scripted import SCRIPTED, ScriptedDecode, ScriptedPrefill, fake_hello, scripted_client, welcome
from .world import DIGEST, INCARNATION, PROMPT_DIGEST, SMALL, Ref, eventually, hello, run, world

NUM_PAGES = 4


async def told(plane: Plane, order: Sequence[int]) -> str:
    """One transfer whose watermarks (0 to 3) and manifest (4) come in this order; how it ended."""
    there, here = KvPool(SMALL, 8), KvPool(SMALL, 8)
    source, lender = plane.source(there, 0), Lender(there, "p")
    token, lent = source.new_reader(), lender.lend("t", NUM_PAGES)
    refs = [
        SourcePageRef(r.page_id, r.generation, xxhash.xxh3_64_intdigest(bytes(there.page(r.page_id)))) for r in lent
    ]
    source.publish("t", token, refs)
    messages: list[pb.ControlResponse] = []
    for i, ref in enumerate(refs):
        page = pb.SourcePage(page_id=ref.page_id, generation=ref.generation, checksum=ref.checksum)
        messages.append(pb.ControlResponse(watermark=pb.Watermark(transfer_id="t", first_page=i, pages=[page])))
    manifest = pb.Manifest(transfer_id="t", num_pages=4, num_tokens=32, token_id=9, prompt_digest=PROMPT_DIGEST)
    messages.append(pb.ControlResponse(manifest=manifest))
    greeting = welcome(data_address=source.address, data_token=token, transport=plane.name)
    over = asyncio.Event()
    sink = plane.sink(here, [source], PATIENT_S)
    client = scripted_client(sink, ScriptedPrefill([greeting, *(messages[i] for i in order)], over.set), plane.name)
    borrower = Borrower(client, sink, here, SCRIPTED)
    loan = borrower.borrow("t", NUM_PAGES)
    try:
        end = await loan.end()
        assert borrower.even
        if isinstance(end, TransferResult):
            assert_received(loan, "p", lent)
            return "COMPLETE"
        return end.reason
    finally:
        await client.close()
        await source.withdraw("t")
        source.close()


@planes(PLANES)
def test_messages_twice_or_out_of_order_never_give_a_wrong_page(plane: Plane) -> None:
    async def body() -> None:
        assert await told(plane, [0, 0, 1, 0, 1, 2, 2, 3, 1, 3, 4, 4]) == "COMPLETE", "late ones are dropped"
        rng, ends = random.Random(4), set[str]()
        for _ in range(25 if plane.sees_asks else 8):  # a library takes its time to begin and to end
            order = [0, 1, 2, 3, 4] * rng.randint(1, 2)
            rng.shuffle(order)
            ends.add(await told(plane, order))
        assert ends <= {"COMPLETE", "BAD_WATERMARK", "PAGES_MISSING"} and len(ends) >= 2

    run(body(), 60)


@pytest.mark.parametrize("outcome", [pb.TRANSFER_OUTCOME_COMPLETE, pb.TRANSFER_OUTCOME_ABORTED])
def test_what_decode_says_twice_counts_once(outcome: pb.TransferOutcome) -> None:
    async def body() -> None:
        memory = KvPool(SMALL, 8)
        lender = Lender(memory, "p")
        server = TransferServer(
            memory=memory,
            sources={"fake": FakePageSource(memory)},
            layout=SMALL,
            identity_digest=DIGEST,
            incarnation=INCARNATION,
            listener=lender,
            clock=MonotonicClock(),
        )
        refs = lender.lend("t", 2)
        server.offer("t", 2)
        server.pages_ready("t", 0, refs)
        open_it = pb.ControlRequest(open=pb.OpenTransfer(transfer_id="t"))
        renew = pb.ControlRequest(renew=pb.RenewTransfers(transfer_ids=["t", "t"]))
        close = pb.ControlRequest(close=pb.CloseTransfer(transfer_id="t", outcome=outcome, reason="X"))
        said = [pb.ControlRequest(hello=fake_hello()), open_it, open_it, renew, renew, open_it, close, close, renew]
        decode = ScriptedDecode(said)
        await decode.run(server)
        assert lender.opened == ["t"]
        state, _ = await lender.end_of("t")
        assert state is {1: TransferState.COMPLETE, 2: TransferState.ABORTED}[outcome] and lender.even
        closed = [m.closed.transfer_id for m in decode.heard if m.WhichOneof("message") == "closed"]
        assert closed == [], "an open that came twice is no unknown transfer"
        await server.stop()

    run(body())


def test_a_transfer_that_one_stream_has_opened_is_not_given_to_another() -> None:
    async def body() -> None:
        async with world() as w:
            w.server.offer("t", 1)
            w.start("t", 1)
            await w.listener.until(lambda: w.listener.opened == ["t"])
            thief = ScriptedDecode(
                [pb.ControlRequest(hello=hello()), pb.ControlRequest(open=pb.OpenTransfer(transfer_id="t"))]
            )
            await thief.run(w.server)
            assert w.listener.opened == ["t"] and w.server.num_leases == 1
            w.server.pages_ready("t", 0, [Ref(3)])
            w.complete("t", 1)
            assert (await w.listener.end_of("t"))[0] is TransferState.COMPLETE

    run(body())


@pytest.mark.parametrize(
    ("wrong", "reasons"),
    [
        ({"lease_ms": 0}, {"BAD_WELCOME"}),  # decode would renew without a pause
        ({"integrity": "crc"}, {"BAD_WELCOME"}),
        ({"data_token": b""}, {"BAD_WELCOME"}),
        ({"data_token": bytes(100_000)}, {"BAD_WELCOME"}),
        ({"protocol_version": 0}, {"PROTOCOL_VERSION"}),
        ({"protocol_version": 2**32 - 1}, {"PROTOCOL_VERSION"}),
        ({"data_address": ""}, {"BAD_ADDRESS"}),
        ({"data_address": "\0:1"}, {"BAD_ADDRESS", "PEER_GONE"}),
        ({"data_address": "127.0.0.1:-1"}, {"BAD_ADDRESS", "PEER_GONE"}),
        ({"data_address": "127.0.0.1:65536"}, {"BAD_ADDRESS", "PEER_GONE"}),
        ({"data_address": "127.0.0.1:" + "9" * 30}, {"BAD_ADDRESS"}),
        ({"data_address": "127.0.0.1:" + "9" * 5000}, {"BAD_ADDRESS"}),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_welcome_that_makes_no_sense_fails_its_transfers_with_a_reason(
    wrong: dict[str, Any], reasons: set[str]
) -> None:
    failures = list[dict[str, Any]]()

    async def body() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        here = KvPool(SMALL, 4)
        page = pb.SourcePage(page_id=0, generation=1, checksum=5)
        watermark = pb.ControlResponse(watermark=pb.Watermark(transfer_id="t", pages=[page]))
        sink = TcpPageSink(here, DIGEST)
        client = scripted_client(sink, ScriptedPrefill([welcome(**wrong), watermark]))
        borrower = Borrower(client, sink, here, SCRIPTED)
        assert await borrower.borrow("t", 1).reason() in reasons
        await client.close()
        assert borrower.even

    run(body())
    assert not failures, failures[0]


def test_a_transfer_id_in_use_is_refused_and_the_first_goes_on() -> None:
    async def body() -> None:
        async with world() as w:
            w.server.offer("t", 1)
            incoming = w.start("t", 1)
            for again in (lambda: w.server.offer("t", 1), lambda: w.start("t", 1, first=5)):
                with pytest.raises(TransferError) as e:
                    again()
                assert e.value.reason == "DUPLICATE_TRANSFER"
            w.server.pages_ready("t", 0, [Ref(3)])
            w.complete("t", 1)
            await incoming.result()
            assert w.decode.page(0) == w.prefill.page(3) and not any(w.decode.page(5))

    run(body())


def test_what_a_decode_worker_says_is_not_kept_at_any_length() -> None:
    """Answers wait in memory until they are read, and how transfers ended is remembered."""

    async def body() -> None:
        async with world() as w:
            w.server.offer("t", 1)
            long = "X" * 1_000_000
            said = [
                pb.ControlRequest(hello=hello()),
                pb.ControlRequest(open=pb.OpenTransfer(transfer_id=long)),
                pb.ControlRequest(open=pb.OpenTransfer(transfer_id="t")),
                pb.ControlRequest(
                    close=pb.CloseTransfer(transfer_id="t", outcome=pb.TRANSFER_OUTCOME_FAILED, reason=long)
                ),
            ]
            decode = ScriptedDecode(said)
            await decode.run(w.server)
            assert await w.listener.end_of("t") == (TransferState.FAILED, "FAILED")
            assert all(m.ByteSize() < 10_000 for m in decode.heard)
            assert sum(map(len, w.server._ended.values())) < 100

    run(body())


@pytest.mark.parametrize(
    ("told", "reason"), [("ABORTED", "ABORTED"), ("", "CLOSED"), ("no word\n", "CLOSED"), ("X" * 100_000, "CLOSED")]
)
def test_a_reason_that_is_no_word_is_replaced(told: str, reason: str) -> None:
    async def body() -> None:
        here = KvPool(SMALL, 4)
        sink = TcpPageSink(here, DIGEST)
        end = pb.ControlResponse(closed=pb.TransferClosed(transfer_id="t", reason=told))
        client = scripted_client(sink, ScriptedPrefill([welcome(), end]))
        assert await Borrower(client, sink, here, SCRIPTED).borrow("t", 1).reason() == reason
        await client.close()

    run(body())


def test_pages_that_were_hashed_too_late_are_not_those_of_the_next_transfer_of_that_id() -> None:
    async def body() -> None:
        gate = threading.Event()
        hashers = ThreadPoolExecutor(1)
        async with world(hashers=hashers) as w:
            hashers.submit(gate.wait, 20)
            w.server.offer("t", 1)
            w.server.pages_ready("t", 0, [Ref(3)])
            w.server.close("t", "ABORTED")
            await w.listener.end_of("t")
            del w.listener.ended["t"]
            w.server.offer("t", 1)
            incoming = w.start("t", 1)
            await w.listener.until(lambda: w.listener.opened == ["t"])
            gate.set()
            w.server.pages_ready("t", 0, [Ref(5)])
            w.complete("t", 1)
            await incoming.result()
            assert w.decode.page(0) == w.prefill.page(5)

    run(body())


class Deaf(ScriptedPrefill):
    """Takes no renewal before `hears`."""

    def __init__(self) -> None:
        super().__init__([welcome()])
        self.hears = asyncio.Event()

    async def write(self, message: pb.ControlRequest) -> None:
        if message.WhichOneof("message") == "renew":
            await self.hears.wait()
        await super().write(message)


class Hasty(MonotonicClock):
    """A hundred short sleeps end at once, then `over` is set and the next ones last; long ones always do."""

    def __init__(self) -> None:
        self.num_left, self.over = 100, asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        self.num_left -= 1
        if self.num_left <= 0:
            self.over.set()
        if self.num_left <= 0 or seconds > 1000:
            await asyncio.Event().wait()
        await asyncio.sleep(0)


def test_renewals_for_a_prefill_worker_that_reads_nothing_do_not_pile_up() -> None:
    async def body() -> None:
        here, channel, clock = KvPool(SMALL, 4), Deaf(), Hasty()
        sink = TcpPageSink(here, DIGEST)
        client = scripted_client(sink, channel)
        client.clock, client.peer_timeout_s = clock, 1e6
        loan = Borrower(client, sink, here, SCRIPTED).borrow("t", 1)
        await asyncio.wait_for(clock.over.wait(), 10)
        await loan.incoming.abort()
        channel.hears.set()
        await eventually(lambda: channel.heard[-1].WhichOneof("message") == "close")
        renewed = [list(m.renew.transfer_ids) for m in channel.heard if m.WhichOneof("message") == "renew"]
        assert renewed[0] == ["t"] and len(renewed) <= 2
        await loan.end()
        await client.close()

    run(body())
