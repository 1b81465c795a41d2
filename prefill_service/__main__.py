"""`pdserve prefill`: starts a prefill worker."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pdserve.core.config import ServiceConfig, WorkerConfig, load, run_main, without_effect
from pdserve.core.request import Role
from pdserve.core.tls import TlsConfig
from pdserve.core.worker_app import run_worker
from pdserve.engine.config import EngineConfig
from pdserve.prefill_service.worker import PrefillWorker

DESCRIPTION = """Start a prefill worker. It computes prompts and hands their KV pages to decode workers; routers find it
through the store (--redis-url). It prints one line that begins with READY when it serves."""


def main(argv: Sequence[str]) -> int:
    """Runs the worker until a signal.

    Args:
        argv: Words after "pdserve prefill".

    Returns:
        Exit status, see `core.worker_app.run_worker`.
    """
    sections = {"Service": ServiceConfig, "Worker": WorkerConfig, "TLS": TlsConfig, "Engine": EngineConfig}
    service, worker, tls, engine = load("pdserve prefill", DESCRIPTION, sections, argv)
    unheeded = without_effect(Role.PREFILL, sections, argv)
    return run_worker(Role.PREFILL, PrefillWorker(engine.of_prefill_worker()), service, worker, tls, unheeded=unheeded)


if __name__ == "__main__":
    run_main("pdserve prefill", lambda: main(sys.argv[1:]))
