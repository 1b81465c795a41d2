"""`pdserve bench engine`: what the engine's policies are worth, one experiment at a time, inside this process.

An experiment is a module with `OPTIONS` (a configuration dataclass), `DEFAULTS` and `QUICK` (values of options where
the experiment's, or the ones of `--quick`, differ from the usual) and `run(options, setting) -> Findings`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from rich.console import Console

from pdserve.bench.engine_lab import Findings, Setting
from pdserve.bench.report import Report, check_json, print_report, without_goals, write_json
from pdserve.core.config import ENV_PREFIX, build_parser, check, from_namespace, option
from pdserve.engine.config import EngineConfig

EXPERIMENTS = {
    "batching": ("pdserve.bench.engine_batching", "continuous, dynamic and static batching, beside slot arithmetic"),
    "reservation": ("pdserve.bench.engine_reservation", "KV memory: paged on demand, maximum length, buddy blocks"),
    "scheduler": ("pdserve.bench.engine_scheduler", "CPU time of schedule and update; 100,000 sequences"),
    "runs": ("pdserve.bench.engine_runs", "pages of a prompt that follow each other, by how full the pool is"),
    "prefix": ("pdserve.bench.engine_prefix", "a conversation's turns; what the prefix cache costs without reuse"),
    "interference": ("pdserve.bench.engine_interference", "decodes while long prompts arrive, chunked and not"),
    "swap": ("pdserve.bench.engine_swap", "swap against recompute of a preempted sequence, and what the costs choose"),
}

QUICK_NOTE = "--quick: it works; its numbers mean nothing, and none is set beside a goal"


class Experiment(Protocol):
    """What an experiment's module has."""

    OPTIONS: type
    DEFAULTS: Mapping[str, object]
    QUICK: Mapping[str, object]

    def run(self, options: Any, setting: Setting) -> Findings:
        """Runs it."""
        ...


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What every experiment takes."""

    quick: bool = option(False, "a small size, to see that it works; its numbers mean little")
    repeats: int = option(3, "interleaved runs; medians are reported", unit="runs", minimum=1)
    seed: int = option(0, "seed of everything random", minimum=0)
    json: str | None = option(None, "write the report to this file", unit="file")

    def __post_init__(self) -> None:
        check(self)


def main(argv: Sequence[str]) -> int:
    """Runs `pdserve bench engine <experiment> ...`; returns the exit status."""
    if not argv or argv[0] not in EXPERIMENTS:
        asked = bool(argv) and argv[0] in ("-h", "--help")
        names = "\n".join(f"  {name:<13} {text}" for name, (_, text) in EXPERIMENTS.items())
        unknown = "" if asked or not argv else f"pdserve bench engine: unknown experiment '{argv[0]}'\n"
        usage = f"usage: pdserve bench engine <experiment> [options]\n\n{names}\n\nexample:\n"
        text = f"{unknown}{usage}  pdserve bench engine scheduler --quick\n"
        (sys.stdout if asked else sys.stderr).write(text)
        return 0 if asked else 2
    name, *rest = argv
    module, description = EXPERIMENTS[name]
    experiment = cast(Experiment, importlib.import_module(module))
    sections = {"Bench": BenchOptions, "Experiment": experiment.OPTIONS, "Engine": EngineConfig}
    namespace = build_parser(f"pdserve bench engine {name}", description, sections).parse_args(rest)
    defaults = {**experiment.DEFAULTS, **(experiment.QUICK if namespace.quick else {})}
    environ = {ENV_PREFIX + key.upper(): str(value) for key, value in defaults.items()}
    bench, options, engine = from_namespace(sections, namespace, {**environ, **os.environ})
    check_json(bench.json)
    console = Console(stderr=True)
    setting = Setting(
        engine=engine,
        seed=bench.seed,
        repeats=bench.repeats,
        say=lambda text: console.print(text, markup=False, highlight=False),
    )
    found = experiment.run(options, setting)
    report = Report(
        title=found.title,
        command=["pdserve", "bench", "engine", *argv],
        seed=bench.seed,
        rows=without_goals(found.rows) if bench.quick else found.rows,
        notes=[*found.notes, *([QUICK_NOTE] if bench.quick else [])],
        extra=found.extra,
    )
    print_report(report, Console())
    if bench.json:
        write_json(report, Path(bench.json))
    return 0
