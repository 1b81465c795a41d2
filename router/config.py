"""RouterConfig: what a router is told beside `core.config.ServiceConfig`."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.core.config import ServiceConfig, check, option
from pdserve.core.errors import ConfigError

DEFAULT_PORT = 50051


@dataclass(frozen=True, kw_only=True)
class RouterServiceConfig(ServiceConfig):
    """`ServiceConfig` with the port that clients know."""

    port: int = option(DEFAULT_PORT, "gRPC port; 0 picks a free one", minimum=0, maximum=65535)


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Model, queue limits and time-outs of one router."""

    model: str = option(
        "SmolLM2-135M-Instruct",
        "model whose tokenizer is used: a local directory, a hub id, a GGUF file, or the built-in one",
    )
    served_model_name: str | None = option(None, "name that clients ask for; default: the last part of --model")
    router_id: str | None = option(None, "stable name of this router; default: router, host name and port")
    routing_policy: str = option("least-loaded", "how workers are chosen", choices=("least-loaded",))
    max_queue: int = option(4096, "requests open at once, at most; more are refused", unit="requests", minimum=1)
    queue_timeout_s: float = option(60.0, "time that a request may wait for a worker", unit="s", minimum=0)
    no_worker_timeout_s: float = option(
        5.0, "time that a request may wait while no worker could take it at all", unit="s", minimum=0
    )
    heartbeat_s: float = option(1.0, "time between signs of life on a worker session", unit="s", minimum=0.05)
    worker_timeout_s: float = option(3.0, "a worker silent for this long is taken for dead", unit="s", minimum=0.1)
    record_ttl_s: int = option(3600, "time that the record of an ended request is kept", unit="s", minimum=1)
    allow_decode_prefill: bool = option(
        False, "let decode workers compute prompts themselves when no prefill worker is alive"
    )

    def __post_init__(self) -> None:
        check(self)
        if self.worker_timeout_s < 2 * self.heartbeat_s:
            raise ConfigError(
                f"--worker-timeout-s is {self.worker_timeout_s:g} and --heartbeat-s {self.heartbeat_s:g}: give a "
                "worker time for two signs of life at least"
            )
