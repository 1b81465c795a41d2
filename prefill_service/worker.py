"""The prefill worker: builds the engine, the page sources and the transfer server, and gives them to the service."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from pdserve.core.background import Background, in_own_thread
from pdserve.core.streams import welcome_message
from pdserve.core.submission import ModelLimits
from pdserve.core.worker_app import LoadedWorker, WorkerContext
from pdserve.engine.async_engine import AsyncEngine
from pdserve.engine.build import build_engine
from pdserve.engine.config import EngineConfig
from pdserve.kvtransfer import negotiation, planes
from pdserve.kvtransfer.control_server import TransferServer
from pdserve.kvtransfer.pool import KvPool
from pdserve.prefill_service.service import PrefillService
from pdserve.v1.kvtransfer_pb2_grpc import add_KvTransferServicer_to_server


class PrefillWorker:
    """`core.worker_app.WorkerService` of the prefill role.

    Args:
        config: Of the engine.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._stack = AsyncExitStack()
        self._engine: AsyncEngine | None = None
        self._stall_s = 0.0
        self._service: PrefillService

    async def start(self, context: WorkerContext) -> tuple[PrefillService, LoadedWorker]:
        """See `WorkerService`."""
        built = await in_own_thread(build_engine, self._config, KvPool)
        pool = built.pool_memory
        assert isinstance(pool, KvPool)
        self._stack.callback(pool.close)
        sources = await in_own_thread(
            planes.make_sources, context.worker, pool, built.identity_digest, context.service.host, context.tls
        )
        self._stack.push_async_callback(asyncio.to_thread, planes.close_sources, sources)
        loaded = LoadedWorker(
            identity_digest=built.identity_digest,
            layout=built.layout.to_json(),
            model=built.model_name,
            max_model_len=built.max_model_len,
            vocab_size=built.vocab_size,
            num_pages=built.num_pages,
            max_num_seqs=self._config.max_num_seqs,
            data_address=planes.data_address(sources),
        )
        self._service = PrefillService(
            engine=built.engine,
            welcome=welcome_message(context, loaded, built.layout.page_size),
            limits=ModelLimits(
                max_model_len=built.max_model_len, vocab_size=built.vocab_size, eos_token_ids=built.eos_token_ids
            ),
            tokenizer=built.tokenizer,
            clock=context.clock,
            metrics=context.metrics,
            tracing=context.tracing,
            lease_s=context.worker.kv_lease_s,
        )
        transfers = TransferServer(
            memory=pool,
            sources=sources,
            layout=built.layout,
            identity_digest=built.identity_digest,
            incarnation=context.incarnation,
            listener=self._service,
            clock=context.clock,
            lease_s=context.worker.kv_lease_s,
            integrity=context.worker.kv_integrity,
            host_id=negotiation.host_id(),
            fail=context.fail,
        )
        self._service.attach(transfers)
        add_KvTransferServicer_to_server(transfers, context.server)  # type: ignore[no-untyped-call]
        await self._run(context, built.engine, transfers)
        return self._service, loaded

    async def _run(self, context: WorkerContext, engine: AsyncEngine, transfers: TransferServer) -> None:
        """Starts what runs. It is ended in reverse: sweep, transfers (fence), engine, then what reads its events."""
        events, timers = Background(context.fail), Background(context.fail)
        engine.start()
        self._engine, self._stall_s = engine, context.worker.step_stall_s
        events.start(self._service.run(), "engine events")
        self._stack.push_async_callback(events.wait)
        self._stack.push_async_callback(engine.stop)
        await transfers.start()
        self._stack.push_async_callback(transfers.stop)
        timers.start(self._service.sweep_forever(), "sweep of unopened leases")
        self._stack.push_async_callback(timers.cancel)

    def healthy(self) -> bool:
        """See `WorkerService`."""
        return self._engine is None or self._engine.healthy(self._stall_s)

    def ready(self) -> bool:
        """See `WorkerService`."""
        return True

    async def drain(self) -> None:
        """See `WorkerService`."""
        await self._service.drain()

    async def stop(self) -> None:
        """See `WorkerService`."""
        await self._stack.aclose()
