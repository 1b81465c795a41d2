"""The life of a worker process, the same for every role; what the role does is given as a `WorkerService`.

bind ports, metrics, store -> health: alive, NOT ready -> load -> register -> ready, READY line -> serve
SIGTERM/SIGINT -> NOT ready, registry and heartbeats say draining, new attempts refused -> drain(grace)
-> unregister -> sessions end -> stop.   A second signal skips the waiting.
The service calls `WorkerContext.fail` when its engine is dead: liveness fails and the process ends with status 1.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import grpc

from pdserve.core.clock import Clock
from pdserve.core.config import ServiceConfig, WorkerConfig
from pdserve.core.errors import PdserveError
from pdserve.core.request import Role
from pdserve.core.session import SessionHandler
from pdserve.core.telemetry import WorkerMetrics
from pdserve.core.tracing import Tracing

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
    server: grpc.aio.Server
    fail: Callable[[PdserveError], None]


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
    """

    identity_digest: bytes
    layout: str
    model: str
    max_model_len: int
    vocab_size: int
    num_pages: int
    max_num_seqs: int
    data_address: str | None = None


class WorkerService(SessionHandler, Protocol):
    """One role: what it does with messages, and how it starts and ends."""

    async def start(self, context: WorkerContext) -> LoadedWorker:
        """Loads the model and starts everything; afterwards messages may come. Long work belongs into threads.

        Raises:
            PdserveError: It cannot start; ConfigError ends the process with status 2.
        """
        ...

    def healthy(self) -> bool:
        """False when the process must be restarted (sequences run but no step ends)."""
        ...

    async def drain(self) -> None:
        """Returns when nothing runs or is leased any more. The caller bounds it; cancelled when the grace is over."""
        ...

    async def stop(self) -> None:
        """Ends engine, transfers and everything else that `start` started; also called when `start` failed."""
        ...
