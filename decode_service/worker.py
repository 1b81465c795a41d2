"""The decode (or mixed) worker: builds the engine and the transfer client, and gives them to the service."""

from __future__ import annotations

import asyncio
from functools import partial

from pdserve.core.background import in_own_thread
from pdserve.core.engine_worker import EngineWorker, loaded_worker, stream_parts
from pdserve.core.grpc_server import open_channel
from pdserve.core.tls_refusal import refusal
from pdserve.core.worker_app import LoadedWorker, WorkerContext
from pdserve.decode_service.service import DecodeService
from pdserve.engine.build import BuiltEngine, build_engine
from pdserve.engine.config import EngineConfig
from pdserve.kvtransfer import negotiation, planes
from pdserve.kvtransfer.arrival import Stages
from pdserve.kvtransfer.control_client import MAX_MESSAGE_BYTES, TransferClient
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.populate import Populator
from pdserve.kvtransfer.transport import PageSink


class DecodeWorker(EngineWorker):
    """`core.worker_app.WorkerService` of the roles decode and mixed.

    Args:
        config: Of the engine.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self._config = config
        self._transfers: TransferClient | None = None
        self._max_quarantined = 0

    async def start(self, context: WorkerContext) -> tuple[DecodeService, LoadedWorker]:
        """See `WorkerService`. Ended in reverse: transfers (fence), engine and its events, pages."""
        planes.check_planes(context.worker.kv_transfer.transports, context.tls)
        built = await in_own_thread(build_engine, self._config, KvPool)
        pool = built.pool_memory
        assert isinstance(pool, KvPool)
        self._stack.callback(pool.close)
        populator = Populator(pool)
        self._stack.push_async_callback(asyncio.to_thread, populator.close)
        self._transfers = transfers = await _connect(context, built, pool, populator)
        cap = context.worker.kv_transfer.max_quarantined_pages
        self._max_quarantined = built.num_pages // 4 if cap is None else cap
        context.metrics.quarantined_pages.set_function(lambda: transfers.num_quarantined)
        loaded = loaded_worker(built, self._config.max_num_seqs, transports=transfers.sinks, host_id=transfers.host_id)
        service = DecodeService(
            built.engine,
            stream_parts(context, built, loaded),
            transfers=transfers,
            reserve_wait_s=context.worker.reserve_wait_s,
        )
        self._run_engine(context, built.engine, service)
        self._stack.push_async_callback(transfers.close)
        return service, loaded

    def ready(self) -> bool:
        """See `WorkerService`: not while failed reads may still write into too many pages."""
        return self._transfers is None or self._transfers.num_quarantined <= self._max_quarantined


async def _connect(context: WorkerContext, built: BuiltEngine, pool: KvPool, populator: Populator) -> TransferClient:
    """What pulls pages into the pool; the caller closes it."""
    worker, digest = context.worker, built.identity_digest
    sinks = await planes.open_sinks(worker, pool, digest, context.tls)
    for name in sinks:
        context.metrics.kv_bytes.labels(name)  # shown from the start: rates begin at zero

    def make_sink(transport: str, memory: KvPool) -> PageSink:
        return planes.make_sink(worker, memory, digest, context.tls, transport)

    return TransferClient(
        worker_id=context.worker_id,
        incarnation=context.incarnation,
        identity_digest=digest,
        layout=built.layout,
        sinks=sinks,
        clock=context.clock,
        stages=Stages(
            pool,
            built.layout,
            make_sink,
            context.clock,
            converts=context.kv_converts,
            max_bytes=worker.kv_staging_bytes,
        ),
        integrity=worker.kv_integrity,
        host_id=negotiation.host_id(),
        open_channel=partial(open_channel, max_message_bytes=MAX_MESSAGE_BYTES, tls=context.tls),
        refusal=partial(refusal, tls=context.tls),
        expect=populator.expect,
    )
