"""The decode (or mixed) worker: builds the engine and the transfer client, and gives them to the service."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial

from pdserve.core.background import Background, in_own_thread
from pdserve.core.grpc_server import open_channel
from pdserve.core.streams import welcome_message
from pdserve.core.submission import ModelLimits
from pdserve.core.worker_app import LoadedWorker, WorkerContext
from pdserve.decode_service.service import DecodeService
from pdserve.engine.async_engine import AsyncEngine
from pdserve.engine.build import build_engine
from pdserve.engine.config import EngineConfig
from pdserve.kvtransfer import negotiation, planes
from pdserve.kvtransfer.arrival import Stages
from pdserve.kvtransfer.control_client import MAX_MESSAGE_BYTES, TransferClient
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.transport import PageSink


class DecodeWorker:
    """`core.worker_app.WorkerService` of the roles decode and mixed.

    Args:
        config: Of the engine.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._stack = AsyncExitStack()
        self._engine: AsyncEngine | None = None
        self._stall_s = 0.0
        self._transfers: TransferClient | None = None
        self._max_quarantined = 0
        self._service: DecodeService

    async def start(self, context: WorkerContext) -> tuple[DecodeService, LoadedWorker]:
        """See `WorkerService`."""
        built = await in_own_thread(build_engine, self._config, KvPool)
        pool = built.pool_memory
        assert isinstance(pool, KvPool)
        self._stack.callback(pool.close)
        loaded = LoadedWorker(
            identity_digest=built.identity_digest,
            layout=built.layout.to_json(),
            model=built.model_name,
            max_model_len=built.max_model_len,
            vocab_size=built.vocab_size,
            num_pages=built.num_pages,
            max_num_seqs=self._config.max_num_seqs,
        )
        sinks = await in_own_thread(planes.make_sinks, context.worker, pool, built.identity_digest, context.tls)
        for name in sinks:
            context.metrics.kv_bytes.labels(name)  # shown from the start: rates begin at zero

        def make_sink(transport: str, memory: KvPool) -> PageSink:
            return planes.make_sinks(context.worker, memory, built.identity_digest, context.tls, [transport])[transport]

        transfers = TransferClient(
            worker_id=context.worker_id,
            incarnation=context.incarnation,
            identity_digest=built.identity_digest,
            layout=built.layout,
            sinks=sinks,
            clock=context.clock,
            stages=Stages(
                pool,
                built.layout,
                make_sink,
                context.clock,
                converts=context.kv_converts,
                max_bytes=context.worker.kv_staging_bytes,
            ),
            integrity=context.worker.kv_integrity,
            host_id=negotiation.host_id(),
            open_channel=partial(open_channel, max_message_bytes=MAX_MESSAGE_BYTES, tls=context.tls),
        )
        self._service = DecodeService(
            engine=built.engine,
            transfers=transfers,
            welcome=welcome_message(context, loaded, built.layout.page_size),
            limits=ModelLimits(
                max_model_len=built.max_model_len, vocab_size=built.vocab_size, eos_token_ids=built.eos_token_ids
            ),
            tokenizer=built.tokenizer,
            clock=context.clock,
            metrics=context.metrics,
            tracing=context.tracing,
            reserve_wait_s=context.worker.reserve_wait_s,
        )
        self._transfers, cap = transfers, context.worker.kv_transfer.max_quarantined_pages
        self._max_quarantined = built.num_pages // 4 if cap is None else cap
        context.metrics.quarantined_pages.set_function(lambda: transfers.num_quarantined)
        self._run(context, built.engine, transfers)
        return self._service, loaded

    def _run(self, context: WorkerContext, engine: AsyncEngine, transfers: TransferClient) -> None:
        """Starts what runs. It is ended in reverse: transfers (fence), engine, then what reads its events."""
        events = Background(context.fail)
        engine.start()
        self._engine, self._stall_s = engine, context.worker.step_stall_s
        events.start(self._service.run(), "engine events")
        self._stack.push_async_callback(events.wait)
        self._stack.push_async_callback(engine.stop)
        self._stack.push_async_callback(transfers.close)

    def healthy(self) -> bool:
        """See `WorkerService`."""
        return self._engine is None or self._engine.healthy(self._stall_s)

    def ready(self) -> bool:
        """See `WorkerService`: not while failed reads may still write into too many pages."""
        return self._transfers is None or self._transfers.num_quarantined <= self._max_quarantined

    async def drain(self) -> None:
        """See `WorkerService`."""
        await self._service.drain()

    async def stop(self) -> None:
        """See `WorkerService`."""
        await self._stack.aclose()
