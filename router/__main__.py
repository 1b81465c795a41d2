"""`pdserve router`: the process that clients talk to."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pdserve.core.config import load
from pdserve.core.errors import ConfigError
from pdserve.core.log import setup_logging
from pdserve.core.process import run_async
from pdserve.core.tls import TlsConfig
from pdserve.router.app import RouterApp
from pdserve.router.config import RouterConfig, RouterServiceConfig

DESCRIPTION = """\
Run a router: takes requests from clients, chooses workers, streams tokens back. It finds workers in Redis, so that the
order in which routers and workers start does not matter. Needs no GPU and no model weights, only the tokenizer.

  pdserve router --model DIR --redis-url redis://127.0.0.1:6379/0"""

SECTIONS = {"Service": RouterServiceConfig, "TLS": TlsConfig, "Router": RouterConfig}


def main(argv: Sequence[str]) -> int:
    """Runs the router; returns the exit status: 0 drained, 1 cut short, 2 cannot start as configured."""
    try:
        service, tls, config = load("pdserve router", DESCRIPTION, SECTIONS, argv)
        setup_logging(service.log_level)
        return run_async(RouterApp(service, config, tls).run())
    except ConfigError as e:
        sys.stderr.write(f"pdserve router: {e.message}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
