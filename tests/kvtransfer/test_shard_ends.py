"""One of several sources fails: wherever the parts are then, every other source gets its pages back at once."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from pdserve.core.errors import TransferError
from pdserve.kvtransfer.convert import HeadShard
from pdserve.kvtransfer.gather import PartState
from pdserve.kvtransfer.handoff import TransferState
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.transport import PageSink
from tests.support.silent_sink import SilentSink

from .ranks import Rank
from .test_shards import ABORTED, NUM_HERE, NUM_TOKENS, OURS, Worker, shards, started
from .world import eventually, reason_of, run, sink_over


class Gated:
    """A channel that is let through from a moment on; until then its source has not joined."""

    def __init__(self, channel: Any, gate: asyncio.Event) -> None:
        self._channel, self._gate = channel, gate

    async def __aenter__(self) -> Any:
        await self._gate.wait()
        return await self._channel.__aenter__()

    async def __aexit__(self, *args: object) -> None:
        await self._channel.__aexit__(*args)

    def stream_stream(self, *args: object, **options: object) -> Any:
        """See `grpc.aio.Channel`."""
        return self._channel.stream_stream(*args, **options)


def gates(w: Worker) -> dict[str, asyncio.Event]:
    """Closes a gate before every source, by its address."""
    closed, open_channel = {one.peer.address: asyncio.Event() for one in w.ranks}, w.client.open_channel
    w.client.open_channel = lambda address: cast("Any", Gated(open_channel(address), closed[address]))
    return closed


async def until_written(w: Worker) -> None:
    """A page of each source is here."""
    for one in w.ranks:
        one.ready(0, 2)
    await eventually(lambda: not w.is_poison(1))


async def fail(one: Rank, fault: str) -> None:
    """Makes a source fail; one that was restarted has done so before."""
    if fault in ("gone", "no TLS"):
        await one.grpc_server.stop(None)
    elif fault == "closed":
        one.server.close("t", "ENGINE_FAILED")


REASONS = {"gone": "PEER_LOST", "no TLS": "TLS_REFUSED", "restarted": "INCARNATION", "closed": "ENGINE_FAILED"}


CASES = [
    ("waiting", "gone"),
    ("joined", "gone"),
    ("joined", "restarted"),
    ("joined", "no TLS"),
    ("not offered", "gone"),
    ("open", "gone"),
    ("open", "closed"),
    ("written", "gone"),
    ("written", "closed"),
]
"""Where the other source's part is, and what happens to the one that fails."""


@pytest.mark.parametrize(
    ("other_is", "fault", "which"),
    [
        *((*case, i % 2) for i, case in enumerate(CASES)),
        *(pytest.param(*case, 1 - i % 2, marks=pytest.mark.slow) for i, case in enumerate(CASES)),
    ],
)
def test_whichever_source_fails_the_other_has_no_lease_left(other_is: str, fault: str, which: int) -> None:
    async def body() -> None:
        async with started(shards()) as w:
            failing, other = w.ranks[which], w.ranks[1 - which]
            if fault == "restarted":
                failing.peer = replace(failing.peer, incarnation="0")
            if fault == "no TLS":
                w.client.refusal = lambda address: "it speaks no TLS"
            gate, is_open = gates(w), other_is in ("open", "written")
            for one, has_joined in ((failing, is_open), (other, other_is != "waiting")):
                if has_joined:
                    gate[one.peer.address].set()
            if is_open:
                w.offer(failing)
            if other_is != "not offered":
                w.offer(other)
            if other_is in ("waiting", "joined"):
                other.ready(0)
                other.complete(NUM_TOKENS)
            incoming = w.gather()
            if is_open:
                for one in w.ranks:
                    await one.listener.until(lambda one=one: one.listener.opened == ["t"])  # type: ignore[misc]
            elif other_is != "waiting":
                await eventually(lambda: incoming._gather.parts[1 - which].state is PartState.JOINED)
            if other_is == "written":
                await until_written(w)

            await fail(failing, fault)
            gate[failing.peer.address].set()
            assert await reason_of(incoming.result()) == REASONS[fault]

            gate[other.peer.address].set()
            if other_is == "not offered":
                w.offer(other)
            assert await other.listener.end_of("t") == ABORTED
            assert other.server.num_leases == 0 and w.client.num_open == 0
            assert other_is == "written" or all(w.is_poison(page) for page in range(NUM_HERE + 2))

    run(body())


def test_a_lease_that_ran_out_before_all_had_joined_fails_the_whole() -> None:
    async def body() -> None:
        async with started(shards()) as w:
            first, slow = w.ranks
            gate = gates(w)
            gate[first.peer.address].set()
            for one in w.ranks:
                w.offer(one)
                one.ready(0)
            incoming = w.gather()
            await eventually(lambda: incoming._gather.parts[0].state is PartState.JOINED)
            first.server.close("t", "LEASE_EXPIRED")
            await first.listener.end_of("t")
            gate[slow.peer.address].set()
            assert await reason_of(incoming.result()) == "LEASE_EXPIRED"
            assert await slow.listener.end_of("t") == ABORTED

    run(body())


def test_an_abort_before_all_have_joined_ends_it_at_those_that_have() -> None:
    async def body() -> None:
        async with started(shards()) as w:
            gate = gates(w)
            gate[w.ranks[0].peer.address].set()
            for one in w.ranks:
                w.offer(one)
            incoming = w.gather()
            await eventually(lambda: incoming._gather.parts[0].state is PartState.JOINED)
            await incoming.abort("CANCELLED")
            assert await w.ranks[0].listener.end_of("t") == (TransferState.ABORTED, "CANCELLED")
            gate[w.ranks[1].peer.address].set()
            assert await w.ranks[1].listener.end_of("t") == (TransferState.ABORTED, "CANCELLED")

    run(body())


def test_a_page_of_one_part_that_is_not_what_its_source_said_fails_the_whole() -> None:
    async def body() -> None:
        async with started(shards()) as w:
            for one in w.ranks:
                w.offer(one)
                one.ready(0)
            bad = w.ranks[1]
            await eventually(lambda: len(bad.server._entries["t"].transfer.pages) == bad.num_pages)
            bad.pool.page(3)[5] ^= 1
            incoming = w.gather()
            w.ranks[0].complete(NUM_TOKENS)
            bad.complete(NUM_TOKENS)
            assert await reason_of(incoming.result()) == "CORRUPT_PAGE"
            assert (await bad.listener.end_of("t"))[0] is TransferState.FAILED
            assert (await w.ranks[0].listener.end_of("t"))[0] in (TransferState.ABORTED, TransferState.COMPLETE)
            assert incoming.state is TransferState.FAILED and w.client.num_open == 0

    run(body())


@pytest.mark.parametrize("which", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_pull_that_cannot_be_stopped_is_told_with_its_source_and_ends_the_other_at_once(which: int) -> None:
    sinks = list[SilentSink]()

    def sink_of(name: str, memory: KvPool) -> PageSink:
        sinks.append(SilentSink(sink_over(name, memory)))
        return sinks[-1]

    async def body() -> None:
        async with started(shards(), sink_of=sink_of) as w:
            slow, other = w.ranks[which], w.ranks[1 - which]
            for one in w.ranks:
                w.offer(one)
            incoming = w.gather()
            for one in w.ranks:
                await one.listener.until(lambda one=one: one.listener.opened == ["t"])  # type: ignore[misc]
            (sink,) = sinks  # both have pages of one layout
            sink.silent = slow.server._sources["tcp"].address
            for one in w.ranks:
                one.ready(0)
            try:
                error = await incoming.failure()
                assert error is not None and error.reason == "PULL_IDLE"
                assert f"from prefill-{which} ended failed: the source is silent" in error.message
                assert await other.listener.end_of("t") == ABORTED
                assert w.client.num_open == 1 and w.client.num_quarantined > 0
                assert slow.server.num_leases == 1 and not slow.listener.ended
            finally:
                sink.release.set()
            assert await reason_of(incoming.result()) == "PULL_IDLE"
            assert await slow.listener.end_of("t") == (TransferState.FAILED, "PULL_IDLE")
            assert w.client.num_open == w.client.num_quarantined == 0

    run(body())


def test_sources_that_have_all_heads_are_no_parts() -> None:
    """As those of the version before, which say nothing of heads."""

    async def body() -> None:
        whole = HeadShard.whole(OURS)
        async with started([whole, whole], first_heads=[(), ()]) as w:
            for one in w.ranks:
                w.offer(one)
                one.ready(0)
            with pytest.raises(TransferError, match="KV head 0 comes from two sources") as e:
                await w.gather().result()
            assert e.value.reason == "SHARDS"
            for one in w.ranks:
                assert await one.listener.end_of("t") == ABORTED
            assert all(w.is_poison(page) for page in range(NUM_HERE + 2))

    run(body())


def test_one_process_under_two_names_is_not_two_sources() -> None:
    async def body() -> None:
        async with started(shards()) as w:
            one = w.ranks[0]
            other_name = one.peer.address.replace("127.0.0.1", "localhost")
            w.ranks[1] = replace(one, peer=replace(one.peer, address=other_name))
            w.offer(one)
            assert await reason_of(w.gather().result()) == "SHARDS"
            assert await one.listener.end_of("t") == ABORTED

    run(body())


def test_more_sources_than_heads_are_refused_before_one_is_called() -> None:
    async def body() -> None:
        async with started(shards()) as w:
            peers = [replace(w.ranks[0].peer, address=f"127.0.0.1:{port}") for port in range(1, 6)]
            with pytest.raises(TransferError, match="5 sources for 4 KV heads") as e:
                w.client.gather(
                    "t",
                    peers,
                    num_cached_pages=0,
                    destinations=range(1),
                    expected_num_tokens=1,
                    expected_digest=bytes(32),
                )
            assert e.value.reason == "SHARDS" and w.client.num_open == 0

    run(body())
