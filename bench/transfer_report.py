"""What `pdserve bench transfer` makes of its runs: tables, shares and notes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.table import Table

from pdserve.bench.report import Row
from pdserve.bench.transfer_libraries import LIBRARIES
from pdserve.bench.transfer_methods import Case, Moved

Runs = dict[Case, dict[str, list[Moved]]]
Value = Callable[[Case, Moved], float]

GOALS = (
    ("shm, none", "memcpy", 0.8),
    ("shm, host", "memcpy", 0.5),
    ("tcp, none", "bare sockets", 0.85),
    ("tcp, host", "bare sockets", 0.7),
    *((f"{name}, host", f"bare {name}, {integrity}", 0.9) for name in LIBRARIES for integrity in ("host", "none")),
)
"""Method, what it is compared with, and the share of its rate that it should reach."""


def keep(runs: dict[str, list[Moved]], name: str, moved: Moved) -> None:
    """Adds a run; what was verified afterwards is a method of its own."""
    if moved.verified is None:
        runs.setdefault(name, []).append(moved)
    else:
        runs.setdefault(f"{name}, none", []).append(moved)
        runs.setdefault(f"{name}, host", []).append(moved.verified)


def rate(case: Case, moved: Moved) -> float:
    """GB/s."""
    return case.page_bytes * case.num_pages / moved.wall_s / 1e9


def cpu_s_per_gb(case: Case, moved: Moved) -> float:
    """Processor seconds of both processes per GB."""
    return moved.cpu_s / (case.page_bytes * case.num_pages / 1e9)


def name_of(case: Case) -> str:
    """A case in words."""
    return f"{case.page_bytes * case.num_pages >> 20} MiB, pages of {case.page_bytes >> 10} KiB, {_order(case)}"


def tables(runs: Runs) -> list[Table]:
    """Of each case: pdserve's own planes beside what bounds them, then libraries bare and under pdserve."""
    names = list(dict.fromkeys(name for by_method in runs.values() for name in by_method))
    of_libraries = [name for name in names if name.removeprefix("bare ").partition(",")[0] in LIBRARIES]
    own = [name for name in names if name not in of_libraries]
    values = (("GB/s", rate), ("processor seconds per GB, both processes", cpu_s_per_gb))
    found = list[Table]()
    for shown in (own, of_libraries):
        found += [_table(title, runs, shown, value) for title, value in values if shown]
        columns = {f"{name} ÷ {base}": _shares(runs, name, base) for name, base, _ in GOALS if name in shown}
        if columns := {what: by_case for what, by_case in columns.items() if by_case}:
            found.append(_table_of("shares", runs, columns))
    return found


def shares(runs: Runs) -> list[Row]:
    """Rates beside what bounds them: the median of the cases, and the worst."""
    rows = []
    for name, base, goal in GOALS:
        if found := list(_shares(runs, name, base).values()):
            rows.append(Row(f"{name} ÷ {base}, median of the cases", statistics.median(found), "x", f">= {goal:g}"))
            rows.append(Row(f"{name} ÷ {base}, the worst case", min(found), "x"))
    return rows


def notes(rounds: int, runs: Runs) -> list[str]:
    """What a reader must know."""
    hashed = [
        case.page_bytes * case.num_pages / moved.hash_s / 1e9
        for case, by_method in runs.items()
        for moves in by_method.values()
        for moved in moves
        if moved.hash_s
    ]
    found = [
        f"medians of {rounds} interleaved runs; none, host: --kv-integrity; GB are 10^9 bytes",
        "bare sockets and memcpy (contiguous) move one run of bytes, whatever the size of the page",
    ]
    if any(name in method for by_method in runs.values() for method in by_method for name in LIBRARIES):
        found.append(
            "bare nixl, mooncake: the library used directly, one read of all pages; host: and then every page is "
            "hashed. pdserve refuses these planes without checksums, so its plane has no none: beside bare, host like "
            "stands with like"
        )
    if hashed:
        rate_ = f"{statistics.median(hashed):.1f} GB/s"
        found.append(f"host: the source hashes each page once, before the transfer, at {rate_}: not in these times")
    return found


def raw(runs: Runs) -> list[Mapping[str, object]]:
    """Every run, for the JSON file."""
    return [
        {
            "page_bytes": case.page_bytes,
            "num_pages": case.num_pages,
            "scattered": case.scattered,
            "method": name,
            "gb_per_s": [rate(case, moved) for moved in moves],
            "cpu_s_per_gb": [cpu_s_per_gb(case, moved) for moved in moves],
        }
        for case, by_method in runs.items()
        for name, moves in by_method.items()
    ]


def _median(case: Case, runs: Sequence[Moved], value: Value) -> float:
    return statistics.median(value(case, moved) for moved in runs)


def _shares(runs: Runs, name: str, base: str) -> dict[Case, float]:
    """The rate of a method in parts of another's, for each case that has both."""
    return {
        case: _median(case, by_method[name], rate) / _median(case, by_method[base], rate)
        for case, by_method in runs.items()
        if by_method.get(name) and by_method.get(base)
    }


def _order(case: Case) -> str:
    return "scattered" if case.scattered else "in a row"


def _table(title: str, runs: Runs, names: Sequence[str], value: Value) -> Table:
    columns = {
        name: {case: _median(case, by_method[name], value) for case, by_method in runs.items() if by_method.get(name)}
        for name in names
    }
    return _table_of(title, runs, columns)


def _table_of(title: str, cases: Iterable[Case], columns: Mapping[str, Mapping[Case, float]]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("MiB", "page, KiB", "order", *columns):
        table.add_column(name, justify="right")
    for case in cases:
        sizes = f"{case.page_bytes * case.num_pages >> 20}", f"{case.page_bytes >> 10}"
        cells = (f"{found[case]:.2f}" if case in found else "-" for found in columns.values())
        table.add_row(*sizes, _order(case), *cells)
    return table
