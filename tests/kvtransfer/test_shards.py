"""One prompt from several sources that have a range of the KV heads each: real servers, real planes, bytes compared."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import pytest

from pdserve.core.clock import MonotonicClock
from pdserve.core.errors import ConfigError, TransferError
from pdserve.core.layout import CONVERSIONS, KVLayout, LayerGroup
from pdserve.kvtransfer.arrival import MakeSink, Stages
from pdserve.kvtransfer.control_client import TransferClient
from pdserve.kvtransfer.control_server import TransferServer
from pdserve.kvtransfer.convert import HeadShard
from pdserve.kvtransfer.gathered import GatheredTransfer
from pdserve.kvtransfer.handoff import TransferState
from pdserve.kvtransfer.pool import KvPool
from pdserve.v1 import kvtransfer_pb2 as pb

from .layouts import POISON, Kv, make_kv, make_pages, poisoned_pool, shards_of
from .plane_peer import plane_peer
from .planes import IDLE_S, REMOTE_PLANES, Plane, planes
from .ranks import Rank, rank
from .scripted import SCRIPTED, ScriptedPrefill, scripted_client, welcome
from .world import DIGEST, HOST_ID, LAYOUT, PROMPT_DIGEST, Listener, eventually, reason_of, run, sink_over, source_over

GROUPS = (LayerGroup((0, 2), 4, 8, 8), LayerGroup((1,), 4, 16, 4))
OURS = KVLayout(16, "float32", GROUPS)
NUM_TOKENS = 100
NUM_HERE = OURS.num_pages(NUM_TOKENS)
ABORTED = (TransferState.ABORTED, "SHARD_FAILED")


def shards(
    *, cuts: tuple[int, ...] = (2,), page_sizes: Sequence[int] = (16,), dtype: str = "float32"
) -> list[HeadShard]:
    """Sources that make the whole; their page sizes in turn."""
    found = shards_of(OURS, page_size=16, dtype=dtype, cuts=cuts)
    sizes = [page_sizes[i % len(page_sizes)] for i in range(len(found))]
    return [replace(s, layout=replace(s.layout, page_size=size)) for s, size in zip(found, sizes, strict=True)]


@dataclass
class Worker:
    """The decode side, and its sources."""

    ranks: list[Rank]
    client: TransferClient
    pool: KvPool
    kv: Kv

    def gather(self, num_cached: int = 0) -> GatheredTransfer:
        """Opens the transfer on all."""
        incoming = self.client.gather(
            "t",
            [one.peer for one in self.ranks],
            num_cached_pages=num_cached,
            destinations=range(1, 1 + NUM_HERE),
            expected_num_tokens=NUM_TOKENS,
            expected_digest=PROMPT_DIGEST,
        )
        assert isinstance(incoming, GatheredTransfer)
        return incoming

    @property
    def here(self) -> list[bytes]:
        """The destinations."""
        return [bytes(self.pool.page(1 + i)) for i in range(NUM_HERE)]

    def offer(self, at: Rank) -> None:
        """Has a source offer its heads of the prompt."""
        at.offer(make_pages(self.kv, at.shard.layout, NUM_TOKENS, at.shard.first_heads))

    def is_poison(self, page: int) -> bool:
        return set(self.pool.page(page)) == {POISON}


@asynccontextmanager
async def started(
    sources: Sequence[HeadShard],
    planes: Sequence[str] = ("tcp",),
    *,
    digests: Sequence[bytes] = (DIGEST,),
    first_heads: Sequence[tuple[int, ...]] | None = None,
    gathers: bool = True,
    sink_of: MakeSink = sink_over,
) -> AsyncIterator[Worker]:
    """The sources, whose planes and digests are taken in turn, and a decode worker."""
    pool = poisoned_pool(OURS, NUM_HERE + 2)
    async with AsyncExitStack() as stack:
        ranks = [
            await stack.enter_async_context(
                rank(
                    i,
                    shard,
                    plane := planes[i % len(planes)],
                    partial(source_over, plane),
                    num_pages=shard.layout.num_pages(NUM_TOKENS),
                    digest=digests[i % len(digests)],
                    first_heads=heads,
                )
            )
            for i, (shard, heads) in enumerate(zip(sources, first_heads or [None] * len(sources), strict=True))
        ]
        stages = Stages(pool, OURS, sink_of, MonotonicClock(), converts=CONVERSIONS, max_bytes=1 << 16)
        client = TransferClient(
            worker_id="decode-0",
            incarnation="b1",
            identity_digest=DIGEST,
            layout=OURS,
            sinks={name: sink_over(name, pool) for name in ("shm", "tcp")},
            host_id=HOST_ID,
            stages=stages if gathers else None,
            clock=MonotonicClock(),
        )
        try:
            yield Worker(ranks, client, pool, make_kv(GROUPS, NUM_TOKENS))
        finally:
            await client.close()
            await stages.close()
            assert client.num_open == 0
            pool.close()


TWO, THREE, UNLIKE = shards(), shards(cuts=(1, 3)), shards(cuts=(1, 3), page_sizes=(16, 32, 24))
OTHER_DTYPE = shards(page_sizes=(48, 8), dtype="bfloat16")


@pytest.mark.parametrize(
    ("sources", "planes"),
    [
        pytest.param(TWO, ("tcp",), id="two"),
        pytest.param(THREE, ("shm",), id="three"),
        pytest.param(UNLIKE, ("shm", "tcp"), id="unlike pages"),
        pytest.param(OTHER_DTYPE, ("tcp",), id="other dtype"),
        pytest.param(TWO, ("shm", "tcp"), marks=pytest.mark.slow, id="two, mixed"),
        pytest.param(THREE, ("tcp",), marks=pytest.mark.slow, id="three, tcp"),
        pytest.param(UNLIKE, ("tcp",), marks=pytest.mark.slow, id="unlike pages, tcp"),
        pytest.param(OTHER_DTYPE, ("shm",), marks=pytest.mark.slow, id="other dtype, shm"),
    ],
)
def test_heads_of_several_sources_arrive_as_one_prompt(sources: list[HeadShard], planes: tuple[str, ...]) -> None:
    async def body() -> None:
        async with started(sources, planes) as w:
            if (dtype := sources[0].layout.dtype) != "float32":
                w.kv = {key: _rounded(values, dtype) for key, values in w.kv.items()}
            incoming = w.gather(num_cached=2)
            for one in reversed(w.ranks):
                w.offer(one)
                one.ready(0, 1)
            for one in w.ranks:
                one.ready(1)
                assert incoming.state is not TransferState.COMPLETE
                one.complete(NUM_TOKENS)
            result = await incoming.result()
            assert (result.token_id, result.index, result.finished) == (7, 0, False)
            assert result.transport == "+".join(sorted(set(planes)))
            assert {pulled.transport for pulled in result.ranges} == set(planes)
            assert sum(pulled.num_bytes for pulled in result.ranges) == result.bytes_on_wire
            assert w.here[2:] == make_pages(w.kv, OURS, NUM_TOKENS)[2:]
            assert all(w.is_poison(page) for page in (0, 1, 2, NUM_HERE + 1)), "a page that decode has was written"
            for one in w.ranks:
                assert await one.listener.end_of("t") == (TransferState.COMPLETE, "COMPLETE")

    run(body())


def _rounded(values: Any, dtype: str) -> Any:
    import torch

    return torch.from_numpy(values).to(getattr(torch, dtype)).float().numpy()


def test_a_token_that_ends_the_request_moves_nothing() -> None:
    async def body() -> None:
        async with started(shards()) as w:
            incoming = w.gather()
            for one in w.ranks:
                w.offer(one)
                one.complete(NUM_TOKENS, finished=True)
            assert (await incoming.result()).finished
            assert all(w.is_poison(page) for page in range(NUM_HERE + 2))

    run(body())


@pytest.mark.parametrize("planes", [("tcp",), ("shm",), ("shm", "tcp")], ids="+".join)
def test_a_source_that_dies_between_ranges_fails_the_whole_and_ends_the_others(planes: tuple[str, ...]) -> None:
    async def body() -> None:
        async with started(shards(cuts=(1, 3)), planes) as w:
            incoming = w.gather()
            for one in w.ranks:
                w.offer(one)
                one.ready(0, 2)
            await eventually(lambda: not w.is_poison(2))
            w.ranks[0].ready(2)
            w.ranks[0].complete(NUM_TOKENS)
            assert (await w.ranks[0].listener.end_of("t"))[0] is TransferState.COMPLETE
            await w.ranks[1].grpc_server.stop(None)
            with pytest.raises(TransferError, match="from prefill-1") as e:
                await incoming.result()
            assert e.value.reason == "PEER_LOST"
            assert await w.ranks[2].listener.end_of("t") == ABORTED
            before = w.here
            w.ranks[2].ready(2)  # too late
            await incoming.abort()
            assert w.here == before and incoming.state is TransferState.FAILED

    run(body())


@pytest.mark.parametrize(
    ("first_heads", "says"),
    [
        ([(0, 0), (1, 1)], "KV head 1 comes from two sources"),
        ([(1, 1), (2, 2)], "KV head 0 comes from no source"),
        ([(0, 0), (0, 0)], "KV head 0 comes from two sources"),
    ],
)
def test_sources_that_do_not_make_the_whole_are_refused_and_nothing_is_pulled(
    first_heads: list[tuple[int, ...]], says: str
) -> None:
    async def body() -> None:
        async with started(shards(), first_heads=first_heads) as w:
            for one in w.ranks:
                w.offer(one)
                one.ready(0)
            with pytest.raises(TransferError, match=says) as e:
                await w.gather().result()
            assert e.value.reason == "SHARDS"
            for one in w.ranks:
                assert await one.listener.end_of("t") == ABORTED
            assert all(w.is_poison(page) for page in range(NUM_HERE + 2))

    run(body())


def test_a_source_of_another_model_refuses_and_the_others_are_ended() -> None:
    async def body() -> None:
        async with started(shards(), digests=[DIGEST, bytes(32)]) as w:
            for one in w.ranks:
                w.offer(one)
                one.ready(0)
            assert await reason_of(w.gather().result()) == "IDENTITY"
            assert await w.ranks[0].listener.end_of("t") == ABORTED
            assert all(w.is_poison(page) for page in range(NUM_HERE + 2))

    run(body())


@pytest.mark.parametrize(
    ("token_id", "num_tokens", "reason"), [(7, NUM_TOKENS - 1, "MANIFEST_MISMATCH"), (8, NUM_TOKENS, "SHARDS_DISAGREE")]
)
def test_sources_of_another_prompt_or_token_fail_the_whole(token_id: int, num_tokens: int, reason: str) -> None:
    async def body() -> None:
        async with started(shards()) as w:
            incoming = w.gather()
            for one in w.ranks:
                w.offer(one)
                one.ready(0)
            w.ranks[1].complete(num_tokens, token_id=token_id)
            if reason == "SHARDS_DISAGREE":
                w.ranks[0].complete(NUM_TOKENS)
            assert await reason_of(incoming.result()) == reason
            for one in w.ranks:
                await one.listener.end_of("t")

    run(body())


@pytest.mark.parametrize("moment", ["before", "between", "twice"])
def test_an_abort_ends_it_at_every_source(moment: str) -> None:
    async def body() -> None:
        async with started(shards()) as w:
            incoming = w.gather()
            if moment == "before":
                await incoming.abort("CANCELLED")
            else:
                for one in w.ranks:
                    w.offer(one)
                    one.ready(0, 2)
                await eventually(lambda: not w.is_poison(1))
                await asyncio.gather(*(incoming.abort("CANCELLED") for _ in range(2 if moment == "twice" else 1)))
                for one in w.ranks:
                    assert await one.listener.end_of("t") == (TransferState.ABORTED, "CANCELLED")
            before = w.here
            assert await reason_of(incoming.result()) == "CANCELLED"
            assert w.client.num_open == 0 and w.here == before

    run(body())


def test_a_source_of_some_heads_is_no_source_of_a_prompt() -> None:
    async def body() -> None:
        async with started(shards()) as w:
            w.offer(w.ranks[0])
            incoming = w.client.start(
                "t",
                w.ranks[0].peer,
                num_cached_pages=0,
                destinations=range(1, 1 + NUM_HERE),
                expected_num_tokens=NUM_TOKENS,
                expected_digest=PROMPT_DIGEST,
            )
            with pytest.raises(TransferError, match=r"prefill-0 has not all KV heads: .*KV head 2 comes"):
                await incoming.result()
            assert await w.ranks[0].listener.end_of("t") == (TransferState.FAILED, "SHARDS")

    run(body())


def test_a_decode_worker_that_takes_no_ranges_is_refused_by_the_source() -> None:
    async def body() -> None:
        async with started(shards(), gathers=False) as w:
            with pytest.raises(TransferError, match="takes all heads from one source") as e:
                await w.gather().result()
            assert e.value.reason == "LAYOUT"

    run(body())


def test_a_range_beyond_our_heads_and_one_without_its_groups_are_refused() -> None:
    async def body() -> None:
        async with started(shards(), first_heads=[(0, 0), (3, 3)]) as w:
            with pytest.raises(TransferError, match=r"there is a source of heads \[3, 5\)") as e:
                await w.gather().result()
            assert e.value.reason == "LAYOUT"

    run(body())
    with pytest.raises(ConfigError, match="first_kv_heads: 1 heads for 2 layer groups"):
        TransferServer(
            memory=poisoned_pool(OURS, 1),
            sources={},
            layout=OURS,
            first_kv_heads=[0],
            identity_digest=DIGEST,
            incarnation="a",
            listener=Listener(),
            clock=MonotonicClock(),
        )


def test_one_source_twice_or_none_is_refused_at_once() -> None:
    async def body() -> None:
        async with started(shards()) as w:
            w.ranks[1] = w.ranks[0]
            with pytest.raises(TransferError, match=r"must be distinct: prefill-0 at .*, prefill-0 at") as e:
                w.gather()
            assert e.value.reason == "SHARDS" and w.client.num_open == 0
            w.ranks.clear()
            with pytest.raises(TransferError, match="must be distinct: none"):
                w.gather()

    run(body())


def test_a_welcome_that_names_heads_of_no_group_is_refused() -> None:
    async def body() -> None:
        pool = poisoned_pool(OURS, 2)
        channel = ScriptedPrefill([welcome(first_kv_heads=[0, 1, 2])])
        client = scripted_client(sink_over("tcp", pool), channel)
        incoming = client.start(
            "t", SCRIPTED, num_cached_pages=0, destinations=[0], expected_num_tokens=8, expected_digest=PROMPT_DIGEST
        )
        assert await reason_of(incoming.result()) == "BAD_WELCOME"
        await client.close()

    run(body())


def test_pages_announced_before_anybody_asked_are_not_pulled() -> None:
    """A source that does not wait for the open: the others' heads are not known yet."""

    async def body() -> None:
        async with started(shards()) as w:
            half = w.ranks[0].shard.layout
            page = pb.SourcePage(page_id=0, generation=1, checksum=5)
            pages = pb.ControlResponse(watermark=pb.Watermark(transfer_id="t", first_page=0, pages=[page]))
            hello = welcome(layout=half.to_json(), first_kv_heads=[0, 0])
            channels = {"first": ScriptedPrefill([hello, pages]), "second": ScriptedPrefill([])}
            channels["first"]._opened.set()
            w.client.open_channel = lambda address: cast("Any", channels[address])
            incoming = w.client.gather(
                "t",
                [replace(SCRIPTED, address=name) for name in channels],
                num_cached_pages=0,
                destinations=range(1, 1 + NUM_HERE),
                expected_num_tokens=NUM_TOKENS,
                expected_digest=PROMPT_DIGEST,
            )
            assert await reason_of(incoming.result()) == "NOT_OPENED"
            said = channels["first"].heard
            await eventually(lambda: [m.WhichOneof("message") for m in said] == ["hello", "open", "close"])
            assert said[1].open.num_cached_pages == half.num_pages(NUM_TOKENS), "opened only to be closed"

    run(body())


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@planes(REMOTE_PLANES)
def test_a_source_process_that_ends_inside_a_page_leaves_no_lease_and_no_writer(
    plane: Plane, ending: signal.Signals
) -> None:
    async def body() -> None:
        pool = poisoned_pool(LAYOUT, 4)
        stages = Stages(
            pool,
            LAYOUT,
            lambda _, memory: plane.sink(memory, (), IDLE_S),
            MonotonicClock(),
            converts=CONVERSIONS,
            max_bytes=1 << 20,
        )
        client = TransferClient(
            worker_id="decode-0",
            incarnation="b1",
            identity_digest=DIGEST,
            layout=LAYOUT,
            sinks={plane.name: plane.sink(pool, (), IDLE_S)},
            host_id=HOST_ID,
            stages=stages,
            clock=MonotonicClock(),
        )
        async with (
            plane_peer(plane, "first", heads="0:2") as first,
            plane_peer(plane, "second", heads="2:2", halt="wait") as second,
        ):
            for peer in (first, second):
                await peer.begin("t", 4)
            incoming = client.gather(
                "t",
                [first.peer, second.peer],
                num_cached_pages=0,
                destinations=range(4),
                expected_num_tokens=4 * LAYOUT.page_size,
                expected_digest=PROMPT_DIGEST,
            )
            for peer in (first, second):
                peer.send("range t 0 2")
            if plane.halt is not None:
                await second.heard("halted")
            second.process.send_signal(ending)
            assert await reason_of(incoming.result()) in {"PEER_GONE", "PEER_LOST", "PULL_IDLE"}
            before = bytes(pool.buffer)
            await first.even()
            first.send("range t 2 4")
            await first.even()
            await client.close()
            assert bytes(pool.buffer) == before and client.num_quarantined == 0
        pool.close()

    run(body(), 60)
