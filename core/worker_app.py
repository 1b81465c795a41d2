"""The life of a worker process, the same for every role; what the role does is given as a `WorkerService`.

bind ports, metrics, store -> health: alive, NOT ready -> load -> register -> ready, READY line -> serve
SIGTERM/SIGINT -> NOT ready, registry and heartbeats say draining, new attempts refused -> drain(grace)
-> unregister -> sessions end -> stop.   A second signal skips the waiting.
The service calls `WorkerContext.fail` when its engine is dead: liveness fails and the process ends with status 1.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from pdserve.core.clock import Clock, MonotonicClock
from pdserve.core.config import ServiceConfig, WorkerConfig
from pdserve.core.errors import ConfigError, PdserveError, UnavailableError
from pdserve.core.grpc_server import GrpcServer, Servicers
from pdserve.core.layout import CONVERSIONS, DTYPE
from pdserve.core.log import setup_logging
from pdserve.core.net import advertised_address, format_address
from pdserve.core.process import StopSignals, announce, ready_line, run_async
from pdserve.core.redis_client import check_redis, open_redis
from pdserve.core.registry import DRAINING, Registry, WorkerRecord
from pdserve.core.request import Role
from pdserve.core.session import SERVICE_NAME, SessionHandler, SessionServer
from pdserve.core.telemetry import MetricsServer, WorkerMetrics
from pdserve.core.tls import Tls, TlsConfig, load_tls
from pdserve.core.tracing import Tracing
from pdserve.v1 import worker_pb2_grpc

HEALTH_PERIOD_S = 1.0
STOP_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """What the app gives to the service before it loads.

    Attributes:
        role: The worker's role.
        worker_id: Stable name.
        incarnation: This process, hex.
        address: host:port that others reach the gRPC endpoint at.
        service: Configuration.
        worker: Configuration.
        clock: The process's clock.
        metrics: The process's metrics.
        tracing: The process's tracer.
        server: For further servicers (prefill: KvTransfer); add them in `start`.
        fail: Call it when the process must end (the engine is dead).
        tls: What this process shows to its peers and asks of them; None: plain connections.
    """

    role: Role
    worker_id: str
    incarnation: str
    address: str
    service: ServiceConfig
    worker: WorkerConfig
    clock: Clock
    metrics: WorkerMetrics
    tracing: Tracing
    server: Servicers
    fail: Callable[[PdserveError], None]
    tls: Tls | None = None

    @property
    def kv_converts(self) -> frozenset[str]:
        """What may differ between this worker's KV layout and a peer's; see `core.layout.incompatibility`."""
        if self.role is Role.PREFILL or self.worker.kv_convert_dtype:
            return CONVERSIONS  # prefill leaves it to decode
        return CONVERSIONS - {DTYPE}


@dataclass(frozen=True, kw_only=True)
class LoadedWorker:
    """What a loaded service says about itself, for the registry and the READY line.

    Attributes:
        identity_digest: Equal on every worker of a pool.
        layout: KVLayout as JSON text.
        model: Served model name.
        max_model_len: Prompt and output tokens together, at most.
        vocab_size: Size of the vocabulary.
        num_pages: KV pages in all.
        max_num_seqs: Sequences that may run at once.
        data_address: host:port that others reach the KV data plane at; None: there is none.
        transports: Data planes, most wanted first.
        host_id: See `kvtransfer.negotiation.host_id`; empty: no plane within the host.
    """

    identity_digest: bytes
    layout: str
    model: str
    max_model_len: int
    vocab_size: int
    num_pages: int
    max_num_seqs: int
    data_address: str | None = None
    transports: tuple[str, ...] = ()
    host_id: str = ""


class WorkerService(Protocol):
    """One role: how it starts and ends. What it does with routers' messages is another object, made by `start`."""

    async def start(self, context: WorkerContext) -> tuple[SessionHandler, LoadedWorker]:
        """Loads the model and starts everything; afterwards messages may come. Long work belongs into threads.

        Raises:
            PdserveError: It cannot start; ConfigError ends the process with status 2.
        """
        ...

    def healthy(self) -> bool:
        """False when the process must be restarted (sequences run but no step ends)."""
        ...

    def ready(self) -> bool:
        """False while nothing new may come though what runs goes on; then the process should be restarted soon."""
        ...

    async def drain(self) -> None:
        """Returns when nothing runs or is leased any more. The caller bounds it; cancelled when the grace is over."""
        ...

    async def stop(self) -> None:
        """Ends engine, transfers and everything else that `start` started; also called when `start` failed."""
        ...


class WorkerApp:
    """One worker process.

    Args:
        role: What it computes.
        service: What the role does.
        service_config: Configuration.
        worker_config: Configuration.
        tls_config: Configuration.
        announce: Where the READY line goes.
    """

    def __init__(
        self,
        role: Role,
        service: WorkerService,
        service_config: ServiceConfig,
        worker_config: WorkerConfig,
        tls_config: TlsConfig | None = None,
        *,
        announce: Callable[[str], None] = announce,
    ) -> None:
        self._role = role
        self._service = service
        self._config = service_config
        self._worker_config = worker_config
        self._tls_config = tls_config or TlsConfig()
        self._announce = announce
        self._clock: Clock = MonotonicClock()
        self._incarnation = secrets.token_hex(8)
        self._failure: PdserveError | None = None
        self._failed = asyncio.Event()
        self._record: WorkerRecord | None = None
        self._leaving = False
        self.stuck = False  # the service did not stop in time: some thread of its still runs
        self.abandoned = False  # told to stop while it loaded: the loading thread still runs

    async def run(self) -> int:
        """Runs until a signal or a failure.

        Returns:
            Exit status: 0 after a drain, 1 after a failure or a second signal.

        Raises:
            ConfigError: It cannot start as configured.
        """
        with StopSignals() as signals:
            async with AsyncExitStack() as stack:
                return await self._run(signals, stack)

    def fail(self, error: PdserveError) -> None:
        """Ends the process with status 1; the first error counts."""
        if self._failure is None:
            _log.error("this worker ends: %s (%s)", error.message, error.reason)
            self._failure = error
            self._failed.set()

    async def _run(self, signals: StopSignals, stack: AsyncExitStack) -> int:
        # What is entered here is left in reverse order, whatever happens.
        config = self._config
        tls = load_tls(self._tls_config)
        server = GrpcServer([SERVICE_NAME], max_message_bytes=config.max_message_bytes, tls=tls)
        port = server.bind(config.host, config.port)
        if (probed := self._worker_config.health_port) is not None:
            _log.info("health alone, without TLS, on port %d", server.bind_health(config.host, probed))
        worker_id = self._worker_config.worker_id or f"{self._role.value}-{socket.gethostname()}-{port}"
        prometheus = CollectorRegistry()
        metrics_address = None
        if config.metrics_port is not None:
            endpoint = MetricsServer(prometheus, config.host, config.metrics_port)
            stack.callback(endpoint.close)
            metrics_address = format_address(config.host, endpoint.port)
        redis = open_redis(config.redis_url)
        stack.push_async_callback(redis.aclose)
        await check_redis(redis, config.redis_url)
        tracing = Tracing(f"pdserve-{self._role.value}", worker_id, config.otlp_traces_endpoint, self._clock)
        stack.push_async_callback(tracing.shutdown, STOP_TIMEOUT_S)
        await server.start()
        stack.push_async_callback(server.stop, 0)
        context = WorkerContext(
            role=self._role,
            worker_id=worker_id,
            incarnation=self._incarnation,
            address=config.advertise_address or advertised_address(config.host, port),
            service=config,
            worker=self._worker_config,
            clock=self._clock,
            metrics=WorkerMetrics(prometheus, self._role.value),
            tracing=tracing,
            server=server.server,
            fail=self.fail,
            tls=tls,
        )
        stack.push_async_callback(self._stop_service)
        loading = asyncio.ensure_future(self._service.start(context))
        await _first_of(loading, signals.drain.wait(), self._failed.wait())
        if loading.cancelled():
            self.abandoned = True
            return 1 if self._failure else 0
        handler, loaded = loading.result()
        self._record = _record(context, loaded)
        context.metrics.set_info(worker_id=worker_id, incarnation=self._incarnation, model=loaded.model)
        ready = ready_line(
            self._role.value, grpc=format_address(config.host, port), metrics=metrics_address, data=loaded.data_address
        )
        registry = Registry(redis, config.cluster, self._clock)
        return await self._serve(context, handler, server, registry, signals, stack, ready)

    async def _serve(
        self,
        context: WorkerContext,
        handler: SessionHandler,
        server: GrpcServer,
        registry: Registry,
        signals: StopSignals,
        stack: AsyncExitStack,
        ready: str,
    ) -> int:
        sessions = SessionServer(
            handler,
            self._clock,
            router_timeout_s=self._worker_config.router_timeout_s,
            metrics=context.metrics,
        )
        worker_pb2_grpc.add_WorkerServicer_to_server(sessions, server.server)  # type: ignore[no-untyped-call]
        stack.push_async_callback(sessions.close, STOP_TIMEOUT_S)
        server.open()
        await _first_of(self._register(registry), signals.drain.wait(), self._failed.wait())
        stack.push_async_callback(self._unregister, registry)
        await stack.enter_async_context(_background(self._keep_registered(registry)))
        watchdog = await stack.enter_async_context(_background(self._watch_health(server, sessions)))
        await server.set_ready(True)
        self._announce(ready)
        await _first_of(signals.drain.wait(), self._failed.wait(), watchdog)
        self._leaving = True
        await server.set_ready(False)
        sessions.drain()
        if self._failure is None:
            await self._drain(registry, signals)
        if self._failure is not None:
            await server.set_serving("", False)
        return 1 if self._failure is not None or signals.now.is_set() else 0

    # -- parts of a life

    async def _register(self, registry: Registry) -> None:
        assert self._record is not None
        waiting = False
        while True:
            try:
                return await registry.register(self._record)
            except UnavailableError as e:
                if not waiting:
                    _log.warning("cannot register yet: %s", e.message)
                waiting = True
                await self._clock.sleep(1.0)

    async def _keep_registered(self, registry: Registry) -> None:
        await registry.keep_registered(self._current_record)

    def _current_record(self) -> WorkerRecord:
        assert self._record is not None
        return self._record

    async def _watch_health(self, server: GrpcServer, sessions: SessionServer) -> None:
        was_healthy = was_ready = True
        while True:
            healthy = self._service.healthy() and self._failure is None
            if healthy != was_healthy:
                _log.log(logging.INFO if healthy else logging.ERROR, "liveness: %s", "ok" if healthy else "failing")
                was_healthy = healthy
            await server.set_serving("", healthy)
            ready = self._service.ready()
            if ready != was_ready and not self._leaving:
                _log.log(
                    logging.INFO if ready else logging.ERROR, "readiness: %s", "ok" if ready else "takes nothing new"
                )
                was_ready = ready
                sessions.pause(not ready)
                await server.set_ready(ready)
            await self._clock.sleep(HEALTH_PERIOD_S)

    async def _drain(self, registry: Registry, signals: StopSignals) -> None:
        _log.info("draining, for %g s at most", self._config.drain_grace_s)
        self._record = replace(self._current_record(), state=DRAINING)
        try:
            await registry.refresh(self._record)
        except UnavailableError as e:
            _log.warning("the registry does not know that this worker drains: %s", e.message)
        draining = asyncio.ensure_future(self._service.drain())
        grace = self._clock.sleep(self._config.drain_grace_s)
        await _first_of(draining, signals.now.wait(), self._failed.wait(), grace)
        if draining.cancelled():
            _log.warning("drain cut short: what still ran is aborted")

    async def _unregister(self, registry: Registry) -> None:
        try:
            await registry.unregister(self._current_record())
        except UnavailableError as e:
            _log.warning("registry entry stays until it expires: %s", e.message)

    async def _stop_service(self) -> None:
        try:
            await asyncio.wait_for(self._service.stop(), STOP_TIMEOUT_S)
        except TimeoutError:
            self.stuck = True
            _log.error("the engine did not stop within %g s", STOP_TIMEOUT_S)


def run_worker(
    role: Role,
    service: WorkerService,
    service_config: ServiceConfig,
    worker_config: WorkerConfig,
    tls_config: TlsConfig | None = None,
    *,
    unheeded: Sequence[str] = (),
    uvloop: bool = True,
) -> int:
    """The body of a worker's `__main__`: runs until the end; a configuration error is one line on stderr.

    Args:
        role: See `WorkerApp`, as the next four.
        service: Of the role.
        service_config: Configuration.
        worker_config: Configuration.
        tls_config: Configuration.
        unheeded: Flags that were given and have no effect; a warning names them.
        uvloop: Whether its event loop is used.

    Returns:
        Exit status: 0 drained, 1 failed or cut short, 2 cannot start as configured.
    """
    setup_logging(service_config.log_level)
    if unheeded:
        _log.warning("no effect on a %s worker: %s", role.value, ", ".join(unheeded))
    app = WorkerApp(role, service, service_config, worker_config, tls_config)
    try:
        status = run_async(app.run(), uvloop=uvloop)
    except ConfigError as e:
        sys.stderr.write(f"pdserve {role.value}: {e.message}\n")
        status = 2
    if app.stuck or app.abandoned:
        sys.stderr.flush()
        os._exit(status or int(app.stuck))  # a thread that ends late or never would keep the process
    return status


def _record(context: WorkerContext, loaded: LoadedWorker) -> WorkerRecord:
    return WorkerRecord(
        worker_id=context.worker_id,
        role=context.role,
        incarnation=context.incarnation,
        address=context.address,
        data_address=loaded.data_address or "",
        identity_digest=loaded.identity_digest.hex(),
        layout=loaded.layout,
        model=loaded.model,
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.vocab_size,
        num_pages=loaded.num_pages,
        max_num_seqs=loaded.max_num_seqs,
    )


@asynccontextmanager
async def _background(work: Coroutine[Any, Any, None]) -> AsyncGenerator[asyncio.Task[None], None]:
    """A task that lives as long as the block."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _first_of(*work: Awaitable[Any]) -> None:
    """Waits until one is done, cancels the others; raises what a done one raised."""
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
