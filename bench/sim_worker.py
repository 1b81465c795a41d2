"""One worker process of a simulation: the real service, engine core and transfer code, wired as `worker.py` wires them.

Instead of a step thread the engine has a task that takes virtual time; instead of sockets there are the simulated
network and `kvtransfer.fake`'s pages with scripted faults.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

from prometheus_client import CollectorRegistry

from pdserve.bench.sim_network import Network
from pdserve.bench.virtual_time import VirtualClock
from pdserve.core.background import Background
from pdserve.core.config import ServiceConfig, WorkerConfig
from pdserve.core.engine_worker import loaded_worker, stream_parts
from pdserve.core.errors import EngineError, PdserveError, TransferError
from pdserve.core.registry import WorkerRecord
from pdserve.core.request import Role
from pdserve.core.session import SessionServer
from pdserve.core.stream_service import StreamParts
from pdserve.core.telemetry import WorkerMetrics
from pdserve.core.tokenizer import Tokenizer
from pdserve.core.tracing import Tracing
from pdserve.core.worker_app import WorkerContext
from pdserve.decode_service.service import DecodeService
from pdserve.engine.build import BuiltCore, build_core
from pdserve.engine.config import EngineConfig
from pdserve.engine.engine_core import EngineCore
from pdserve.engine.step import Command, EngineLoad, StepEvents
from pdserve.kvtransfer.control_client import TransferClient
from pdserve.kvtransfer.control_server import TransferServer
from pdserve.kvtransfer.fake import FakePageSink, FakePageSource, PageFate
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.transport import SourcePageRef
from pdserve.prefill_service.service import PrefillService
from pdserve.v1.kvtransfer_pb2_grpc import add_KvTransferServicer_to_server
from pdserve.v1.worker_pb2_grpc import add_WorkerServicer_to_server

STEP_S, TOKEN_S = 0.01, 0.0001
"""A step takes up to twice STEP_S, and TOKEN_S for each of its tokens."""
Fate = Callable[[str, SourcePageRef], PageFate]


class VirtualEngine:
    """`engine.async_engine.Engine` without a thread: a task steps the core; commands that come meanwhile wait."""

    def __init__(self, core: EngineCore, clock: VirtualClock, rng: random.Random) -> None:
        self.core, self._clock, self._rng = core, clock, rng
        self._commands: list[Command] = []
        self._wake = asyncio.Event()
        self._failure: EngineError | None = None
        self._stopping = False
        self._load = core.load()
        self._outputs: asyncio.Queue[StepEvents | None] = asyncio.Queue()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def send(self, command: Command) -> None:
        """See `Engine`."""
        if self._failure is not None:
            raise self._failure
        if self._stopping:
            raise EngineError("the engine has been stopped", reason="ENGINE_STOPPED", status="UNAVAILABLE")
        self._commands.append(command)
        self._wake.set()

    async def outputs(self) -> AsyncIterator[StepEvents]:
        """See `Engine`."""
        while (item := await self._outputs.get()) is not None:
            yield item
        if self._failure is not None:
            raise self._failure

    def load(self) -> EngineLoad:
        """See `Engine`."""
        return self._load

    def crash(self) -> None:
        """The step in flight fails, as when a runner raises."""
        self._failure = EngineError("the engine failed and must be restarted: scripted", reason="ENGINE_FAILED")
        self._wake.set()

    async def stop(self) -> None:
        """Ends after the step in flight."""
        self._stopping = True
        self._wake.set()
        await self._task

    async def _run(self) -> None:
        idle = True
        while not self._stopping and self._failure is None:
            if idle:
                await self._wait()
            self._wake.clear()
            commands, self._commands = self._commands, []
            self.core.begin_step(commands)
            started = self._clock.now()
            answers = self.core.schedule(started)
            if answers.events:
                self._deliver(answers)
            await self._clock.sleep(STEP_S * 2 * self._rng.random())
            computed = self.core.compute()
            await self._clock.sleep(TOKEN_S * computed.num_tokens)
            self.core.check()
            self._failure = self._failure or self.core.failure
            if computed.num_tokens or computed.events or not answers.events:
                self._deliver(replace(computed, duration_s=self._clock.now() - started))
            idle = not computed.num_tokens
        self._outputs.put_nowait(None)

    async def _wait(self) -> None:
        wakeup = self.core.next_wakeup()
        if not self._wake.is_set():
            try:
                await self._clock.wait_for(
                    self._wake.wait(), None if wakeup is None else max(0.0, wakeup - self._clock.now())
                )
            except TimeoutError:
                return

    def _deliver(self, item: StepEvents) -> None:
        self._load = item.load
        self._outputs.put_nowait(item)


class InlineExecutor(Executor):
    """Runs work at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See `Executor`."""
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class SimSink:
    """`PageSink` over the fake one: finds the source at its address, and gives up a pull that takes too long."""

    capabilities = FakePageSink.capabilities

    def __init__(
        self, pool: KvPool, sources: dict[str, FakePageSource], clock: VirtualClock, fate: Fate, idle_s: float
    ) -> None:
        self._pool, self._sources, self._clock, self._fate, self._idle_s = pool, sources, clock, fate, idle_s

    async def pull(
        self,
        address: str,
        token: bytes,
        transfer_id: str,
        sources: Sequence[SourcePageRef],
        destinations: Sequence[int],
    ) -> int:
        """See `PageSink`."""
        if (source := self._sources.get(address)) is None:
            raise TransferError(f"nobody serves pages at {address}", reason="PEER_LOST")
        sink = FakePageSink(self._pool, [source], self._clock)
        sink.fate = self._fate
        pulling = sink.pull(address, token, transfer_id, sources, destinations)
        try:
            num_bytes: int = await self._clock.wait_for(pulling, self._idle_s * len(sources))
        except TimeoutError:
            raise TransferError("the pull stalled", reason="PULL_IDLE") from None
        return num_bytes

    async def close(self) -> None:
        """See `PageSink`."""


class SimWorker:
    """One process: it starts, and then stops, fails or dies once.

    Args:
        role: Its role.
        worker_id: Stable name; also its address.
        incarnation: Of this process.
        engine: Configuration.
        network: Where it is reached.
        sources: Data planes by address, shared by all workers.
        fate: What happens to pages that it pulls.
        rng: Of its steps.
    """

    def __init__(
        self,
        role: Role,
        worker_id: str,
        incarnation: str,
        engine: EngineConfig,
        network: Network,
        sources: dict[str, FakePageSource],
        fate: Fate,
        rng: random.Random,
    ) -> None:
        self.worker_id, self.role, self._network, self._sources = worker_id, role, network, sources
        self.process = network.join(worker_id)
        self.clock, self.config = VirtualClock(), WorkerConfig()
        self.failed: asyncio.Future[PdserveError] = asyncio.get_running_loop().create_future()
        built = build_core(engine, KvPool)
        self.engine = VirtualEngine(built.core, self.clock, rng)
        assert isinstance(built.pool_memory, KvPool)
        self._pool, self.num_pages = built.pool_memory, built.num_pages
        self.record = _record(role, worker_id, incarnation, engine, built)
        self.context = WorkerContext(
            role=role,
            worker_id=worker_id,
            incarnation=incarnation,
            address=worker_id,
            service=ServiceConfig(),
            worker=self.config,
            clock=self.clock,
            metrics=WorkerMetrics(CollectorRegistry(), role.value),
            tracing=Tracing("sim", worker_id, None, self.clock),
            server=self.process,  # type: ignore[arg-type]
            fail=self._fail,
        )
        self.source: FakePageSource | None = None
        self.transfers: TransferClient | TransferServer
        if role is Role.PREFILL:
            self.service: PrefillService | DecodeService = self._prefill(built)
        else:
            self.service = self._decode(built, fate)
        self._events, self._timers = Background(self._fail), Background(self._fail)
        self._events.start(self.service.run(), "engine events")
        self.sessions = SessionServer(
            self.service,
            self.clock,
            router_timeout_s=self.config.router_timeout_s,
            metrics=self.context.metrics,
        )
        add_WorkerServicer_to_server(self.sessions, self.process)  # type: ignore[no-untyped-call]

    async def start(self) -> None:
        """Starts what has timers."""
        if isinstance(self.service, PrefillService):
            assert isinstance(self.transfers, TransferServer)
            await self.transfers.start()
            self._timers.start(self.service.sweep_forever(), "sweep of unopened leases")

    async def stop(self, grace_s: float) -> None:
        """Drains, tells its routers, and ends: as after SIGTERM."""
        self.sessions.drain()
        with suppress(TimeoutError):
            await self.clock.wait_for(self.service.drain(), grace_s)
        await self.sessions.close(2.0)
        await self.die()

    async def die(self) -> None:
        """Ends at once: nothing that it still does reaches anybody."""
        self._network.kill(self.process)
        if self.source is not None:
            self.source.tokens.clear()
            if self._sources.get(self.worker_id) is self.source:
                del self._sources[self.worker_id]
        await self._timers.cancel()
        if isinstance(self.transfers, TransferServer):
            await self.transfers.stop()
        else:
            await self.transfers.close()
        await self.engine.stop()
        await self._events.wait()
        self._pool.close()

    def leftovers(self) -> str:
        """What of any request is still here; empty when nothing is."""
        free, load = self.num_pages, self.engine.load()
        num_transfers = (
            self.transfers.num_leases if isinstance(self.transfers, TransferServer) else self.transfers.num_open
        )
        if load.num_free_pages == free and not (load.num_running or load.num_waiting or num_transfers):
            return ""
        return f"{self.worker_id}: {load}, {num_transfers} transfers"

    def _fail(self, error: PdserveError) -> None:
        if not self.failed.done():
            self.failed.set_result(error)

    def _parts(self, built: BuiltCore) -> StreamParts:
        loaded = loaded_worker(built, self.record.max_num_seqs)
        return replace(stream_parts(self.context, built, loaded), tokenizer=_tokenizer(built.vocab_size))

    def _prefill(self, built: BuiltCore) -> PrefillService:
        pool = self._pool
        self.source = self._sources[self.worker_id] = FakePageSource(pool, self.worker_id)
        service = PrefillService(self.engine, self._parts(built), lease_s=self.config.kv_lease_s)
        self.transfers = transfers = TransferServer(
            memory=pool,
            sources={"fake": self.source},
            layout=built.layout,
            identity_digest=built.identity_digest,
            incarnation=self.context.incarnation,
            listener=service,
            clock=self.clock,
            lease_s=self.config.kv_lease_s,
            hashers=InlineExecutor(),
        )
        service.attach(transfers)
        add_KvTransferServicer_to_server(transfers, self.process)  # type: ignore[no-untyped-call]
        return service

    def _decode(self, built: BuiltCore, fate: Fate) -> DecodeService:
        self.transfers = TransferClient(
            worker_id=self.worker_id,
            incarnation=self.context.incarnation,
            identity_digest=built.identity_digest,
            layout=built.layout,
            sinks={"fake": SimSink(self._pool, self._sources, self.clock, fate, self.config.pull_idle_s)},
            clock=self.clock,
            open_channel=self._network.channels(self.process),
        )
        return DecodeService(
            self.engine,
            self._parts(built),
            transfers=self.transfers,
            reserve_wait_s=self.config.reserve_wait_s,
        )


@cache
def _tokenizer(vocab_size: int) -> Tokenizer:
    return Tokenizer.fake(vocab_size)


def _record(role: Role, worker_id: str, incarnation: str, engine: EngineConfig, built: BuiltCore) -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id,
        role=role,
        incarnation=incarnation,
        address=worker_id,
        data_address=worker_id,
        identity_digest=built.identity_digest.hex(),
        layout=built.layout.to_json(),
        model=built.model_name,
        max_model_len=built.max_model_len,
        vocab_size=built.vocab_size,
        num_pages=built.num_pages,
        max_num_seqs=engine.max_num_seqs,
    )
