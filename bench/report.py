"""What every bench reports: rows of name, value, unit and goal, with the command, commit, machine and seed."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pdserve.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Row:
    """One measured value.

    Attributes:
        name: What was measured.
        value: The value; None: it could not be measured (e.g. no request succeeded).
        unit: Unit of the value.
        goal: What it should be, e.g. "<= 250"; None: no goal.
    """

    name: str
    value: float | int | None
    unit: str
    goal: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The outcome of one bench.

    Attributes:
        title: Heading of the table.
        command: The words of the command line.
        seed: Seed of everything random.
        rows: The values.
        notes: Lines to print under the table: what was cut, scaled or refused.
        extra: Raw data for the JSON file.
    """

    title: str
    command: Sequence[str]
    seed: int
    rows: Sequence[Row]
    notes: Sequence[str] = ()
    extra: Mapping[str, object] = field(default_factory=dict)


def without_goals(rows: Sequence[Row]) -> list[Row]:
    """The rows of a run that is too small to be set beside goals (`--quick`)."""
    return [replace(row, goal=None) for row in rows]


def print_report(report: Report, console: Console) -> None:
    """Prints the table, with a line between groups of rows whose names begin alike, and its notes."""
    has_goal = any(row.goal for row in report.rows)
    table = Table(title=report.title, title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_column("unit")
    if has_goal:
        table.add_column("goal")
    heads = [re.split("[:,]", row.name)[0] for row in report.rows]
    sizes = Counter(heads)
    for at, row in enumerate(report.rows):
        if at and heads[at] != heads[at - 1] and max(sizes[heads[at]], sizes[heads[at - 1]]) > 2:
            table.add_section()
        cells = [row.name, _shown(row.value), row.unit]
        table.add_row(*cells, *([row.goal or ""] if has_goal else []))
    if report.rows:
        console.print(table)
    for note in report.notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def check_json(path: str | None) -> None:
    """Refuses a `--json` that could not be written, before anything is measured for it.

    Raises:
        ConfigError: Says why.
    """
    if path is None:
        return
    file = Path(path)
    if file.is_dir():
        raise ConfigError(f"--json {path}: it is a directory; name a file")
    if not file.parent.is_dir():
        raise ConfigError(f"--json {path}: there is no directory {file.parent}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"--json {path}: it cannot be written")


def write_json(report: Report, path: Path) -> None:
    """Writes the report with what is needed to repeat it.

    Raises:
        ConfigError: The file cannot be written.
    """
    document = {
        "title": report.title,
        "command": shlex.join(report.command),
        "commit": commit(),
        "machine": machine(),
        "seed": report.seed,
        "rows": [asdict(row) for row in report.rows],
        "notes": list(report.notes),
        **report.extra,
    }
    try:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"cannot write {path}: {e.strerror}") from e


def commit() -> str | None:
    """The commit of the source tree, "+changes" when it has any; None outside a repository."""
    root = Path(__file__).resolve().parent
    try:
        head = _git(root, "rev-parse", "HEAD")
        return head + ("+changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def machine() -> dict[str, object]:
    """Processor, cores usable by this process, memory, system, Python."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _shown(value: float | int | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
