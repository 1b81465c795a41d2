"""`pdserve decode`: starts a decode worker, or with `--role mixed` one that computes prompts too."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.core.config import ServiceConfig, WorkerConfig, check, load, option, run_main, without_effect
from pdserve.core.request import Role
from pdserve.core.tls import TlsConfig
from pdserve.core.worker_app import run_worker
from pdserve.decode_service.worker import DecodeWorker
from pdserve.engine.config import EngineConfig

DESCRIPTION = """Start a decode worker. It pulls the KV pages of computed prompts from prefill workers and generates
tokens; with --role mixed it computes prompts itself and needs no prefill worker. Routers find it through the store
(--redis-url). It prints one line that begins with READY when it serves."""


@dataclass(frozen=True, kw_only=True)
class RoleConfig:
    """What this worker computes."""

    role: str = option("decode", "decode: generate only; mixed: compute prompts too", choices=("decode", "mixed"))

    def __post_init__(self) -> None:
        check(self)


def main(argv: Sequence[str]) -> int:
    """Runs the worker until a signal.

    Args:
        argv: Words after "pdserve decode".

    Returns:
        Exit status, see `core.worker_app.run_worker`.
    """
    sections = {
        "Role": RoleConfig,
        "Service": ServiceConfig,
        "Worker": WorkerConfig,
        "TLS": TlsConfig,
        "Engine": EngineConfig,
    }
    role, service, worker, tls, engine = load("pdserve decode", DESCRIPTION, sections, argv)
    if role.role == Role.DECODE:
        engine.check_hand_offs()
    unheeded = without_effect(role.role, sections, argv)
    return run_worker(Role(role.role), DecodeWorker(engine), service, worker, tls, unheeded=unheeded)


if __name__ == "__main__":
    run_main("pdserve decode", lambda: main(sys.argv[1:]))
