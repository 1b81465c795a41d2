"""Command-line parsing shared by the client-side commands."""

from __future__ import annotations

import argparse
import os

from pdserve.core.errors import ConfigError

DEFAULT_ROUTER = "127.0.0.1:50051"
ROUTER_ENV = "PDSERVE_ROUTER"


def add_router(parser: argparse._ActionsContainer) -> None:
    """Adds --router."""
    parser.add_argument(
        "--router",
        metavar="HOST:PORT[,HOST:PORT]",
        default=os.environ.get(ROUTER_ENV, DEFAULT_ROUTER),
        help=f"router address, or several with commas (default: {ROUTER_ENV} of the environment, or {DEFAULT_ROUTER})",
    )


def router_addresses(text: str) -> list[str]:
    """The addresses in --router.

    Raises:
        ConfigError: One is not host:port.
    """
    from pdserve.client.endpoints import Endpoints

    addresses = [a.strip() for a in text.split(",") if a.strip()]
    try:
        Endpoints(addresses)
    except ValueError as e:
        raise ConfigError(f"--router {text}: {e}") from None
    return addresses
