"""Transfers end to end on loopback: order of messages, refusals, ends from either side."""

from __future__ import annotations

import asyncio
from itertools import permutations

import grpc.aio
import pytest

from pdserve.core.clock import MonotonicClock
from pdserve.core.errors import PdserveError, TransferError
from pdserve.core.layout import KVLayout
from pdserve.kvtransfer.fake import FakePageSink, FakePageSource
from pdserve.kvtransfer.handoff import TransferState
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.tcp import TcpPageSource
from pdserve.v1 import kvtransfer_pb2 as pb
from pdserve.v1.kvtransfer_pb2_grpc import KvTransferStub

from .world import DIGEST, LAYOUT, SMALL, Ref, eventually, hello, run, world

PLANES = pytest.mark.parametrize("plane", ["tcp", "shm"])


@PLANES
def test_pages_arrive_whole_while_the_prompt_is_computed(plane: str) -> None:
    async def body() -> None:
        async with world(layout=LAYOUT, offered=(plane,), wanted=(plane,)) as w:
            w.server.offer("t", 6)
            incoming = w.start("t", 6, num_cached=1, first=8)
            await w.listener.until(lambda: "t" in w.listener.opened)
            w.server.pages_ready("t", 0, [Ref(3), Ref(1)])
            w.server.pages_ready("t", 2, [Ref(0), Ref(9)])
            w.server.pages_ready("t", 4, [Ref(5), Ref(7)])
            w.complete("t", 6)
            result = await incoming.result()
            assert (result.token_id, result.index, result.finished, result.num_pages) == (42, 0, False, 5)
            assert bytes(w.decode.page(8)) == bytes(LAYOUT.page_bytes), "a cached page was written"
            for position, source in ((1, 1), (2, 0), (3, 9), (4, 5), (5, 7)):
                assert w.decode.page(8 + position) == w.prefill.page(source)
            assert 5 * LAYOUT.page_bytes <= result.bytes_on_wire <= 5 * LAYOUT.page_bytes * 1.02
            assert 0.0 <= result.hidden_s <= result.transfer_s
            ends = [1, *(r.first_page + r.num_pages for r in result.ranges)]
            assert [r.first_page for r in result.ranges] == ends[:-1] and ends[-1] == 6, "no page twice, none left out"
            assert sum(r.num_bytes for r in result.ranges) == result.bytes_on_wire
            assert all(r.announced_s <= r.began_s <= r.verified_s for r in result.ranges)
            assert 0.0 <= result.pull_hidden_s <= result.pull_s
            assert await w.listener.end_of("t") == (TransferState.COMPLETE, "COMPLETE")

    run(body())


ORDERS = [
    order
    for order in permutations(("offer", "open", "pages", "complete"))
    if order.index("offer") < order.index("pages") < order.index("complete")
]


@pytest.mark.parametrize("order", ORDERS)
def test_any_order_of_offer_open_pages_and_complete(order: tuple[str, ...]) -> None:
    async def body() -> None:
        async with world() as w:
            probe = w.start("probe", 1)  # a later answer proves that earlier messages were read
            incoming = None
            for step in order:
                if step == "offer":
                    w.server.offer("t", 3)
                elif step == "open":
                    incoming = w.start("t", 3)
                    probe_id = "probe2"
                    w.server.offer(probe_id, 1)
                    w.start(probe_id, 1)
                    await w.listener.until(lambda: "probe2" in w.listener.opened)
                elif step == "pages":
                    w.server.pages_ready("t", 0, [Ref(2), Ref(4), Ref(6)])
                else:
                    w.complete("t", 3)
            assert incoming is not None
            assert (await incoming.result()).num_pages == 3
            assert [bytes(w.decode.page(i)) for i in range(3)] == [bytes(w.prefill.page(i)) for i in (2, 4, 6)]
            assert (await w.listener.end_of("t"))[0] is TransferState.COMPLETE
            await probe.abort()

    run(body())


def test_a_finished_request_pulls_nothing_more() -> None:
    async def body() -> None:
        async with world() as w:
            w.server.offer("t", 3)
            incoming = w.start("t", 3)
            w.complete("t", 3, finished=True)
            result = await incoming.result()
            assert result.finished and result.num_pages == 0 and result.token_id == 42
            assert (await w.listener.end_of("t"))[0] is TransferState.COMPLETE

    run(body())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"decode_digest": bytes(32)}, "IDENTITY"),
        (
            {
                "decode_layout": KVLayout.uniform(
                    num_layers=1, num_kv_heads=1, head_dim=16, page_size=4, dtype="float32"
                )
            },
            "LAYOUT",
        ),
        ({"expected_incarnation": "zz"}, "INCARNATION"),
        ({"integrity": "none"}, "INTEGRITY"),
        ({"integrity": "crc"}, "BAD_WELCOME"),
    ],
)
def test_a_pair_that_does_not_fit_is_refused_with_the_reason(options: dict[str, object], reason: str) -> None:
    async def body() -> None:
        async with world(**options) as w:  # type: ignore[arg-type]
            incoming = w.start("t", 2)
            with pytest.raises(TransferError) as e:
                await incoming.result()
            assert e.value.reason == reason
            await eventually(lambda: w.server.num_streams == 0)

    run(body())


@PLANES
def test_without_checksums_pages_arrive_where_decode_agrees(plane: str) -> None:
    async def body() -> None:
        async with world(integrity="none", decode_integrity="none", offered=(plane,), wanted=(plane,)) as w:
            w.server.offer("t", 2)
            incoming = w.start("t", 2)
            w.server.pages_ready("t", 0, [Ref(3), Ref(5)])
            w.complete("t", 2)
            await incoming.result()
            assert [bytes(w.decode.page(i)) for i in range(2)] == [bytes(w.prefill.page(i)) for i in (3, 5)]

    run(body())


def test_a_page_without_checksum_is_not_taken_where_they_were_promised() -> None:
    async def body() -> None:
        async with world() as w:
            w.server.offer("t", 2)
            incoming = w.start("t", 2)
            await w.listener.until(lambda: "t" in w.listener.opened)
            w.server._checksums.integrity = "none"  # after its welcome said host
            w.server.pages_ready("t", 0, [Ref(3)])
            with pytest.raises(TransferError) as e:
                await incoming.result()
            assert e.value.reason == "NO_CHECKSUM"
            assert not any(w.decode.buffer)

    run(body())


def test_a_shared_page_that_somebody_wrote_into_fails_who_takes_it_next() -> None:
    """Prompts that begin alike share a page; it is announced with the sum of what it held when it became final."""

    async def body() -> None:
        async with world() as w:
            for i, (generation, reason) in enumerate([(1, ""), (1, "CORRUPT_PAGE"), (2, "")]):
                w.server.offer(f"t{i}", 2)
                incoming = w.start(f"t{i}", 2)
                w.server.pages_ready(f"t{i}", 0, [Ref(3, generation), Ref(4 + i)])
                w.complete(f"t{i}", 2)
                if reason:
                    with pytest.raises(TransferError) as e:
                        await incoming.result()
                    assert e.value.reason == reason
                else:
                    await incoming.result()
                    assert w.decode.page(0) == w.prefill.page(3)
                await w.listener.end_of(f"t{i}")
                w.prefill.page(3)[5] ^= 1

    run(body())


def test_a_failed_task_of_the_server_is_told_to_its_owner() -> None:
    async def body() -> None:
        failures = list[PdserveError]()
        async with world(fail=failures.append) as w:
            w.server.offer("t", 1)
            w.server.pages_ready("t", 0, [Ref(999)])  # there is no such page
            await eventually(lambda: bool(failures))
            assert "IndexError" in failures[0].message

    run(body())


def test_a_manifest_that_does_not_match_fails_the_transfer() -> None:
    async def body() -> None:
        async with world() as w:
            w.server.offer("t", 2)
            incoming = w.start("t", 2)
            w.server.pages_ready("t", 0, [Ref(0), Ref(1)])
            w.complete("t", 2, digest=b"\1" * 32)
            with pytest.raises(TransferError, match="MANIFEST_MISMATCH"):
                await incoming.result()
            assert await w.listener.end_of("t") == (TransferState.FAILED, "MANIFEST_MISMATCH")

    run(body())


def test_a_lease_ends_when_nobody_renews_it_and_not_before() -> None:
    async def body() -> None:
        async with world(lease_s=0.5) as w:
            w.server.offer("dead", 1)  # nobody opens it
            w.server.pages_ready("dead", 0, [Ref(0)])
            w.complete("dead", 1)
            assert await w.listener.end_of("dead") == (TransferState.EXPIRED, "LEASE_EXPIRED")

            w.server.offer("mute", 1)
            async with grpc.aio.insecure_channel(w.peer.address) as channel:
                call = KvTransferStub(channel).Control()  # type: ignore[no-untyped-call]
                await call.write(pb.ControlRequest(hello=hello()))
                await call.write(pb.ControlRequest(open=pb.OpenTransfer(transfer_id="mute")))
                await w.listener.until(lambda: "mute" in w.listener.opened)
                w.server.pages_ready("mute", 0, [Ref(0)])
                w.complete("mute", 1)
                assert await w.listener.end_of("mute") == (TransferState.EXPIRED, "LEASE_EXPIRED")
                seen = []
                while (message := await call.read()).WhichOneof("message") != "closed":
                    seen.append(message.WhichOneof("message"))
                assert [kind for kind in seen if kind != "heartbeat"] == ["welcome", "watermark", "manifest"]
                assert message.closed.reason == "LEASE_EXPIRED"

    run(body())


class Told(MonotonicClock):
    """A clock that goes when it is told to; its sleeps are those of the machine."""

    at_s = 0.0

    def now(self) -> float:
        return self.at_s


class Held(MonotonicClock):
    """A clock on which nobody's sleep ends before `go`."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        await self.go.wait()


def test_decode_keeps_the_lease_of_a_slow_pull_alive() -> None:
    async def body() -> None:
        sources: list[FakePageSource] = []
        prefill, pulling = Told(), Held()

        def source_of(pool: KvPool) -> FakePageSource:
            sources.append(FakePageSource(pool))
            return sources[0]

        def sink_of(pool: KvPool) -> FakePageSink:
            return FakePageSink(pool, sources, pulling)

        async with world(lease_s=0.5, prefill_clock=prefill, source_of=source_of, sink_of=sink_of) as w:
            w.server.offer("t", 1)
            incoming = w.start("t", 1)
            w.server.pages_ready("t", 0, [Ref(4)])
            w.complete("t", 1)

            def is_renewed() -> bool:
                return (w.server._entries["t"].transfer.lease_expires_s or 0.0) >= prefill.at_s + 0.5

            for _ in range(4):  # three times its length in all
                await eventually(is_renewed)
                prefill.at_s += 0.4
                w.server.sweep()
            pulling.go.set()
            await incoming.result()
            assert w.decode.page(0) == w.prefill.page(4)
            assert (await w.listener.end_of("t"))[0] is TransferState.COMPLETE

    run(body())


def test_ten_thousand_unknown_ids_stay_bounded() -> None:
    async def body() -> None:
        async with world(max_pending_opens=100) as w, grpc.aio.insecure_channel(w.peer.address) as channel:
            call = KvTransferStub(channel).Control()  # type: ignore[no-untyped-call]
            await call.write(pb.ControlRequest(hello=hello()))

            async def flood() -> None:
                for i in range(10_000):
                    await call.write(pb.ControlRequest(open=pb.OpenTransfer(transfer_id=f"u{i}")))
                unknown = [f"v{i}" for i in range(10_000)]
                await call.write(pb.ControlRequest(renew=pb.RenewTransfers(transfer_ids=unknown)))

            flooding = asyncio.create_task(flood())
            refused = []
            while len(refused) < 9_900:
                message = await call.read()
                if message.WhichOneof("message") == "closed":
                    assert message.closed.reason == "UNKNOWN_TRANSFER"
                    refused.append(message.closed.transfer_id)
            await flooding
            assert refused == [f"u{i}" for i in range(100, 10_000)]
            assert w.server.num_leases == 0
            w.server.offer("u7", 1)  # one of the hundred that wait is served after all
            assert w.listener.opened == ["u7"]

    run(body())


def test_what_decode_opened_and_closed_before_it_was_offered_ends_when_it_is() -> None:
    async def body() -> None:
        async with world() as w:
            await w.start("t", 1).abort("CANCELLED")
            await eventually(lambda: "t" in w.server._given_up)
            w.server.offer("t", 1)
            assert await w.listener.end_of("t") == (TransferState.ABORTED, "CANCELLED")

    run(body())


def test_a_worker_ends_nothing_that_another_one_opens() -> None:
    async def body() -> None:
        async with world() as w, grpc.aio.insecure_channel(w.peer.address) as channel:
            w.server.offer("offered", 1)
            call = KvTransferStub(channel).Control()  # type: ignore[no-untyped-call]
            await call.write(pb.ControlRequest(hello=hello()))
            await call.write(pb.ControlRequest(open=pb.OpenTransfer(transfer_id="wanted")))
            names = ("offered", "wanted", "unknown")
            for name in names:
                await call.write(pb.ControlRequest(close=pb.CloseTransfer(transfer_id=name, reason="X")))
            await eventually(lambda: w.server.num_late == 2)
            assert list(w.server._given_up) == ["wanted"] and w.server.num_leases == 1
            incoming = [w.start(name, 1, first=i) for i, name in enumerate(names)]
            await eventually(lambda: not w.server._given_up)
            for name in names[1:]:
                w.server.offer(name, 1)
            for i, name in enumerate(names):
                w.server.pages_ready(name, 0, [Ref(i)])
                w.complete(name, 1)
            for one in incoming:
                await one.result()

    run(body())


@PLANES
def test_the_end_of_the_control_stream_ends_its_transfers(plane: str) -> None:
    async def body() -> None:
        async with world(offered=(plane,), wanted=(plane,)) as w:
            for i in range(3):
                w.server.offer(f"t{i}", 2)
                w.start(f"t{i}", 2)
            await w.listener.until(lambda: len(w.listener.opened) == 3)
            await w.client.close()
            for i in range(3):
                assert (await w.listener.end_of(f"t{i}"))[0] in (TransferState.FAILED, TransferState.ABORTED)
            assert w.server.num_leases == 0

    run(body())


@PLANES
def test_a_dead_prefill_fails_its_transfers_and_its_successor_is_reached_again(plane: str) -> None:
    async def body() -> None:
        async with world(offered=(plane,), wanted=(plane,)) as first:
            first.server.offer("t", 2)
            incoming = first.start("t", 2)
            await first.listener.until(lambda: bool(first.listener.opened))
            await first.grpc_server.stop(None)
            with pytest.raises(TransferError) as e:
                await incoming.result()
            assert e.value.reason in ("PEER_LOST", "ABORTED")
            async with world(offered=(plane,), wanted=(plane,)) as second:
                second.server.offer("t2", 1)
                again = first.client.start(
                    "t2",
                    second.peer,
                    num_cached_pages=0,
                    destinations=[5],
                    expected_num_tokens=8,
                    expected_digest=bytes(32),
                )
                second.server.pages_ready("t2", 0, [Ref(9)])
                second.complete("t2", 1)
                await again.result()
                assert first.decode.page(5) == second.prefill.page(9)

    run(body())


def test_pages_out_of_order_are_never_served() -> None:
    async def body() -> None:
        async with world() as w:
            w.server.offer("t", 4)
            incoming = w.start("t", 4)
            w.server.pages_ready("t", 0, [Ref(0), Ref(1)])
            w.server.pages_ready("t", 0, [Ref(2), Ref(3)])  # the engine moved the sequence's pages
            with pytest.raises(TransferError):
                await incoming.result()
            assert await w.listener.end_of("t") == (TransferState.FAILED, "PAGES_OUT_OF_ORDER")

    run(body())


assert SMALL.page_bytes == 1024
assert LAYOUT.page_bytes == 64 << 10


class HeldSource(TcpPageSource):
    """A source whose withdrawals wait for a word."""

    def __init__(self, pool: KvPool) -> None:
        super().__init__(pool, DIGEST)
        self.may_withdraw = asyncio.Event()

    async def withdraw(self, transfer_id: str) -> None:
        await self.may_withdraw.wait()
        await super().withdraw(transfer_id)


def test_an_open_that_meets_a_transfer_being_withdrawn_is_told_why() -> None:
    """Ended, but its pages are not fenced yet: decode must hear of the end all the same."""

    async def body() -> None:
        async with world(source_of=HeldSource) as w:
            assert isinstance(w.source, HeldSource)
            w.server.offer("t", 2)
            first = w.start("t", 2)
            await w.listener.until(lambda: w.listener.opened == ["t"])
            w.server.close("t", "FINISHED")
            for incoming in (first, None):
                with pytest.raises(TransferError) as caught:
                    async with asyncio.timeout(10):
                        await (incoming or w.start("t", 2)).result()
                assert caught.value.reason == "FINISHED"
            assert w.listener.opened == ["t"]
            w.source.may_withdraw.set()
            assert await w.listener.end_of("t") == (TransferState.ABORTED, "FINISHED")

    run(body())
