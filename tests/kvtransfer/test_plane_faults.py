"""The same faults on every data plane. After each: the books of both sides are even, no page holds another's bytes.

A plane is one line of `planes.PLANES`. Where its ends are in two processes the peer is a real one, and is killed,
stopped or cut in the middle of a page. Freed pages are poisoned at once (`accounts`): who reads or writes late is seen.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest
import xxhash

from pdserve.core.errors import TransferError
from pdserve.core.kv_transfer_config import TRANSPORTS
from pdserve.kvtransfer.handoff import TransferState
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.timeline import TransferResult
from pdserve.kvtransfer.transport import PageSink, PageSource, SourcePageRef

from .accounts import Borrower, Lender, Loan, assert_received
from .blackhole import blackhole
from .plane_peer import NUM_PAGES, PlanePeer, plane_peer
from .planes import IDLE_S, PATIENT_S, PLANES, REMOTE_PLANES, Plane, planes
from .world import LAYOUT, SMALL, World, eventually, run, world

every_plane = planes(PLANES)
every_remote_plane = planes(REMOTE_PLANES)
every_asked_plane = planes([plane for plane in PLANES if plane.sees_asks])
GONE = {"PEER_GONE", "PEER_LOST"}
SILENT = {"PULL_IDLE", "PEER_SILENT", "PEER_GONE"}
LONG_LEASE_S = 30.0  # for what is to go well, in a world whose leases are short


def test_every_plane_that_workers_have_by_default_is_here() -> None:
    assert set(TRANSPORTS) <= {plane.name for plane in PLANES}


@dataclass
class Here:
    """Both ends in this process."""

    plane: Plane
    world: World
    lender: Lender
    borrower: Borrower

    def lend(self, transfer_id: str, num_pages: int) -> list[SourcePageRef]:
        """Offers a prompt whose pages are final; it is not computed yet."""
        refs = self.lender.lend(transfer_id, num_pages)
        self.world.server.offer(transfer_id, num_pages)
        self.world.server.pages_ready(transfer_id, 0, refs)
        page = self.world.prefill.page
        return [SourcePageRef(r.page_id, r.generation, xxhash.xxh3_64_intdigest(bytes(page(r.page_id)))) for r in refs]

    async def whole(self, transfer_id: str = "whole", num_pages: int = 3) -> None:
        """A transfer that nothing disturbs goes well."""
        loan = self.borrower.borrow(transfer_id, num_pages)
        refs = self.lender.lend(transfer_id, num_pages)
        self.world.server.offer(transfer_id, num_pages)
        self.world.server.pages_ready(transfer_id, 0, refs)
        self.world.complete(transfer_id, num_pages)
        assert isinstance(await loan.end(), TransferResult)
        assert_received(loan, self.lender.seed, refs)


@asynccontextmanager
async def here(plane: Plane, **options: object) -> AsyncIterator[Here]:
    """A world on one plane, with owners on both sides; at the end both books are even."""
    sources = list[PageSource]()

    def source_of(pool: KvPool) -> PageSource:
        sources.append(plane.source(pool, 0))
        return sources[0]

    def sink_of(pool: KvPool) -> PageSink:
        return plane.sink(pool, sources, PATIENT_S)

    lenders = list[Lender]()

    def listener_of(pool: KvPool) -> Lender:
        lenders.append(Lender(pool, "here"))
        return lenders[0]

    async with world(
        source_of=source_of,
        sink_of=sink_of,
        listener_of=listener_of,
        num_pages=32,
        offered=(plane.name,),
        wanted=(plane.name,),
        **options,  # type: ignore[arg-type]
    ) as w:
        h = Here(plane, w, lenders[0], Borrower(w.client, w.sink, w.decode, w.peer))
        yield h
        await eventually(lambda: h.lender.even and h.borrower.even)
        assert w.server.num_leases == w.client.num_open == 0


@asynccontextmanager
async def across(plane: Plane, peer: PlanePeer, idle_s: float = PATIENT_S) -> AsyncIterator[Borrower]:
    """Decode's side here, prefill's in the peer's process; at the end decode's books are even."""
    async with world(
        layout=LAYOUT,
        num_pages=NUM_PAGES,
        sink_of=lambda pool: plane.sink(pool, (), idle_s),
        wanted=(plane.name,),
        peer_timeout_s=3.0,
    ) as w:
        borrower = Borrower(w.client, w.sink, w.decode, peer.peer)
        yield borrower
        assert borrower.even


async def let_go(borrower: Borrower, loan: Loan) -> None:
    """Aborts; the pages are given back at once, or are in quarantine until the peer goes on."""
    abort = asyncio.create_task(loan.incoming.abort("CLIENT_CANCELLED"))
    sink = borrower.sink
    if sink.capabilities.quiescent_cancel:
        await asyncio.wait_for(abort, 10)
        await loan.end()
        assert borrower.even
    else:
        await eventually(lambda: abort.done() or sink.num_quarantined > 0)  # type: ignore[attr-defined]


# ---- a peer that dies, stands still or is cut ------------------------------------------------------------------------


@every_remote_plane
def test_killed_inside_a_page_and_started_again_at_the_same_address(plane: Plane) -> None:
    async def body() -> None:
        async with plane_peer(plane, "first", halt="wait") as first, across(plane, first) as borrower:
            loan = borrower.borrow("t", 8)
            await first.lend("t", 8)
            if plane.halt is not None:
                await first.heard("halted")
            first.process.kill()
            end = await loan.end()
            if plane.halt is not None:
                assert isinstance(end, TransferError) and end.reason in GONE
            await asyncio.to_thread(first.process.wait, 10)
            assert borrower.even
            async with plane_peer(plane, "second", ports=first.ports) as second:
                assert await borrower.borrow("old", 2, first.peer).reason() == "INCARNATION"
                loan = borrower.borrow("t", 8, second.peer)  # the same transfer id, of another life
                refs = await second.lend("t", 8)
                assert isinstance(await loan.end(), TransferResult)
                assert_received(loan, "second", refs)
                await second.even()

    run(body(), 60)


@pytest.mark.slow
@every_remote_plane
@pytest.mark.parametrize("num_ranges", range(5))
def test_killed_between_the_ranges_of_a_prompt(plane: Plane, num_ranges: int) -> None:
    """What had been pulled by then is of no use, and nobody waits for the rest."""

    async def body() -> None:
        async with plane_peer(plane, "p") as peer, across(plane, peer) as borrower:
            loan = borrower.borrow("t", 8)
            await peer.begin("t", 8)
            for at in range(0, 2 * num_ranges, 2):
                peer.send(f"range t {at} {at + 2}")
            await eventually(lambda: loan.incoming._transfer.num_asked == 2 * num_ranges)
            peer.process.kill()
            assert await loan.reason() in GONE | {"TLS_FAILED"}  # killed in its handshake, as one that has no TLS
            assert borrower.even

    run(body(), 60)


@every_remote_plane
def test_stopped_inside_a_page_and_resumed(plane: Plane) -> None:
    async def body() -> None:
        async with plane_peer(plane, "p", halt="wait") as peer, across(plane, peer, IDLE_S) as borrower:
            loan = borrower.borrow("t", 8)
            await peer.lend("t", 8)
            if plane.halt is not None:
                await peer.heard("halted")
            else:
                await eventually(lambda: loan.incoming.state is not TransferState.INIT)
            peer.process.send_signal(signal.SIGSTOP)
            if borrower.sink.capabilities.quiescent_cancel:
                await loan.end()
            else:
                await eventually(lambda: loan.is_over or borrower.sink.num_quarantined > 0)  # type: ignore[attr-defined]
            peer.process.send_signal(signal.SIGCONT)
            end = await loan.end()
            if plane.halt is not None:
                assert isinstance(end, TransferError) and end.reason in SILENT
            if plane.halt is not None:
                while not (report := await peer.report())["ending"]:
                    assert report["leases"] == 1, "a page is free while it is being sent"
                assert report["leases"] == 1
                peer.send("go")
            await peer.heard("ended")
            await peer.even()
            assert borrower.even
            borrower.sink._idle_s = PATIENT_S  # type: ignore[attr-defined]
            loan = borrower.borrow("again", 8)
            refs = await peer.lend("again", 8)
            assert isinstance(await loan.end(), TransferResult)
            assert_received(loan, "p", refs)
            await peer.even()

    run(body(), 60)


@planes([p for p in REMOTE_PLANES if p.halt is not None])
def test_cut_inside_a_page(plane: Plane) -> None:
    async def body() -> None:
        async with plane_peer(plane, "p", halt="cut") as peer, across(plane, peer) as borrower:
            loan = borrower.borrow("t", 8)
            await peer.lend("t", 8)
            assert await loan.reason() in GONE
            assert (await peer.heard("ended"))["state"] == TransferState.FAILED
            await peer.even()
            loan = borrower.borrow("again", 8)
            refs = await peer.lend("again", 8)
            assert isinstance(await loan.end(), TransferResult)
            assert_received(loan, "p", refs)
            await peer.even()

    run(body(), 60)


@every_remote_plane
@pytest.mark.parametrize("stopped", [False, True], ids=["halted", "stopped"])
def test_no_poisoned_byte_changes_when_the_peer_of_a_cancelled_pull_goes_on(plane: Plane, stopped: bool) -> None:
    """Cancelled in flight, the destinations are freed, poisoned and lent again; then the peer goes on."""

    async def body() -> None:
        async with plane_peer(plane, "p", halt="wait") as peer, across(plane, peer) as borrower:
            loan = borrower.borrow("t", 32)
            await peer.lend("t", 32)
            if plane.halt is not None:
                await peer.heard("halted")
            if stopped:
                peer.process.send_signal(signal.SIGSTOP)
            await let_go(borrower, loan)
            if stopped:
                peer.process.send_signal(signal.SIGCONT)
            peer.send("go")
            ended = await peer.heard("ended")
            assert ended["state"] in (TransferState.ABORTED, TransferState.COMPLETE, TransferState.FAILED)
            await loan.end()
            await peer.even()
            assert borrower.even
            loan = borrower.borrow("next", 32)
            refs = await peer.lend("next", 32)
            assert isinstance(await loan.end(), TransferResult)
            assert_received(loan, "p", refs)
            await peer.even()

    run(body(), 60)


@every_plane
@pytest.mark.parametrize("computed", [False, True], ids=["computing", "computed"])
def test_a_network_that_swallows_everything_keeps_no_page(plane: Plane, computed: bool) -> None:
    """Both sides live and neither hears of the other's end: decode gives up by silence, prefill by its lease."""

    async def body() -> None:
        async with (
            here(plane, lease_s=0.5, heartbeat_s=0.1, peer_timeout_s=1.0) as h,
            blackhole(h.world.peer.address) as network,
        ):
            peer = replace(h.world.peer, address=network.address)
            h.world.server.offer("t", 3)
            refs = h.lender.lend("t", 3)
            loan = h.borrower.borrow("t", 3, peer)
            await h.lender.until(lambda: h.lender.opened == ["t"])
            network.swallow()
            if computed:
                h.world.server.pages_ready("t", 0, refs)
                h.world.complete("t", 3)
            assert await loan.reason() == "PEER_SILENT"
            if not computed:  # prefill cannot know; its engine goes on
                h.world.server.pages_ready("t", 0, refs)
                h.world.complete("t", 3)
            assert await h.lender.end_of("t") == (TransferState.EXPIRED, "LEASE_EXPIRED")
            assert h.lender.even and h.borrower.even
            h.world.server._lease_s = LONG_LEASE_S
            await h.whole()

    run(body())


# ---- ends ------------------------------------------------------------------------------------------------------------

STAGES = ("new", "opened", "pulling", "complete")


@every_plane
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("sides", ["decode", "prefill", "both"])
def test_abort_at_every_stage_from_either_side_and_both_twice(plane: Plane, stage: str, sides: str) -> None:
    async def body() -> None:
        async with here(plane) as h:
            h.world.server.offer("t", 3)
            refs = h.lender.lend("t", 3)
            loan = h.borrower.borrow("t", 3)
            if stage != "new":
                await h.lender.until(lambda: "t" in h.lender.opened)
            if stage in ("pulling", "complete"):
                h.world.server.pages_ready("t", 0, refs)
            if stage == "complete":
                h.world.complete("t", 3)
                await loan.end()
            for _ in range(2):
                if sides in ("prefill", "both"):
                    h.world.server.close("t", "ABORTED")
                if sides in ("decode", "both"):
                    await asyncio.gather(loan.incoming.abort(), loan.incoming.abort())
            end = await loan.end()
            assert isinstance(end, TransferResult) == (stage == "complete")
            if stage == "new" and sides == "decode":
                h.world.server.close("t", "ABORTED")  # the stream may never have carried the open
            state, _ = await h.lender.end_of("t")
            assert state is TransferState.COMPLETE or stage != "complete" or sides != "decode"
            await h.whole()

    run(body())


@every_plane
def test_a_lease_that_expires_ends_both_sides_and_serves_nothing_more(plane: Plane) -> None:
    async def body() -> None:
        async with here(plane, lease_s=0.4) as h:
            refs = h.lend("t", 3)
            h.world.complete("t", 3)  # nobody opens it
            assert await h.lender.end_of("t") == (TransferState.EXPIRED, "LEASE_EXPIRED")
            loan = h.borrower.borrow("t", 3)
            assert await loan.reason() == "LEASE_EXPIRED"
            token = h.world.source.new_reader()
            assert await refused(h, token, "t", refs) == ("ERR_STALE" if plane.sees_asks else "CORRUPT_PAGE")
            h.world.server._lease_s = LONG_LEASE_S
            await h.whole()

    run(body())


# ---- reads that may not be -------------------------------------------------------------------------------------------


async def refused(h: Here, token: bytes, transfer_id: str, refs: list[SourcePageRef]) -> str:
    """Asks the plane itself; the reason, after a proof that nothing was written but perhaps the destinations."""
    at = 0 if h.plane.sees_asks else len(refs) * h.world.decode.page_bytes
    before = bytes(h.world.decode.buffer[at:])
    with pytest.raises(TransferError) as e:
        await h.world.sink.pull(h.world.source.address, token, transfer_id, refs, range(len(refs)))
    assert h.world.decode.buffer[at:] == before
    return e.value.reason


@every_asked_plane
def test_stale_ids_generations_and_readers_are_refused(plane: Plane) -> None:
    async def body() -> None:
        async with here(plane) as h:
            mine, others = h.world.source.new_reader(), h.world.source.new_reader()
            refs = h.lend("t", 3)
            h.world.source.publish("t", mine, refs[:2])
            other_life = [SourcePageRef(r.page_id, r.generation + 1, r.checksum) for r in refs[:2]]
            wrong: dict[str, Callable[[], object]] = {
                "unknown transfer": lambda: refused(h, mine, "u", refs[:1]),
                "another reader's transfer": lambda: refused(h, others, "t", refs[:1]),
                "a page that was not published": lambda: refused(h, mine, "t", refs[2:]),
                "another use of the page": lambda: refused(h, mine, "t", other_life),
            }
            for what, ask in wrong.items():
                assert await ask() == "ERR_STALE", what  # type: ignore[misc]
            for token in (b"x" * 16, bytes(16)):
                assert await refused(h, token, "t", refs[:1]) in ("ERR_STALE", "PEER_GONE"), "a stranger's token"
            await h.world.sink.pull(h.world.source.address, mine, "t", refs[:2], [30, 31])
            await h.world.source.withdraw("t")
            assert await refused(h, mine, "t", refs[:1]) == "ERR_STALE"
            h.world.source.drop_reader(mine)
            assert await refused(h, mine, "t", refs[:1]) in ("ERR_STALE", "PEER_GONE")
            h.world.server.close("t", "ABORTED")
            await h.whole()

    run(body())


@every_plane
def test_a_page_that_is_somebody_elses_by_now_is_never_taken(plane: Plane) -> None:
    """What a reader was told of has ended, its pages were written anew; on some planes only the bytes can say so."""

    async def body() -> None:
        async with here(plane) as h:
            token = h.world.source.new_reader()
            refs = h.lend("old", 3)
            h.world.source.publish("old", token, refs)
            h.world.server.close("old", "ABORTED")
            await h.lender.end_of("old")
            await h.world.source.withdraw("old")
            assert await refused(h, token, "old", refs) in ("ERR_STALE", "CORRUPT_PAGE")
            anew = h.lend("new", 3)
            h.world.source.publish("new", token, anew)
            assert {r.page_id for r in anew} == {r.page_id for r in refs}
            assert await refused(h, token, "old", refs) in ("ERR_STALE", "CORRUPT_PAGE")
            h.world.server.close("new", "ABORTED")
            await h.lender.end_of("new")
            await h.world.source.withdraw("new")
            await h.whole()

    run(body())


@every_plane
@pytest.mark.parametrize("bit", [0, 4000, 8 * SMALL.page_bytes - 1])
def test_a_flipped_bit_fails_its_transfer_only(plane: Plane, bit: int) -> None:
    async def body() -> None:
        async with here(plane) as h:
            h.lend("bad", 3)
            page = h.lender.leased["bad"][1]
            await eventually(lambda: _hashed(h, "bad"))
            h.world.prefill.page(page)[bit // 8] ^= 1 << bit % 8  # after it was hashed
            loan = h.borrower.borrow("bad", 3)
            h.world.complete("bad", 3)
            await h.whole("good")
            assert await loan.reason() == "CORRUPT_PAGE"
            assert await h.lender.end_of("bad") == (TransferState.FAILED, "CORRUPT_PAGE")

    run(body())


def _hashed(h: Here, transfer_id: str) -> bool:
    return len(h.world.server._entries[transfer_id].transfer.pages) == 3


@every_plane
@pytest.mark.parametrize("what", ["digest", "count", "finished digest"])
def test_a_manifest_of_another_prompt_is_never_taken(plane: Plane, what: str) -> None:
    async def body() -> None:
        async with here(plane) as h:
            h.lend("t", 3)
            loan = h.borrower.borrow("t", 3)
            if what == "count":
                h.world.server.complete("t", num_tokens=25, token_id=1, index=0, prompt_digest=bytes(32))
            else:
                h.world.complete("t", 3, digest=b"\1" * 32, finished=what != "digest")
            assert await loan.reason() == "MANIFEST_MISMATCH"
            assert await h.lender.end_of("t") == (TransferState.FAILED, "MANIFEST_MISMATCH")
            await h.whole()

    run(body())


@every_asked_plane
def test_unknown_transfers_asked_of_the_plane_leave_nothing_behind(plane: Plane) -> None:
    async def body() -> None:
        async with here(plane) as h:
            token = h.world.source.new_reader()
            ask = [SourcePageRef(0, 0, 1)]
            for i in range(300):
                with pytest.raises(TransferError) as e:
                    await h.world.sink.pull(h.world.source.address, token, f"unknown {i}", ask, [0])
                assert e.value.reason == "ERR_STALE"
            published = getattr(h.world.source, "_published", None) or getattr(h.world.source, "published", {})
            assert not published
            await h.whole()

    run(body())
