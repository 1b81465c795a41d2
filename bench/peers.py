"""`pdserve bench peers`: pdserve beside other servers, on the same machine, weights, prompts, lengths and cores.

One system runs at a time: a round starts, measures and ends each of them in turn, so that what changes on the machine
meets all of them. Peers live in environments of their own (`peers_env`); one that cannot be built is reported.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic as now

from rich.console import Console

from pdserve.bench import peers_report
from pdserve.bench.peers_args import PeersConfig, Suite, chosen_suites
from pdserve.bench.peers_limits import Limits
from pdserve.bench.peers_measure import Conditions, Level, Run, run_system
from pdserve.bench.peers_prepare import measure_limits, num_params, prepare
from pdserve.bench.peers_process import sigterm_as_interrupt
from pdserve.bench.peers_systems import Place, systems
from pdserve.bench.report import Report, Row, check_json, print_report, without_goals, write_json
from pdserve.core.config import build_parser, from_namespace
from pdserve.core.tokenizer import Tokenizer
from pdserve.engine.model_store import resolve_model

DESCRIPTION = """\
Compare pdserve, as one MIXED worker and as 1 prefill + 1 decode worker, with other servers on this machine:
transformers (static and continuous batches), vLLM for CPUs, and llama.cpp's server (F32 and Q8_0 of the same weights).
Every peer gets an environment of its own below the cache directory, built at its first use: that takes long, and
--build-only does it ahead.

  pdserve bench peers --build-only                     build the environments, start every system once
  pdserve bench peers --quick                          see that all of it works; its numbers mean little
  pdserve bench peers --json peers.json                the comparison
  pdserve bench peers --suite disaggregation           vLLM's prefill and decode instances against ours
"""
MIN_WIDTH = 140
QUESTION = "The capital of France is"


def main(argv: Sequence[str]) -> int:
    """Runs `pdserve bench peers`; returns 0 when every system that was built was measured, else 1."""
    sections = {"Comparison": PeersConfig}
    (config,) = from_namespace(sections, build_parser("pdserve bench peers", DESCRIPTION, sections).parse_args(argv))
    console = Console(stderr=True)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    suites = chosen_suites(config, systems())
    check_json(config.json)
    with sigterm_as_interrupt(), tempfile.TemporaryDirectory(prefix="pdserve-peers-") as scratch:
        model = resolve_model(config.model)
        place, unbuilt = prepare(config, model, suites, Path(scratch), say)
        limits = None if config.build_only else measure_limits(place)
        for suite in suites:
            suite.systems = [s for s in suite.systems if s.name not in unbuilt]
            run_suite(suite, config, place, say)
    report = _report(config, suites, unbuilt, limits, model, [*argv])
    _print(suites, report)
    if config.json:
        write_json(report, Path(config.json))
    return 1 if any(run.failure for suite in suites for run in suite.runs) else 0


def run_suite(suite: Suite, config: PeersConfig, place: Place, say: Callable[[str], None]) -> None:
    """Runs the rounds of a suite; every second one in the reverse order. Fills `runs` and `notes`."""
    began, first_round_s = now(), 0.0
    shared = conditions(config, suite, place)
    rounds = 1 if config.quick or config.build_only else config.repeats
    for round_ in range(rounds):
        if round_ and now() - began + first_round_s > config.max_minutes * 60:
            suite.notes.append(
                f"{suite.name}: {round_} of {rounds} rounds, for --max-minutes is {config.max_minutes:g}"
            )
            return
        ordered = [s for s in suite.systems if not (round_ and s.slow)][:: -1 if round_ % 2 else 1]
        for system in ordered:
            if now() - began > config.max_minutes * 60:
                suite.notes.append(f"{suite.name}: {system.name} was left out of round {round_ + 1}: no time left")
                continue
            scratch = place.scratch / f"{suite.name}-{round_}-{system.name}"
            scratch.mkdir()
            started = now()
            run = run_system(system, replace(place, scratch=scratch), shared, round_)
            suite.runs.append(run)
            first_round_s += 0.0 if round_ or system.slow else now() - started
            say(f"[{suite.name}, round {round_ + 1}] {_line(run, now() - started)}")
            shutil.rmtree(scratch, ignore_errors=True)
    if rounds > 1 and (slow := [s.name for s in suite.systems if s.slow]):
        suite.notes.append(f"{suite.name}: {', '.join(slow)} in the first round only")


def conditions(config: PeersConfig, suite: Suite, place: Place) -> Conditions:
    """What is the same for all systems of a suite."""
    tokenizer = Tokenizer.from_dir(place.model)
    levels = (Level(concurrency=1, num_prompts=1),) if config.build_only else suite.levels
    return Conditions(
        levels=levels,
        vocab_size=int(json.loads((place.model / "config.json").read_text())["vocab_size"]),
        question=tuple(tokenizer.encode(QUESTION)),
        seed=config.seed,
        start_timeout_s=config.start_timeout_s,
        load_timeout_s=config.load_timeout_s,
    )


def _line(run: Run, seconds: float) -> str:
    levels = ", ".join(f"{m.tokens_per_s:.1f} tokens/s at {c}" for c, m in run.levels.items())
    ready = "never ready" if run.ready_s is None else f"ready after {run.ready_s:.1f} s"
    failure = f"; FAILED: {run.failure}" if run.failure else ""
    return f"{run.system}: {ready}{', ' + levels if levels else ''} ({seconds:.0f} s){failure}"


def _report(
    config: PeersConfig,
    suites: Sequence[Suite],
    unbuilt: Mapping[str, str],
    limits: Limits | None,
    model: Path,
    argv: Sequence[str],
) -> Report:
    rows: list[Row] = []
    notes: list[str] = []
    for suite in suites:
        found = peers_report.summaries(suite.runs)
        if suite.name == "peers" and not config.build_only:
            rows += peers_report.peer_rows(found, {level.concurrency for level in suite.levels})
            if limits is not None:
                rows += peers_report.limit_rows(found, limits, num_params(model), suite.levels)
        elif not config.build_only:
            rows += peers_report.disaggregation_rows(found, suite.levels[0].concurrency)
        notes += [*suite.notes, *peers_report.answer_notes(found), *peers_report.failure_notes(found)]
    notes += [f"{name} could not be built: {reason}" for name, reason in unbuilt.items()]
    return Report(
        title="starts" if config.build_only else "values" if config.quick else "goals",
        command=["pdserve", "bench", "peers", *argv],
        seed=config.seed,
        rows=without_goals(rows) if config.quick else rows,
        notes=notes,
        extra={
            "limits": None if limits is None else asdict(limits),
            "cores": config.usable_cores(),
            "suites": {
                s.name: {"levels": [asdict(x) for x in s.levels], "runs": [asdict(r) for r in s.runs]} for s in suites
            },
        },
    )


def _print(suites: Sequence[Suite], report: Report) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = MIN_WIDTH
    for suite in suites:
        found = peers_report.summaries(suite.runs)
        console.print(f"\nsuite {suite.name}", highlight=False)
        for level in suite.levels:
            if any(level.concurrency in summary.levels for summary in found.values()):
                console.print(peers_report.level_table(found, level))
        console.print(peers_report.start_table(found))
    if report.rows:
        print_report(report, console)
    else:
        for note in report.notes:
            console.print(note, markup=False, highlight=False, soft_wrap=True)
