"""`pdserve bench transfer`: how fast KV pages move between two processes, beside memcpy and bare sockets."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pdserve.bench.report import Report, Row, print_report, write_json
from pdserve.bench.transfer_args import INTEGRITIES, TransferConfig
from pdserve.bench.transfer_methods import Case, Moved, methods
from pdserve.bench.transfer_source import PLANES, TLS_PLANE, make_pool
from pdserve.core.config import build_parser, from_namespace
from pdserve.core.errors import ConfigError
from pdserve.core.tls import TlsConfig, load_tls

DESCRIPTION = """\
Move pages from the pool of one process into the pool of another by every data plane, with and without checksums,
beside one copy inside a process (memcpy) and sendall/recv_into over a bare socket.

  pdserve bench transfer --quick                       see that it works; its numbers mean little
  pdserve bench transfer --json transfer.json          the comparison
  pdserve bench transfer --planes tcp --page-kib 256   one plane, one size of page

With the files of TLS (pdserve certs makes some) the plane tcp+tls is measured, too.
"""
Runs = dict[Case, dict[str, list[Moved]]]
GOALS = (
    ("shm, none", "memcpy", 0.8),
    ("shm, host", "memcpy", 0.5),
    ("tcp, none", "bare sockets", 0.85),
    ("tcp, host", "bare sockets", 0.7),
)
"""Method, what it is compared with, and the share of its rate that it should reach."""


def main(argv: Sequence[str]) -> int:
    """Runs `pdserve bench transfer`; returns the exit status."""
    sections = {"Comparison": TransferConfig, "TLS": TlsConfig}
    config, files = from_namespace(
        sections, build_parser("pdserve bench transfer", DESCRIPTION, sections).parse_args(argv)
    )
    planes = _planes(config.planes, files)
    load_tls(files)
    progress = Console(stderr=True)
    runs = asyncio.run(measure(config, files, planes, lambda text: progress.print(text, markup=False, highlight=False)))
    console = Console()
    for title, shown in (("GB/s", _rate), ("processor seconds per GB, both processes", _cpu_s_per_gb)):
        console.print(_table(title, runs, shown))
    report = Report(
        title="shares, over all cases",
        command=["pdserve", "bench", "transfer", *argv],
        seed=config.seed,
        rows=_shares(runs),
        notes=_notes(config, runs),
        extra={"cases": _raw(runs)},
    )
    print_report(report, console)
    if config.json:
        write_json(report, Path(config.json))
    return 0


async def measure(config: TransferConfig, files: TlsConfig, planes: Sequence[str], say: Callable[[str], None]) -> Runs:
    """Runs every case by every method, interleaved; the first run of a case only warms it up."""
    runs: Runs = {}
    for page_bytes in config.page_sizes():
        pool = make_pool(page_bytes, max(config.totals()) // page_bytes)
        found = methods(planes, INTEGRITIES, pool, config.timeout_s, files)
        try:
            for total in config.totals():
                for scattered in (False, True):
                    case = Case(page_bytes, total // page_bytes, scattered)
                    say(_name(case))
                    runs[case] = {name: [] for name in found}
                    for round_ in range(config.rounds() + 1):
                        for name, method in found.items():
                            moved = await method.move(case, config.seed)
                            if round_:
                                runs[case][name].append(moved)
        finally:
            for method in found.values():
                await method.close()
            pool.close()
    return runs


def _planes(wanted: str, files: TlsConfig) -> list[str]:
    known = [*PLANES, TLS_PLANE] if files.enabled else list(PLANES)
    chosen = known if wanted == "all" else [name for name in wanted.split(",") if name]
    if TLS_PLANE in chosen and not files.enabled:
        raise ConfigError(f"--planes: {TLS_PLANE} needs --tls-cert-file, --tls-key-file and --tls-ca-file")
    if unknown := [name for name in chosen if name not in known]:
        raise ConfigError(f"--planes: unknown {', '.join(unknown)}; known: all, {', '.join(PLANES)}, {TLS_PLANE}")
    return chosen


def _rate(case: Case, moved: Moved) -> float:
    return case.page_bytes * case.num_pages / moved.wall_s / 1e9


def _cpu_s_per_gb(case: Case, moved: Moved) -> float:
    return moved.cpu_s / (case.page_bytes * case.num_pages / 1e9)


def _median(case: Case, runs: Sequence[Moved], value: Callable[[Case, Moved], float]) -> float:
    return statistics.median(value(case, moved) for moved in runs)


def _name(case: Case) -> str:
    return f"{case.page_bytes * case.num_pages >> 20} MiB, pages of {case.page_bytes >> 10} KiB, {_order(case)}"


def _order(case: Case) -> str:
    return "scattered" if case.scattered else "in a row"


def _table(title: str, runs: Runs, value: Callable[[Case, Moved], float]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("MiB", "page, KiB", "order", *next(iter(runs.values()))):
        table.add_column(name, justify="right")
    for case, by_method in runs.items():
        sizes = f"{case.page_bytes * case.num_pages >> 20}", f"{case.page_bytes >> 10}"
        table.add_row(*sizes, _order(case), *(f"{_median(case, moved, value):.2f}" for moved in by_method.values()))
    return table


def _shares(runs: Runs) -> list[Row]:
    """Rates beside what bounds them: the median of the cases, and the worst."""
    rows = []
    for name, base, goal in GOALS:
        shares = [
            _median(case, by_method[name], _rate) / _median(case, by_method[base], _rate)
            for case, by_method in runs.items()
            if name in by_method
        ]
        if shares:
            rows.append(Row(f"{name} ÷ {base}, median of the cases", statistics.median(shares), "x", f">= {goal:g}"))
            rows.append(Row(f"{name} ÷ {base}, the worst case", min(shares), "x"))
    return rows


def _notes(config: TransferConfig, runs: Runs) -> list[str]:
    hashed = [
        case.page_bytes * case.num_pages / moved.hash_s / 1e9
        for case, by_method in runs.items()
        for moves in by_method.values()
        for moved in moves
        if moved.hash_s
    ]
    notes = [
        f"medians of {config.rounds()} interleaved runs; none, host: --kv-integrity; GB are 10^9 bytes",
        "bare sockets and memcpy (contiguous) move one run of bytes, whatever the size of the page",
    ]
    if hashed:
        rate = f"{statistics.median(hashed):.1f} GB/s"
        notes.append(f"host: the source hashes each page once, before the transfer, at {rate}: not in these times")
    return notes


def _raw(runs: Runs) -> list[Mapping[str, object]]:
    return [
        {
            "page_bytes": case.page_bytes,
            "num_pages": case.num_pages,
            "scattered": case.scattered,
            "method": name,
            "gb_per_s": [_rate(case, moved) for moved in moves],
            "cpu_s_per_gb": [_cpu_s_per_gb(case, moved) for moved in moves],
        }
        for case, by_method in runs.items()
        for name, moves in by_method.items()
    ]
