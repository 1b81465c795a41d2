"""Command-line parsing shared by the client-side commands."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from typing import NoReturn

from pdserve.core.errors import ConfigError

DEFAULT_ROUTER = "127.0.0.1:50051"
ROUTER_ENV = "PDSERVE_ROUTER"


class Parser(argparse.ArgumentParser):
    """An argument parser whose refusals say what to do: a close flag, and where the help is."""

    def __init__(self, prog: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """Exits with status 2."""
        known = list(self._option_string_actions)
        flags = [f for f in re.findall(r"--[\w-]+", message) if f not in known]
        close = [c for f in flags for c in difflib.get_close_matches(f, known, n=1)]
        hint = f"did you mean {' '.join(close)}? " if close else ""
        self.exit(2, f"{self.prog}: {message}\n{hint}Try '{self.prog} --help'.\n")


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
