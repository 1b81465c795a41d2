"""Pages of another layout arrive converted, whole, and only where they may."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.clock import Clock, MonotonicClock, T
from pdserve.core.errors import TransferError
from pdserve.core.layout import KVLayout, LayerGroup
from pdserve.kvtransfer.arrival import MAX_STAGES, Stages
from pdserve.kvtransfer.cast import STORAGE
from pdserve.kvtransfer.convert import HeadShard, PagePlan, blocks, coverage_fault
from pdserve.kvtransfer.fake import FakePageSink, FakePageSource, PageFate
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.staging import MAX_PER_SOURCE, PIECES, Stage
from pdserve.kvtransfer.tcp import TcpPageSink, TcpPageSource
from pdserve.kvtransfer.transport import Capabilities, PageSink, PageSource, SourcePageRef

from .layouts import layer_groups, make_kv, make_pages, poisoned_pool, put, shards_of
from .world import DIGEST, eventually, fill, refs, run


def published(source: PageSource, pool: KvPool, page_ids: Sequence[int]) -> tuple[bytes, list[SourcePageRef]]:
    """Lets one reader read pages of transfer "t"."""
    token = source.new_reader()
    pages = refs(pool, page_ids)
    source.publish("t", token, pages)
    return token, pages


class Side:
    """One source with a prompt in its pool, in reverse order of pages."""

    def __init__(self, shard: HeadShard, pages: list[bytes]) -> None:
        self.shard, self.pool = shard, poisoned_pool(shard.layout, len(pages))
        self.ids = list(reversed(range(len(pages))))
        put(self.pool, self.ids, pages)


def staged(side: Side, sink: PageSink, memory: KvPool, pool: KvPool, threads: ThreadPoolExecutor) -> Stage:
    return Stage(memory, sink, side.shard.layout, pool, pool.layout, MonotonicClock(), threads)


@settings(max_examples=25, deadline=None)
@given(layer_groups(), st.data())
def test_any_layout_arrives_as_if_it_had_been_computed_here(
    groups: tuple[LayerGroup, ...], data: st.DataObject
) -> None:
    ours = KVLayout(data.draw(st.integers(1, 20)), data.draw(st.sampled_from(sorted(STORAGE))), groups)
    theirs = KVLayout(data.draw(st.integers(1, 20)), data.draw(st.sampled_from(sorted(STORAGE))), groups)
    num_tokens = data.draw(st.integers(1, 60))
    plan = PagePlan(
        num_tokens, theirs.page_size, ours.page_size, data.draw(st.integers(0, num_tokens // ours.page_size))
    )
    num_slots = data.draw(st.integers(1, 20))
    kv = make_kv(groups, num_tokens)
    side = Side(HeadShard.whole(theirs), make_pages(kv, theirs, num_tokens))
    # What arrives is what the source had: its rounding first, then ours.
    seen = {key: as_float32(values, theirs.dtype) for key, values in kv.items()}
    right = make_pages(seen, ours, num_tokens)
    pool = poisoned_pool(ours, len(right) + 1)
    destinations = list(range(1, len(right) + 1))
    put(pool, destinations[: plan.num_cached_pages], right[: plan.num_cached_pages])
    cached = [bytes(pool.page(i)) for i in destinations[: plan.num_cached_pages]]

    async def body() -> None:
        source = FakePageSource(side.pool)
        token, refs = published(source, side.pool, side.ids)
        memory = KvPool(theirs, num_slots)
        with ThreadPoolExecutor(1) as threads:
            stage = staged(side, FakePageSink(memory, [source], MonotonicClock()), memory, pool, threads)
            moved = blocks(side.shard, ours)
            at = plan.num_skipped_pages
            while at < len(refs):
                end = data.draw(st.integers(at + 1, len(refs)))
                await stage.pull(source.address, token, "t", plan, at, refs[at:end], destinations, moved)
                at = end
            assert stage.num_free_slots == num_slots and stage.num_users == 0

    run(body())
    assert [bytes(pool.page(i)) for i in destinations] == right
    assert cached == right[: plan.num_cached_pages]
    assert set(pool.page(0)) == {0xA5}


def as_float32(values, dtype: str):  # type: ignore[no-untyped-def]
    import torch

    return torch.from_numpy(values).to(getattr(torch, dtype)).float().numpy()


GROUPS = (LayerGroup((0, 2), 4, 8, 8), LayerGroup((1,), 4, 16, 4))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("source_size", "size"), [(16, 32), (32, 16), (48, 32)])
def test_heads_of_several_sources_make_one_page(source_size: int, size: int, dtype: str) -> None:
    """Over real sockets, at once; of each source some heads, in pages of its own."""

    async def body() -> None:
        ours = KVLayout(size, "float32", GROUPS)
        shards = shards_of(ours, page_size=source_size, dtype=dtype, cuts=(1, 3))
        assert coverage_fault(shards, ours) is None
        kv = {key: as_float32(values, dtype) for key, values in make_kv(GROUPS, 100).items()}
        right = make_pages(kv, ours, 100)
        pool = poisoned_pool(ours, len(right))
        plan = PagePlan(100, source_size, size, 0)
        with ThreadPoolExecutor(2) as threads:

            async def one(shard: HeadShard) -> None:
                side = Side(shard, make_pages(kv, shard.layout, 100, shard.first_heads))
                source, memory = TcpPageSource(side.pool, DIGEST), KvPool(shard.layout, 2)
                stage = staged(side, TcpPageSink(memory, DIGEST), memory, pool, threads)
                try:
                    token, refs = published(source, side.pool, side.ids)
                    await stage.pull(source.address, token, "t", plan, 0, refs, range(len(right)), blocks(shard, ours))
                finally:
                    await stage.close()
                    source.close()

            await asyncio.gather(*map(one, shards))
        assert [bytes(pool.page(i)) for i in range(len(right))] == right

    run(body())


SMALL = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=4, page_size=4, dtype="float32")
WIDER = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=4, page_size=8, dtype="float32")
PLAN = PagePlan(32, 4, 8, 0)  # eight pages there, four here
MOVED = blocks(HeadShard.whole(SMALL), WIDER)


class SmallWorld:
    """A fake source of eight pages and a stage of a few slots into a pool of four."""

    def __init__(self, num_slots: int, fate: PageFate | None = None, at: int = 0, clock: Clock | None = None) -> None:
        self.threads = ThreadPoolExecutor(1)
        self.source_pool, self.pool, self.memory = KvPool(SMALL, 8), poisoned_pool(WIDER, 4), KvPool(SMALL, num_slots)
        fill(self.source_pool)
        self.sources = [FakePageSource(self.source_pool, f"fake:{i}") for i in range(2)]
        self.sink = FakePageSink(self.memory, self.sources, MonotonicClock())
        if fate is not None:
            self.sink.fate = lambda _, page: fate if page.page_id == at else PageFate()
        clock = clock or MonotonicClock()
        self.stage = Stage(self.memory, self.sink, SMALL, self.pool, WIDER, clock, self.threads)

    def pull(self, which: int = 0, plan: PagePlan = PLAN) -> asyncio.Task[int]:
        source = self.sources[which]
        token, refs = published(source, self.source_pool, range(8))
        return asyncio.create_task(
            self.stage.pull(source.address, token, "t", plan, 0, refs, range(4), MOVED)  # type: ignore[arg-type]
        )

    def is_poison(self, page: int) -> bool:
        return set(self.pool.page(page)) == {0xA5}


def test_a_corrupt_page_is_not_converted() -> None:
    async def body() -> None:
        w = SmallWorld(1, PageFate(corrupt=True), at=4)
        with pytest.raises(TransferError) as e:
            await w.pull()
        assert e.value.reason == "CORRUPT_PAGE"
        assert not w.is_poison(1) and w.is_poison(2) and w.is_poison(3)
        assert w.stage.num_free_slots == 1
        w.threads.shutdown()

    run(body())


def test_slots_come_back_from_a_cancelled_pull() -> None:
    async def body() -> None:
        w = SmallWorld(1, PageFate(delay_s=math.inf), at=2)
        first, second = w.pull(), w.pull(1)
        async with asyncio.timeout(10):
            while w.is_poison(0) or w.stage.num_free_slots:  # noqa: ASYNC110  a fake tells nobody that it stalls
                await asyncio.sleep(0)
        for task in (first, second):
            task.cancel()
        ends = await asyncio.gather(first, second, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends)
        assert w.stage.num_free_slots == 1 and w.stage.num_users == 0
        w.threads.shutdown()

    run(body())


def test_a_source_that_stalls_leaves_slots_to_others() -> None:
    async def body() -> None:
        w = SmallWorld(2 * PIECES)
        w.sink.fate = lambda transfer_id, page: PageFate(delay_s=math.inf if transfer_id == "t" else 0)
        stalled = [w.pull() for _ in range(5)]
        source = w.sources[1]
        token, refs = published(source, w.source_pool, range(8))
        source.publish("other", token, refs)
        await w.stage.pull(source.address, token, "other", PLAN, 0, refs, range(4), MOVED)
        assert not any(w.is_poison(page) for page in range(4))
        assert w.stage.num_free_slots >= 2 * PIECES - 4
        for task in stalled:
            task.cancel()
        await asyncio.gather(*stalled, return_exceptions=True)
        assert w.stage.num_free_slots == 2 * PIECES
        w.threads.shutdown()

    run(body())


class TimesUp(MonotonicClock):
    """A clock on which the time of whoever waits is up when the test says so."""

    def __init__(self) -> None:
        self.now_it_is = asyncio.Event()

    async def wait_for(self, awaitable: Awaitable[T], timeout_s: float | None) -> T:
        waiting, up = asyncio.ensure_future(awaitable), asyncio.ensure_future(self.now_it_is.wait())
        try:
            await asyncio.wait([waiting, up], return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
            self.now_it_is.clear()
            raise TimeoutError
        finally:
            for task in (waiting, up):
                task.cancel()
            await asyncio.gather(waiting, up, return_exceptions=True)


def test_a_pull_waits_for_earlier_ones_of_its_source_only_while_they_get_on() -> None:
    async def body() -> None:
        asked, clock = list[int](), TimesUp()
        w = SmallWorld(4, clock=clock)

        def fate(_: str, page: SourcePageRef) -> PageFate:
            asked.append(page.page_id)
            return PageFate(delay_s=math.inf if page.page_id else 0)

        w.sink.fate = fate
        earlier = [w.pull() for _ in range(MAX_PER_SOURCE)]
        waiting = w.pull()
        await eventually(lambda: asked.count(1) == len(earlier))  # page 0 has come, and then nothing more
        clock.now_it_is.set()
        await eventually(lambda: not clock.now_it_is.is_set())
        assert not waiting.done()
        clock.now_it_is.set()
        with pytest.raises(TransferError, match="earlier pulls from this source") as e:
            await asyncio.wait_for(waiting, 10)
        assert e.value.reason == "STAGING_BUSY"
        for task in earlier:
            task.cancel()
        await asyncio.gather(*earlier, return_exceptions=True)
        assert w.stage.num_free_slots == 4 and w.stage.num_users == 0
        w.threads.shutdown()

    run(body())


class Gate(ThreadPoolExecutor):
    """Conversions wait for a word."""

    def __init__(self) -> None:
        super().__init__(1)
        import threading

        self.began, self.may_go = threading.Event(), threading.Event()

    def submit(self, fn, /, *args, **kwargs):  # type: ignore[no-untyped-def, override]
        def work() -> object:
            self.began.set()
            assert self.may_go.wait(20)
            return fn(*args, **kwargs)

        return super().submit(work)


def test_a_cancelled_pull_returns_only_when_its_conversion_is_over() -> None:
    async def body() -> None:
        w = SmallWorld(8)
        gate = Gate()
        w.stage._threads = gate
        pull = w.pull()
        await asyncio.to_thread(gate.began.wait, 20)
        pull.cancel()
        done, _ = await asyncio.wait([pull], timeout=0.2)
        assert not done, "it returned while a thread could still write"
        pull.cancel()
        gate.may_go.set()
        with pytest.raises(asyncio.CancelledError):
            await pull
        assert not w.is_poison(0), "what had been verified was converted meanwhile"
        assert w.stage.num_free_slots == 8
        gate.shutdown()
        w.threads.shutdown()

    run(body())


class Quiet:
    """A sink that only counts how often it is closed."""

    capabilities = Capabilities(quiescent_cancel=True, zero_copy=True, device_memory=False)
    num_closed = 0

    async def pull(
        self,
        address: str,
        token: bytes,
        transfer_id: str,
        sources: Sequence[SourcePageRef],
        destinations: Sequence[int],
    ) -> int:
        raise AssertionError

    async def close(self) -> None:
        Quiet.num_closed += 1


def layout_of(page_size: int) -> KVLayout:
    return KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=4, page_size=page_size, dtype="float32")


def test_stages_are_shared_bounded_and_make_room() -> None:
    async def body() -> None:
        Quiet.num_closed = 0
        pool = KvPool(SMALL, 1)
        stages = Stages(pool, SMALL, lambda *_: Quiet(), MonotonicClock(), converts=frozenset(), max_bytes=1152)
        held = [await stages.hold("tcp", layout_of(8 + i)) for i in range(MAX_STAGES)]
        assert await stages.hold("tcp", layout_of(8)) is held[0]
        with pytest.raises(TransferError) as e:
            await stages.hold("tcp", layout_of(30))
        assert e.value.reason == "STAGING_FULL"
        stages.release(held[1])
        assert (await stages.hold("tcp", layout_of(30))).theirs.page_size == 30
        assert Quiet.num_closed == 1
        stages.release(held[0])  # still held once
        with pytest.raises(TransferError, match="other KV layouts"):
            await stages.hold("tcp", layout_of(31))
        with pytest.raises(TransferError, match=r"--kv-staging-bytes is 1152; one page .* takes 16000"):
            await stages.hold("tcp", layout_of(500))
        await stages.close()
        await stages.close()
        assert Quiet.num_closed == 1 + MAX_STAGES

    run(body())


def test_memory_that_the_system_does_not_give_fails_the_transfer_by_name() -> None:
    async def body() -> None:
        pool = KvPool(SMALL, 1)
        stages = Stages(pool, SMALL, lambda *_: Quiet(), MonotonicClock(), converts=frozenset(), max_bytes=1 << 62)
        with pytest.raises(TransferError, match="--kv-staging-bytes") as e:
            await stages.hold("tcp", layout_of(8))
        assert e.value.reason == "STAGING"
        await stages.close()

    run(body())
