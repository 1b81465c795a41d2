"""Bytes and messages that nobody would send: typed errors only, bounded memory, and the neighbours are well afterwards.

Numbers of inputs are in the tests' parameters; the larger ones run with the slow tests.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from itertools import chain
from typing import Any

import pytest
import xxhash
from google.protobuf.message import DecodeError, Message

from pdserve.core.clock import MonotonicClock
from pdserve.core.errors import TransferError
from pdserve.kvtransfer import wire
from pdserve.kvtransfer.control_server import TransferServer
from pdserve.kvtransfer.fake import FakePageSink, FakePageSource
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.tcp import TcpPageSink, TcpPageSource
from pdserve.kvtransfer.timeline import TransferResult
from pdserve.kvtransfer.transport import SourcePageRef
from pdserve.v1 import kvtransfer_pb2 as pb

from .accounts import Borrower, Lender, content
from .fuzzing import inputs, memory_limit, mutated
from .scripted import SCRIPTED, Refused, ScriptedDecode, ScriptedPrefill, fake_hello, scripted_client, welcome
from .world import DIGEST, INCARNATION, PROMPT_DIGEST, SMALL, eventually, fill, run

REFS = [SourcePageRef(i, 1, 7 + i) for i in range(40)]
FRAMES = (
    wire.encode_hello(b"t" * 16, DIGEST),
    wire.encode_get("t", REFS[:1]),
    wire.encode_get("a transfer of forty pages", REFS),
    wire.encode_page(wire.PageHeader(3, 1, 77, 1024)),
    wire.encode_end(3),
    wire.encode_err(wire.ErrCode.ERR_STALE, "transfer unknown or ended"),
)
FRAME_LIMIT_BYTES = 256 << 10
"""One frame: 8 KiB of body at most, as Python objects."""


def decode_frame(raw: bytes) -> None:
    """What both ends do with what arrives."""
    frame = wire.decode_header(raw[: wire.HEADER_BYTES])
    if isinstance(frame, wire.GetHeader):
        assert frame.body_bytes <= wire.MAX_TRANSFER_ID_BYTES + 8 * wire.MAX_GET_PAGES
        body = raw[wire.HEADER_BYTES : wire.HEADER_BYTES + frame.body_bytes]
        transfer_id, asks = wire.decode_get_body(frame, body)
        again = wire.encode_get(transfer_id, [SourcePageRef(page, generation, 0) for page, generation in asks])
        assert again == raw[: len(again)], "two encodings of one ask"


@pytest.mark.parametrize(
    "number", [20_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_any_bytes_are_a_frame_or_a_typed_error(number: int) -> None:
    rng, refused, every = random.Random(5), 0, 1 if number > 100_000 else 10
    for i in range(number // 1000):
        batch = list(inputs(rng, FRAMES, 1000))
        with memory_limit(FRAME_LIMIT_BYTES) if i % every == 0 else nullcontext():  # it takes six times as long
            for raw in batch:
                try:
                    decode_frame(raw)
                except TransferError as e:
                    assert e.reason == "BAD_FRAME"
                    refused += 1
    assert 0.5 * number < refused < 0.99 * number


# ---- the data plane's sockets ----------------------------------------------------------------------------------------

MANY_CONNECTIONS = [150, pytest.param(5000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]


@pytest.mark.parametrize("number", MANY_CONNECTIONS)
def test_a_source_outlives_any_bytes(number: int) -> None:
    def say(address: str, raw: bytes) -> None:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=10) as sock, suppress(ConnectionError):
            sock.sendall(raw)
            with suppress(OSError):  # it may be closed already
                sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass

    async def body() -> None:
        rng, there, here = random.Random(6), KvPool(SMALL, 16), KvPool(SMALL, 16)
        fill(there)
        source, sink = TcpPageSource(there, DIGEST), TcpPageSink(here, DIGEST)
        token = source.new_reader()
        pages = [SourcePageRef(i, 1, xxhash.xxh3_64_intdigest(there.page(i))) for i in range(16)]
        source.publish("t", token, pages)
        greeting = wire.encode_hello(token, DIGEST)
        asks = [wire.encode_get("t", pages), wire.encode_get("u", pages), wire.encode_end(1), greeting]
        for raw in inputs(rng, asks, number):
            await asyncio.to_thread(
                say, source.address, greeting + raw if rng.random() < 0.8 else mutated(rng, greeting)
            )
        await sink.pull(source.address, token, "t", pages, range(16))
        assert here.buffer == there.buffer
        await sink.close()
        await eventually(lambda: source.num_connections == 0)
        source.close()

    run(body(), 600)


@contextmanager
def answering(answers: Iterator[bytes]) -> Iterator[str]:
    """A peer that answers one ask per connection, each with the next bytes."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:

        def serve() -> None:
            for answer in answers:
                with listener.accept()[0] as sock, suppress(OSError):
                    sock.settimeout(10)
                    sock.recv(4096)
                    sock.sendall(answer)
                    sock.shutdown(socket.SHUT_WR)
                    sock.recv(4096)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize("number", MANY_CONNECTIONS)
def test_a_sink_writes_its_destinations_only_whatever_is_answered(number: int) -> None:
    async def body() -> None:
        rng, there, here = random.Random(7), KvPool(SMALL, 4), KvPool(SMALL, 4)
        fill(there)
        pages = [SourcePageRef(i, 1, xxhash.xxh3_64_intdigest(there.page(i))) for i in range(2)]
        headers = [wire.encode_page(wire.PageHeader(p.page_id, 1, p.checksum, SMALL.page_bytes)) for p in pages]
        right = headers[0] + bytes(there.page(0)) + headers[1] + bytes(there.page(1)) + wire.encode_end(2)
        heads = [right[: wire.HEADER_BYTES], right[-wire.HEADER_BYTES :]]
        wrong = (
            mutated(rng, rng.choice(heads)) + right[64:] if rng.random() < 0.5 else mutated(rng, right)
            for _ in range(number)
        )
        untouched = bytes(here.page(0)) + bytes(here.page(3))
        sink = TcpPageSink(here, DIGEST)
        with answering(wrong) as address:
            for _ in range(number):
                try:
                    await sink.pull(address, b"t" * 16, "t", pages, [1, 2])
                except TransferError as e:
                    assert e.reason in (
                        "BAD_FRAME",
                        "PEER_GONE",
                        "CORRUPT_PAGE",
                        "ERR_STALE",
                        "ERR_BUSY",
                        "ERR_BAD_FRAME",
                    )
                else:
                    assert here.page(1) == there.page(0) and here.page(2) == there.page(1)
        assert untouched == bytes(here.page(0)) + bytes(here.page(3))
        await sink.close()

    run(body(), 600)


# ---- the control stream ----------------------------------------------------------------------------------------------

MANY_MESSAGES = [5_000, pytest.param(200_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]


def readable(kind: type[Message], rng: random.Random, valid: list[Any], number: int) -> Iterator[Any]:
    """Messages that the library can read; what it cannot never reaches us. Some are left as they are."""
    while number:
        raw = rng.choice(valid).SerializeToString()
        message = kind()
        with suppress(DecodeError):
            message.ParseFromString(raw if rng.random() < 0.1 else mutated(rng, raw))
            yield message
            number -= 1


@asynccontextmanager
async def prefill(**options: Any) -> AsyncIterator[tuple[TransferServer, Lender]]:
    """Prefill's control side over a fake plane."""
    memory = KvPool(SMALL, 32)
    lender = Lender(memory, "p")
    server = TransferServer(
        memory=memory,
        sources={"fake": FakePageSource(memory)},
        layout=SMALL,
        identity_digest=DIGEST,
        incarnation=INCARNATION,
        listener=lender,
        clock=MonotonicClock(),
        **options,
    )
    await server.start()
    yield server, lender
    await server.stop()
    assert server.num_leases == server.num_streams == 0 and lender.even


@pytest.mark.parametrize("number", MANY_MESSAGES)
def test_prefill_takes_any_message(number: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def body() -> None:
        rng = random.Random(8)
        async with prefill() as (server, lender):
            for round_number in range(number // 500):
                ids = [f"{round_number}-{i}" for i in range(4)]
                for transfer_id in ids:
                    server.offer(transfer_id, 4)
                    server.pages_ready(transfer_id, 0, lender.lend(transfer_id, 4))
                    server.complete(transfer_id, num_tokens=32, token_id=1, index=0, prompt_digest=PROMPT_DIGEST)
                valid = [
                    *(pb.ControlRequest(open=pb.OpenTransfer(transfer_id=t, num_cached_pages=1)) for t in ids),
                    *(pb.ControlRequest(close=pb.CloseTransfer(transfer_id=t, outcome=2, reason="X")) for t in ids),
                    pb.ControlRequest(renew=pb.RenewTransfers(transfer_ids=ids)),
                    pb.ControlRequest(hello=fake_hello()),
                ]
                said = readable(pb.ControlRequest, rng, valid, 500)
                decode = ScriptedDecode(chain([pb.ControlRequest(hello=fake_hello())], said))
                await decode.run(server)
                assert decode.num_said == 501, "the stream ended early"
                for transfer_id in ids:
                    server.close(transfer_id, "ABORTED")
                await lender.until(lambda: lender.even)

    run(body(), 600)
    assert "by a fault of this process" not in caplog.text, "a message ended the stream"


def test_prefill_refuses_any_wrong_hello_with_a_reason() -> None:
    async def body() -> None:
        rng, reasons = random.Random(9), set()
        async with prefill() as (server, _):
            deep = fake_hello()
            deep.layout = "[" * 60_000
            long = fake_hello()
            long.layout = f"[{'1,' * 200_000}1]"
            for message in chain([deep, long], readable(pb.TransferHello, rng, [fake_hello()], 2000)):
                try:
                    await ScriptedDecode([pb.ControlRequest(hello=message)]).run(server)
                except Refused as e:
                    assert e.code.name == "FAILED_PRECONDITION"
                    reasons.add(e.details.partition(":")[0])
        assert reasons == {"PROTOCOL_VERSION", "INCARNATION", "IDENTITY", "LAYOUT", "BAD_LAYOUT", "TRANSPORT"}

    run(body(), 60)


UNKNOWN_LIMIT_BYTES = 12 << 20


@pytest.mark.parametrize("number", [5_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_unknown_ids_take_bounded_memory(number: int) -> None:
    """Opens, renewals and ends of transfers that nobody offered, from a peer that reads its answers."""

    def flood() -> Iterator[pb.ControlRequest]:
        yield pb.ControlRequest(hello=fake_hello())
        for i in range(number // 3):
            yield pb.ControlRequest(open=pb.OpenTransfer(transfer_id=f"unknown {i:0100d}"))
            yield pb.ControlRequest(close=pb.CloseTransfer(transfer_id=f"strange {i}"))
            yield pb.ControlRequest(renew=pb.RenewTransfers(transfer_ids=[f"alien {i} {k}" for k in range(3)]))

    async def body() -> None:
        async with prefill() as (server, lender):
            with memory_limit(UNKNOWN_LIMIT_BYTES):
                decode = ScriptedDecode(flood())
                await decode.run(server)
            assert decode.num_said >= number - 2
            assert decode.num_heard > number // 3 - 6000, "it was not told that they are unknown"
            assert server.num_leases == 0 and lender.opened == []

    run(body(), 800)


@pytest.mark.parametrize("number", MANY_MESSAGES)
def test_decode_takes_any_message(number: int) -> None:
    failures = list[dict[str, Any]]()

    async def one_round(rng: random.Random, round_number: int) -> None:
        there, here = KvPool(SMALL, 16), KvPool(SMALL, 16)
        source, lender = FakePageSource(there), Lender(there, "p")
        token = source.new_reader()
        valid: list[pb.ControlResponse] = []
        mine: dict[str, set[bytes]] = {}
        for name in ("a", "b", "c"):
            refs = [
                SourcePageRef(r.page_id, r.generation, xxhash.xxh3_64_intdigest(bytes(there.page(r.page_id))))
                for r in lender.lend(name, 3)
            ]
            source.publish(name, token, refs)
            mine[name] = {content("p", r.page_id, r.generation, SMALL.page_bytes) for r in refs}
            pages = [pb.SourcePage(page_id=r.page_id, generation=r.generation, checksum=r.checksum) for r in refs]
            manifest = pb.Manifest(
                transfer_id=name, num_pages=3, num_tokens=24, token_id=9, index=0, prompt_digest=PROMPT_DIGEST
            )
            valid += [
                pb.ControlResponse(watermark=pb.Watermark(transfer_id=name, first_page=0, pages=pages[:1])),
                pb.ControlResponse(watermark=pb.Watermark(transfer_id=name, first_page=1, pages=pages[1:])),
                pb.ControlResponse(manifest=manifest),
            ]
        valid.append(pb.ControlResponse(closed=pb.TransferClosed(transfer_id="a", reason="X")))
        over = asyncio.Event()
        greeting = welcome(data_address=source.address, data_token=token, transport="fake")
        said = chain([greeting], readable(pb.ControlResponse, rng, valid, 100))
        sink = FakePageSink(here, [source], MonotonicClock())
        client = scripted_client(sink, ScriptedPrefill(said, over.set), "fake")
        borrower = Borrower(client, sink, here, SCRIPTED)
        loans = {name: borrower.borrow(name, 3) for name in mine}
        await asyncio.wait_for(over.wait(), 20)
        for name, loan in loans.items():
            await loan.incoming.abort()
            end = await loan.end()
            if isinstance(end, TransferResult):
                assert end.finished or set(loan.received) <= mine[name], "a page of another transfer"
            else:
                assert end.reason not in ("CONTROL_FAILED", "SINK_FAILED")
        await client.close()
        assert borrower.even and client.num_open == 0

    async def body() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        rng = random.Random(10)
        for i in range(number // 100):
            await one_round(rng, i)

    run(body(), 600)
    assert not failures, failures[0]
