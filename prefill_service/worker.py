"""The prefill worker: builds the engine, the page sources and the transfer server, and gives them to the service."""

from __future__ import annotations

import asyncio

from pdserve.core.background import Background, in_own_thread
from pdserve.core.engine_worker import EngineWorker, loaded_worker, stream_parts
from pdserve.core.worker_app import LoadedWorker, WorkerContext
from pdserve.engine.build import build_engine
from pdserve.engine.config import EngineConfig
from pdserve.kvtransfer import negotiation, planes
from pdserve.kvtransfer.control_server import TransferServer
from pdserve.kvtransfer.pool import KvPool
from pdserve.prefill_service.service import PrefillService
from pdserve.v1.kvtransfer_pb2_grpc import add_KvTransferServicer_to_server


class PrefillWorker(EngineWorker):
    """`core.worker_app.WorkerService` of the prefill role.

    Args:
        config: Of the engine.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self._config = config

    async def start(self, context: WorkerContext) -> tuple[PrefillService, LoadedWorker]:
        """See `WorkerService`. Ended in reverse: sweep, transfers (fence), engine and its events, sources, pages."""
        planes.check_planes(context.worker.kv_transfer.transports, context.tls)
        built = await in_own_thread(build_engine, self._config, KvPool)
        pool = built.pool_memory
        assert isinstance(pool, KvPool)
        self._stack.callback(pool.close)
        sources = await in_own_thread(
            planes.make_sources, context.worker, pool, built.identity_digest, context.service.host, context.tls
        )
        self._stack.push_async_callback(asyncio.to_thread, planes.close_sources, sources)
        host_id, address = negotiation.host_id(), planes.data_address(sources)
        loaded = loaded_worker(built, self._config.max_num_seqs, address, transports=sources, host_id=host_id)
        lease_s = context.worker.kv_lease_s
        service = PrefillService(built.engine, stream_parts(context, built, loaded), lease_s=lease_s)
        transfers = TransferServer(
            memory=pool,
            sources=sources,
            layout=built.layout,
            identity_digest=built.identity_digest,
            incarnation=context.incarnation,
            listener=service,
            clock=context.clock,
            lease_s=lease_s,
            integrity=context.worker.kv_integrity,
            host_id=host_id,
            fail=context.fail,
        )
        service.attach(transfers)
        add_KvTransferServicer_to_server(transfers, context.server)  # type: ignore[no-untyped-call]
        self._run_engine(context, built.engine, service)
        await transfers.start()
        self._stack.push_async_callback(transfers.stop)
        timers = Background(context.fail)
        timers.start(service.sweep_forever(), "sweep of unopened leases")
        self._stack.push_async_callback(timers.cancel)
        return service, loaded
