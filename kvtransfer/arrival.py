"""How the pages of a peer reach our pool: straight from a data plane, or through a `Stage` when its layout is another.

An `Arrival` is made for each transfer once the peer's layout is known. It counts in the source's pages, as watermarks
and manifests do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from pdserve.core.background import in_own_thread
from pdserve.core.clock import Clock
from pdserve.core.errors import ConfigError, TransferError
from pdserve.core.layout import KVLayout, incompatibility
from pdserve.kvtransfer.convert import KV_HEADS, Block, HeadShard, PagePlan, blocks, coverage_fault, range_fault
from pdserve.kvtransfer.pool import KvPool, PageMemory
from pdserve.kvtransfer.staging import Stage
from pdserve.kvtransfer.transport import Overdue, PageSink, QuarantiningSink, SourcePageRef

MAX_STAGES = 4
MakeSink = Callable[[str, KvPool], PageSink]


class Arrival(Protocol):
    """Where the pages of one transfer go."""

    @property
    def num_pages(self) -> int:
        """Pages of the prompt at the source."""
        ...

    @property
    def num_cached_pages(self) -> int:
        """Leading ones of them that are not pulled."""
        ...

    async def pull(
        self, address: str, token: bytes, transfer_id: str, position: int, pages: Sequence[SourcePageRef]
    ) -> int:
        """Brings source pages in; `position` is the first one's index in the prompt. Otherwise as `PageSink.pull`."""
        ...


class DirectArrival:
    """The source's pages are like ours: a data plane writes ours.

    Args:
        sink: A data plane into the pool.
        destinations: Page ids of the whole prompt.
        num_cached_pages: Leading ones that are here already.
    """

    def __init__(self, sink: PageSink, destinations: Sequence[int], num_cached_pages: int) -> None:
        self._sink, self._destinations = sink, destinations
        self.num_pages, self.num_cached_pages = len(destinations), num_cached_pages

    async def pull(
        self, address: str, token: bytes, transfer_id: str, position: int, pages: Sequence[SourcePageRef]
    ) -> int:
        """See `Arrival`."""
        destinations = self._destinations[position : position + len(pages)]
        return await self._sink.pull(address, token, transfer_id, pages, destinations)


class StagedArrival:
    """The source's pages are not like ours.

    Args:
        stage: For the source's layout.
        destinations: Page ids of the whole prompt here.
        num_cached_pages: Leading ones that are here already.
        num_tokens: Tokens of the prompt.
        moved: Where the heads of the source lie.
    """

    def __init__(
        self,
        stage: Stage,
        destinations: Sequence[int],
        num_cached_pages: int,
        num_tokens: int,
        moved: Sequence[Block],
    ) -> None:
        assert len(destinations) == stage.ours.num_pages(num_tokens), (len(destinations), num_tokens)
        self._stage, self._destinations, self._moved = stage, destinations, moved
        self._plan = PagePlan(num_tokens, stage.theirs.page_size, stage.ours.page_size, num_cached_pages)
        self.num_pages, self.num_cached_pages = self._plan.num_source_pages, self._plan.num_skipped_pages

    async def pull(
        self, address: str, token: bytes, transfer_id: str, position: int, pages: Sequence[SourcePageRef]
    ) -> int:
        """See `Arrival`."""
        return await self._stage.pull(
            address, token, transfer_id, self._plan, position, pages, self._destinations, self._moved
        )


class Stages:
    """The stages of one worker: one per layout and transport of its peers, at most `MAX_STAGES`.

    Args:
        pool: Our pages.
        ours: Their layout.
        make_sink: Makes the sink of a transport, by name, over staging memory.
        clock: Time.
        converts: What may be converted; see `core.layout.incompatibility`. Ranges of KV heads are always taken.
        max_bytes: Staging memory of one stage.
    """

    def __init__(
        self,
        pool: PageMemory,
        ours: KVLayout,
        make_sink: MakeSink,
        clock: Clock,
        *,
        converts: frozenset[str],
        max_bytes: int,
    ) -> None:
        self._pool, self._ours, self._make_sink, self._clock = pool, ours, make_sink, clock
        self.converts, self._max_bytes = converts | {KV_HEADS}, max_bytes
        self._stages: dict[tuple[str, KVLayout], tuple[Stage, KvPool]] = {}
        self._making = asyncio.Lock()
        self._overdue: Overdue | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="kv-convert")

    @property
    def num_quarantined(self) -> int:
        """Staging pages of failed pulls into which something may still write; callable from any thread.

        A stage that has no other left, as when its library broke, serves nobody: it counts as all of our pages.
        """
        total = 0
        for stage, memory in list(self._stages.values()):
            num = stage.sink.num_quarantined if isinstance(stage.sink, QuarantiningSink) else 0
            total += num if num < memory.num_pages else max(num, self._pool.num_pages)
        return total

    def on_overdue(self, callback: Overdue) -> None:
        """See `QuarantiningSink`."""
        self._overdue = callback

    async def hold(self, transport: str, theirs: KVLayout) -> Stage:
        """The stage for a peer, until `release`.

        Raises:
            TransferError: There is no room for it.
        """
        if theirs.page_bytes > self._max_bytes:
            raise TransferError(
                f"--kv-staging-bytes is {self._max_bytes}; one page of the prefill worker takes {theirs.page_bytes}",
                reason="STAGING",
                status="FAILED_PRECONDITION",
            )
        async with self._making:
            if (key := (transport, theirs)) not in self._stages:
                await self._make_room()
                self._stages[key] = await self._make(transport, theirs)
            stage, _ = self._stages[key]
            stage.num_users += 1
            return stage

    def release(self, stage: Stage) -> None:
        """A peer is gone. The stage stays for the next one like it, until another layout needs the room."""
        stage.num_users -= 1

    async def close(self) -> None:
        """Ends all; outstanding pulls fail. Idempotent."""
        for key in list(self._stages):
            await self._drop(key)
        await asyncio.to_thread(self._threads.shutdown)

    async def _make(self, transport: str, theirs: KVLayout) -> tuple[Stage, KvPool]:
        def allocate() -> tuple[KvPool, PageSink]:
            memory = KvPool(theirs, self._max_bytes // theirs.page_bytes)
            try:
                return memory, self._make_sink(transport, memory)
            except BaseException:
                memory.close()
                raise

        try:
            memory, sink = await in_own_thread(allocate)
        except ConfigError as e:
            raise TransferError(
                f"no staging over {transport} (--kv-staging-bytes {self._max_bytes}): {e.message}", reason="STAGING"
            ) from e
        if isinstance(sink, QuarantiningSink) and self._overdue is not None:
            sink.on_overdue(self._overdue)
        return Stage(memory, sink, theirs, self._pool, self._ours, self._clock, self._threads), memory

    async def _make_room(self) -> None:
        while len(self._stages) >= MAX_STAGES:
            idle = next((key for key, (stage, _) in self._stages.items() if not stage.num_users), None)
            if idle is None:
                raise TransferError(
                    f"{MAX_STAGES} other KV layouts are being converted by this worker; give prefill workers equal "
                    "--page-size and --dtype",
                    reason="STAGING_FULL",
                )
            await self._drop(idle)

    async def _drop(self, key: tuple[str, KVLayout]) -> None:
        stage, memory = self._stages.pop(key)
        await stage.close()
        memory.close()


class Inlet:
    """How the pages of one peer come in, for the life of its control stream.

    Args:
        sink: A data plane into the pool; used where the layouts are equal.
        shard: Which KV heads the peer has, in which layout.
        ours: Layout of our pages.
        stage: Held; None: the layouts are equal.
        stages: Where it is held.

    Attributes:
        shard: As given.
        fault: Why this peer alone does not bring all KV heads; None: it does.
    """

    def __init__(
        self,
        sink: PageSink,
        shard: HeadShard,
        ours: KVLayout,
        stage: Stage | None = None,
        stages: Stages | None = None,
    ) -> None:
        self._sink, self._stage, self._stages = sink, stage, stages
        self.shard, self.fault = shard, coverage_fault([shard], ours)
        self._moved = () if stage is None else blocks(shard, ours)

    def arrival(self, destinations: Sequence[int], num_cached_pages: int, num_tokens: int) -> Arrival:
        """Where the pages of a transfer go; the arguments count in our pages."""
        if self._stage is None:
            return DirectArrival(self._sink, destinations, num_cached_pages)
        return StagedArrival(self._stage, destinations, num_cached_pages, num_tokens, self._moved)

    def close(self) -> None:
        """The peer is gone; pulls that still run keep what they need."""
        if self._stages is not None and self._stage is not None:
            self._stages.release(self._stage)


async def open_inlet(
    transport: str,
    sink: PageSink,
    stages: Stages | None,
    ours: KVLayout,
    theirs: KVLayout,
    first_heads: tuple[int, ...] = (),
) -> Inlet:
    """Compares layouts, and prepares for what differs.

    Args:
        transport: Name of the data plane.
        sink: It.
        stages: None: nothing is converted.
        ours: Layout of our pages.
        theirs: Layout of the peer's pages.
        first_heads: Per layer group, our KV head that is the peer's first one; empty: it has all heads.

    Raises:
        TransferError: The peer's KV cannot come in; the message says what differs.
    """
    converts: Collection[str] = () if stages is None else stages.converts
    shard = HeadShard(theirs, first_heads) if first_heads else HeadShard.whole(theirs)
    reason = range_fault(shard, ours, converts) if first_heads else incompatibility(ours, theirs, converts)
    if reason is not None:
        raise TransferError(f"the KV layouts do not fit: {reason}", reason="LAYOUT", status="FAILED_PRECONDITION")
    if stages is None or ours == theirs:
        return Inlet(sink, shard, ours)
    return Inlet(sink, shard, ours, await stages.hold(transport, theirs), stages)
