"""The life of a router process.

bind ports, metrics -> tokenizer -> store checked -> connector follows the registry -> READY line -> serve
Readiness follows the worker table: SERVING while a request would be routed.
SIGTERM/SIGINT -> NOT ready, new requests refused -> running ones end within the grace -> stop. A second signal skips
the waiting.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from pdserve.core.clock import Clock, MonotonicClock
from pdserve.core.errors import ConfigError
from pdserve.core.grpc_server import GrpcServer, open_channel
from pdserve.core.net import format_address
from pdserve.core.process import StopSignals, announce, ready_line
from pdserve.core.redis_client import open_redis
from pdserve.core.registry import Registry
from pdserve.core.telemetry import MetricsServer, RouterMetrics
from pdserve.core.tls import TlsConfig, load_tls
from pdserve.core.tls_refusal import refusal
from pdserve.core.tokenizer import Tokenizer
from pdserve.core.tracing import Tracing
from pdserve.router.config import RouterConfig, RouterServiceConfig
from pdserve.router.connector import Connector
from pdserve.router.inbox import Inbox
from pdserve.router.orchestrator import Orchestrator
from pdserve.router.policy import least_loaded
from pdserve.router.request_store import RedisRequestStore
from pdserve.router.service import SERVICE_NAME, InferenceService
from pdserve.router.worker_set import WorkerSet
from pdserve.router.worker_table import Limits
from pdserve.v1 import inference_pb2_grpc

STOP_TIMEOUT_S = 2.0
CLOSE_GRACE_S = 1.0
STOP_LIMIT_S = 10.0

_log = logging.getLogger(__name__)


class RouterApp:
    """One router process.

    Args:
        service: Configuration.
        config: Configuration.
        tls_config: Of the connections to workers; clients come without TLS.
        announce: Where the READY line goes.
    """

    def __init__(
        self,
        service: RouterServiceConfig,
        config: RouterConfig,
        tls_config: TlsConfig | None = None,
        *,
        announce: Callable[[str], None] = announce,
    ) -> None:
        self._service = service
        self._config = config
        self._tls_config = tls_config or TlsConfig()
        self._announce = announce
        self._clock: Clock = MonotonicClock()
        self._model = config.served_model_name or Path(config.model).name

    async def run(self) -> int:
        """Runs until a signal.

        Returns:
            Exit status: 0 after a drain, 1 after a second signal.

        Raises:
            ConfigError: It cannot start as configured.
        """
        with StopSignals() as signals:
            async with AsyncExitStack() as stack:
                return await self._run(signals, stack)

    async def _run(self, signals: StopSignals, stack: AsyncExitStack) -> int:
        # What is entered here is left in reverse order, whatever happens.
        service, config, clock = self._service, self._config, self._clock
        tls = load_tls(self._tls_config)
        tokenizer = load_tokenizer(config.model)
        limit: list[asyncio.TimerHandle] = []  # on the steps that stop what is entered below
        stack.callback(lambda: limit[0].cancel() if limit else None)
        server = GrpcServer([SERVICE_NAME], max_message_bytes=service.max_message_bytes)
        port = server.bind(service.host, service.port)
        router_id = config.router_id or f"router-{socket.gethostname()}-{port}"
        prometheus = CollectorRegistry()
        metrics = RouterMetrics(prometheus)
        metrics.set_info(router_id=router_id, model=self._model)
        metrics_address = None
        if service.metrics_port is not None:
            endpoint = MetricsServer(prometheus, service.host, service.metrics_port)
            stack.callback(endpoint.close)
            metrics_address = format_address(service.host, endpoint.port)
        tracing = Tracing("pdserve-router", router_id, service.otlp_traces_endpoint, clock)
        stack.push_async_callback(tracing.shutdown, STOP_TIMEOUT_S)
        redis = open_redis(service.redis_url)
        stack.push_async_callback(redis.aclose)
        store = RedisRequestStore(
            service.redis_url,
            clock,
            record_ttl_s=config.record_ttl_s,
            max_pending=2 * config.max_queue,
            metrics=metrics,
        )
        stack.push_async_callback(store.close)
        await store.start()
        storing = await stack.enter_async_context(_background(store.fault()))
        workers = WorkerSet(self._model)
        policy = least_loaded(decode_prefills=config.allow_decode_prefill)
        orchestrator = Orchestrator(config, router_id, clock, store, workers, policy, random.SystemRandom())
        metrics.open_requests.set_function(lambda: orchestrator.num_open)
        metrics.queued_requests.set_function(lambda: orchestrator.num_queued)
        inference_pb2_grpc.add_InferenceServicer_to_server(  # type: ignore[no-untyped-call]
            InferenceService(self._model, orchestrator, store, workers, tokenizer, tracing, metrics, clock),
            server.server,
        )
        connector = Connector(
            workers,
            Registry(redis, service.cluster, clock),
            router_id,
            clock,
            heartbeat_s=config.heartbeat_s,
            worker_timeout_s=config.worker_timeout_s,
            open_channel=partial(open_channel, max_message_bytes=service.max_message_bytes, tls=tls),
            count_late=metrics.late_messages.inc,
            refusal=partial(refusal, tls=tls),
        )
        connecting = await stack.enter_async_context(_background(connector.run()))
        await server.start()
        stack.push_async_callback(server.stop, CLOSE_GRACE_S)
        server.open()
        watching = await stack.enter_async_context(
            _background(self._watch_workers(server, orchestrator, workers, metrics))
        )
        self._announce(ready_line("router", grpc=format_address(service.host, port), metrics=metrics_address))
        asked = await stack.enter_async_context(_background(signals.drain.wait()))
        await asyncio.wait({asked, connecting, watching, storing}, return_when=asyncio.FIRST_COMPLETED)
        for task in (connecting, watching, storing):
            if task.done():
                task.result()  # never ends by itself: a fault of ours
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await server.set_ready(False)
        status = await self._drain(orchestrator, signals)
        limit.append(asyncio.get_running_loop().call_later(STOP_LIMIT_S, _give_up, status))
        return status

    async def _drain(self, orchestrator: Orchestrator, signals: StopSignals) -> int:
        _log.info("draining %d requests, for %g s at most", orchestrator.num_open, self._service.drain_grace_s)
        draining = asyncio.create_task(orchestrator.drain(self._service.drain_grace_s))
        now = asyncio.create_task(signals.now.wait())
        await asyncio.wait({draining, now}, return_when=asyncio.FIRST_COMPLETED)
        now.cancel()
        if signals.now.is_set():
            draining.cancel()
            await asyncio.gather(draining, return_exceptions=True)
            await orchestrator.drain(0)
            return 1
        await draining
        return 0

    async def _watch_workers(
        self, server: GrpcServer, orchestrator: Orchestrator, workers: WorkerSet, metrics: RouterMetrics
    ) -> None:
        """Readiness and the gauge of workers follow the table."""
        inbox = Inbox()
        workers.subscribe(inbox)
        ready = False
        while True:
            if orchestrator.can_serve() != ready:
                ready = not ready
                _log.info("readiness: %s", "SERVING" if ready else f"NOT_SERVING ({workers.table.missing()})")
                await server.set_ready(ready)
            metrics.workers.clear()
            counts = Counter((row.role.value, row.state.partition(":")[0]) for row in workers.table.rows())
            for (role, state), count in counts.items():
                metrics.workers.labels(role, state).set(count)
            await inbox.get()


def _give_up(status: int) -> None:
    """Ends the process although a step of the stop hangs: nothing is left to lose, and a launcher waits."""
    _log.error("a step of the stop did not end within %g s; the process ends without it", STOP_LIMIT_S)
    os._exit(status or 1)


def load_tokenizer(model: str) -> Callable[[Limits], Tokenizer]:
    """The tokenizer of `--model`: a directory, "fake", or a name that was fetched into the cache before.

    Raises:
        ConfigError: There is no such model here; the message says how to get it.
    """
    if model == "fake":
        return lambda limits: Tokenizer.fake(limits.vocab_size)
    directory = Path(model)
    if not directory.is_dir():
        cache = Path(os.environ.get("PDSERVE_CACHE") or Path.home() / ".cache" / "pdserve")
        cached = cache / "models" / directory.name
        if not cached.is_dir():
            raise ConfigError(
                f"--model {model} is no directory and {cached} does not exist; fetch it with "
                f"'pdserve fetch-model --model {model}' ('pdserve up' does that by itself)",
                reason="NO_MODEL",
            )
        directory = cached
    tokenizer = Tokenizer.from_dir(directory)
    return lambda limits: tokenizer


@asynccontextmanager
async def _background(work: Coroutine[Any, Any, object]) -> AsyncGenerator[asyncio.Task[object], None]:
    """A task that lives as long as the block."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
