"""`pdserve fetch-model`: puts a model into the cache and prints its directory (for init containers and newcomers)."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

from pdserve.cli.progress import RichProgress
from pdserve.core.config import Parser
from pdserve.core.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    """Runs `pdserve fetch-model`; returns the exit status."""
    parser = Parser(
        "pdserve fetch-model",
        "Fetch a model, check it, convert it once, and print the directory that holds it.\n"
        "The built-in model and what is made of GGUF files are kept in $PDSERVE_CACHE/models (default:\n"
        "~/.cache/pdserve/models), others where the hub's client keeps them.",
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        default="SmolLM2-135M-Instruct",
        help="the built-in SmolLM2-135M-Instruct, a hub id, a GGUF file, or a directory (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    from pdserve.engine.model_store import resolve_model
    from pdserve.engine.models.headers import check_files

    with RichProgress(Console(stderr=True)) as progress:
        directory = resolve_model(args.model, progress)
    try:
        check_files(directory)
    except ConfigError as e:  # found, but not whole: no wrong configuration
        sys.stderr.write(f"pdserve fetch-model: {e.message} ({e.reason})\n")
        return 1
    sys.stdout.write(f"{directory}\n")
    return 0
