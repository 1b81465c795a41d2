"""`pdserve fetch-model`: puts a model into the cache and prints its directory (for init containers and newcomers)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from pdserve.cli.progress import RichProgress


def main(argv: Sequence[str]) -> int:
    """Runs `pdserve fetch-model`; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="pdserve fetch-model",
        allow_abbrev=False,
        description="Fetch a model, check it, convert it once, and print the directory that holds it. "
        "The cache is ${PDSERVE_CACHE:-~/.cache/pdserve}/models.",
    )
    parser.add_argument(
        "--model",
        default="SmolLM2-135M-Instruct",
        help="the built-in SmolLM2-135M-Instruct, a hub id, or a local directory to check (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    from pdserve.engine.model_store import resolve_model

    with RichProgress(Console(stderr=True)) as progress:
        directory = resolve_model(args.model, progress)
    sys.stdout.write(f"{directory}\n")
    return 0
