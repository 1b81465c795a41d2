"""`pdserve bench kernels`: our CPU kernels beside those of libraries that torch brings, at SmolLM2-135M's shapes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from pdserve.bench.kernels_args import KernelsConfig
from pdserve.bench.report import Report, Row, check_json, print_report, write_json
from pdserve.core.config import build_parser, from_namespace
from pdserve.core.errors import ConfigError

if TYPE_CHECKING:
    from pdserve.bench.kernels_timing import Timed

DESCRIPTION = """\
Time our packed linears (fp32, int8) and attention beside oneDNN, MKL, FBGEMM, SDPA and FlexAttention as torch has
them: all linears, or the attention of all layers, of one step of SmolLM2-135M. Let nothing else run.

  pdserve bench kernels --quick                       see that it works; its numbers mean nothing
  pdserve bench kernels --json kernels.json           the comparison, some two minutes and 3 GB
"""
QUICK_LAYERS = 2


def main(argv: Sequence[str]) -> int:
    """Runs `pdserve bench kernels`; returns the exit status."""
    sections = {"Comparison": KernelsConfig}
    (config,) = from_namespace(sections, build_parser("pdserve bench kernels", DESCRIPTION, sections).parse_args(argv))
    check_json(config.json)
    progress = Console(stderr=True)
    timed, notes = measure(config, progress)
    console = Console() if sys.stdout.isatty() else Console(width=140)
    for kind, title in (("linears", "all linears of one step"), ("", "attention of one step, all layers")):
        rows = [t for t in timed if t.case.startswith("linears") == bool(kind)]
        console.print(_table(title, rows))
    report = Report(
        title="our time by that of the fastest of the others",
        command=["pdserve", "bench", "kernels", *argv],
        seed=config.seed,
        rows=_shares(timed),
        notes=notes,
        extra={"timed": [asdict(t) for t in timed]},
    )
    print_report(report, console)
    if config.json:
        write_json(report, Path(config.json))
    return 0


def measure(config: KernelsConfig, progress: Console) -> tuple[list[Timed], list[str]]:
    """Times all contenders.

    Args:
        config: What to compute.
        progress: Told about every step.

    Returns:
        The times, and lines about what could not take part.

    Raises:
        ConfigError: There are no compiled kernels here to compare.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in a worker; read when torch is loaded
    import torch

    from pdserve.bench import kernels_attention, kernels_linears
    from pdserve.kernels.cpu import library

    if reason := library.why_not():
        raise ConfigError(f"there are no compiled CPU kernels to compare: {reason}")
    torch.manual_seed(config.seed)
    rows, threads, rounds = config.row_counts(), config.thread_counts(), config.rounds()
    num_layers = QUICK_LAYERS if config.quick else kernels_linears.NUM_LAYERS
    cases = kernels_attention.QUICK_CASES if config.quick else kernels_attention.CASES

    def say(text: str) -> None:
        progress.print(text, markup=False, highlight=False)

    linears, missing = kernels_linears.measure(num_layers, rows, threads, rounds, say)
    attention, also_missing = kernels_attention.measure(
        num_layers, cases, threads, rounds, config.flex_attention and not config.quick, say
    )
    return [*linears, *attention], [*missing, *also_missing]


def _is_ours(timed: Timed) -> bool:
    return timed.name in ("pdserve", "pdserve int8")


def _rivals(one: Timed, timed: Sequence[Timed]) -> list[Timed]:
    """What a library offers for the same work: int8 beside int8. The torch reference is ours as well."""
    return [
        other
        for other in timed
        if (other.case, other.threads) == (one.case, one.threads)
        and ("int8" in other.name) == ("int8" in one.name)
        and not other.name.startswith("pdserve")
    ]


def _shares(timed: Sequence[Timed]) -> list[Row]:
    rows = []
    for one in filter(_is_ours, timed):
        if rivals := _rivals(one, timed):
            best = min(rivals, key=lambda other: other.ms)
            kind = "int8 " if "int8" in one.name else ""
            threads = f"{one.threads} thread{'s' if one.threads > 1 else ''}"
            rows.append(Row(f"{kind}{one.case}, {threads}: by {best.name}", one.ms / best.ms, "x", "<= 1"))
    return rows


def _table(title: str, timed: Sequence[Timed]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("case")
    for name in ("threads", "by"):
        table.add_column(name)
    for name in ("ms", "GFLOP/s", "GB/s", "by pdserve's time", "relative error"):
        table.add_column(name, justify="right")
    for at, one in enumerate(timed):
        if at and (one.case, one.threads) != (timed[at - 1].case, timed[at - 1].threads):
            table.add_section()
        same = [t for t in timed if (t.case, t.threads) == (one.case, one.threads) and _is_ours(t)]
        ours = next((t for t in same if ("int8" in t.name) == ("int8" in one.name)), None)
        table.add_row(
            one.case,
            str(one.threads),
            one.name,
            f"{one.ms:.2f}",
            f"{one.flops / one.ms / 1e6:.1f}",
            f"{one.read_bytes / one.ms / 1e6:.1f}",
            "" if ours is None else f"{one.ms / ours.ms:.2f}",
            "" if one.error is None else f"{one.error:.1e}",
        )
    return table
