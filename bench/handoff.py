"""`pdserve bench handoff`: what handing a request from prefill to decode takes, on a real deployment that is idle."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pdserve.bench.handoff_args import HandoffConfig
from pdserve.bench.handoff_measure import chosen_planes, measure_plane
from pdserve.bench.handoff_numbers import (
    ALLOWED_EXTRA_S,
    ALLOWED_FACTOR,
    Group,
    NotHandedOff,
    exposed_share,
    hidden_share,
    pull_share,
    rows,
    second_token,
)
from pdserve.bench.peers_process import SystemFailed, sigterm_as_interrupt
from pdserve.bench.report import Report, Row, check_json, print_report, without_goals, write_json
from pdserve.core.config import build_parser, from_namespace
from pdserve.core.errors import PdserveError

DESCRIPTION = """\
Start store, router, one prefill and one decode worker for each data plane, send prompts one at a time, and show how
long the decode worker waits for the pages of a computed prompt, what that makes of the gap between the first two
tokens, and how much of the transfer ran while the prompt was still computed. Let nothing else run.

  pdserve bench handoff --quick                     see that it works; its numbers mean little
  pdserve bench handoff --json handoff.json         128 to 4,000 tokens, at most 8 minutes
  pdserve bench handoff --planes tcp --prompt-len 2048 --repeats 20
"""
MIN_WIDTH = 180
NOTES = (
    f"manifest to VALID: until the first decode step begins; allowed: {ALLOWED_FACTOR:g} x the last range on the bare "
    f"plane (as pdserve bench transfer moves it: same size, same run, with checksums) + {ALLOWED_EXTRA_S * 1000:g} ms",
    "gap: between tokens 1 and 2; ITL: mean of the later gaps; 2nd: gap ÷ ITL - 1; exposed: manifest to VALID",
    "pulls ÷ E2E: time in which pages moved; hidden: its part before the manifest came",
    "published (Splitwise, on its GPUs): 0.8 % of E2E, second token + 16.5 %",
)


def main(argv: Sequence[str]) -> int:
    """Runs `pdserve bench handoff`; returns 0 when every plane was measured, else 1."""
    sections = {"Measurement": HandoffConfig}
    parser = build_parser("pdserve bench handoff", DESCRIPTION, sections)
    (config,) = from_namespace(sections, parser.parse_args(argv))
    planes = chosen_planes(config.planes)
    check_json(config.json)
    progress = Console(stderr=True)

    def say(text: str) -> None:
        progress.print(text, markup=False, highlight=False, soft_wrap=True)

    groups, notes, failed = measure(config, planes, say)
    console = Console()
    if not console.is_terminal:
        console.width = MIN_WIDTH
    if groups:
        console.print(table(groups, with_goals=not config.quick))
    report = Report(
        title="values" if config.quick else "goals",
        command=["pdserve", "bench", "handoff", *argv],
        seed=config.seed,
        rows=without_goals(rows(groups)) if config.quick else rows(groups),
        notes=[*notes, *failed, *NOTES],
        extra={"groups": [_raw(group) for group in groups]},
    )
    print_report(report if config.quick else _goals(report), console)
    if config.json:
        write_json(report, Path(config.json))
    return 1 if failed else 0


def measure(
    config: HandoffConfig, planes: Sequence[str], say: Callable[[str], None]
) -> tuple[list[Group], list[str], list[str]]:
    """Measures plane after plane; each gets an even share of the time that is left.

    Returns:
        What was measured, notes on it, and why planes could not be.
    """
    groups: list[Group] = []
    notes: list[str] = []
    failed: list[str] = []
    end_s = time.monotonic() + config.max_minutes * 60
    with sigterm_as_interrupt(), tempfile.TemporaryDirectory(prefix="pdserve-handoff-") as scratch:
        for at, plane in enumerate(planes):
            now = time.monotonic()
            directory = Path(scratch) / plane
            directory.mkdir()
            try:
                found, said = measure_plane(
                    plane, config, directory, now + max(0.0, end_s - now) / (len(planes) - at), say
                )
            except (SystemFailed, NotHandedOff, PdserveError) as e:
                failed.append(f"{plane}: FAILED: {e}")
                say(failed[-1])
                continue
            groups += found
            notes += said
    return groups, notes, failed


def table(groups: Sequence[Group], *, with_goals: bool = True) -> Table:
    """One line per plane and length: medians, and the 99th percentile after a stroke."""
    shown = Table(title="hand-off: medians / P99", title_justify="left")
    heads = ["plane", "prompt", "n", "MB", "last MB", "bare GB/s", "manifest → VALID, ms", "allowed, ms", "÷", "met"]
    heads += ["gap, ms", "ITL, ms", "2nd, %", "exposed ÷ E2E, %", "pulls ÷ E2E, %", "hidden, %"]
    for head in heads:
        shown.add_column(head, justify="left" if head == "plane" else "right")
    for g in groups:
        shown.add_row(
            g.plane,
            f"{g.num_prompt_tokens:,}",
            f"{len(g.samples)}",
            f"{g.median(lambda s: s.num_bytes) / 1e6:.1f}",
            f"{g.median(lambda s: s.last_bytes) / 1e6:.1f}",
            f"{g.median(g.rate) / 1e9:.2f}",
            f"{g.median(lambda s: s.exposed_s) * 1000:.1f} / {g.p99(lambda s: s.exposed_s) * 1000:.1f}",
            f"{g.median(g.allowed_s) * 1000:.1f}",
            f"{g.median(g.of_allowed):.2f} / {g.p99(g.of_allowed):.2f}",
            f"{g.num_met}" if with_goals else "-",
            f"{g.median(lambda s: s.gap_s) * 1000:.1f} / {g.p99(lambda s: s.gap_s) * 1000:.1f}",
            f"{g.median(lambda s: s.itl_s) * 1000:.1f}",
            f"{g.median(second_token) * 100:+.1f}",
            f"{g.median(exposed_share) * 100:.2f}",
            f"{g.median(pull_share) * 100:.2f}",
            f"{g.median(hidden_share) * 100:.0f}",
        )
    return shown


def _goals(report: Report) -> Report:
    """The report with what has a goal; the table shows the rest."""
    goals: list[Row] = [row for row in report.rows if row.goal is not None]
    return Report(title=report.title, command=report.command, seed=report.seed, rows=goals, notes=report.notes)


def _raw(group: Group) -> dict[str, object]:
    return {
        "plane": group.plane,
        "num_prompt_tokens": group.num_prompt_tokens,
        "num_met": group.num_met,
        "samples": [
            {**asdict(s), "backend_s": group.backend_s[s.last_pages], "allowed_s": group.allowed_s(s)}
            for s in group.samples
        ],
    }
