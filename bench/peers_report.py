"""From runs to the comparison: medians over rounds, ratios against the best peer, and the goals beside them. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields

from rich.table import Table

from pdserve.bench.peers_limits import Limits, Work, best_tokens_per_s
from pdserve.bench.peers_measure import OUTPUT_TOKENS, PROMPT_TOKENS, Level, Measured, Run
from pdserve.bench.report import Row

EXACT_PEERS = ("vllm", "llamacpp-f32", "transformers-continuous", "transformers-static")
OURS = ("pdserve-mixed", "pdserve-pd")
_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("tokens/s", "tokens_per_s", ".1f"),
    ("TTFT p50 ms", "ttft_p50_ms", ".0f"),
    ("p99", "ttft_p99_ms", ".0f"),
    ("TPOT p50 ms", "tpot_p50_ms", ".0f"),
    ("p99", "tpot_p99_ms", ".0f"),
    ("ITL p50 ms", "itl_p50_ms", ".0f"),
    ("p99", "itl_p99_ms", ".0f"),
    ("tokens/CPU-s", "tokens_per_cpu_s", ".1f"),
    ("cores", "cores_busy", ".2f"),
)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The medians of one system over its rounds.

    Attributes:
        system: Its name.
        rounds: Its starts, measured or not.
        ready_s: Time to ready; None: it was never ready.
        peak_bytes: Highest resident memory of all processes; None: it never ran.
        peak_process_bytes: Highest resident memory of one process.
        levels: Concurrency -> medians of each value.
        answer: Its greedy answer.
        failures: Why something of it is missing.
    """

    system: str
    rounds: int
    ready_s: float | None
    peak_bytes: float | None
    peak_process_bytes: float | None
    levels: Mapping[int, Measured]
    answer: str | None
    failures: tuple[str, ...]


def summaries(runs: Sequence[Run]) -> dict[str, Summary]:
    """One summary per system, in the order in which they first ran."""
    by_system: dict[str, list[Run]] = {}
    for run in runs:
        by_system.setdefault(run.system, []).append(run)
    return {name: _summary(name, its) for name, its in by_system.items()}


def ratio(
    found: Mapping[str, Summary], ours: str, others: Sequence[str], concurrency: int, metric: str, best: bool = True
) -> tuple[float, str] | None:
    """One of our values over the best one of others.

    Args:
        found: All summaries.
        ours: Our system.
        others: The systems to compare with; those that were not measured do not count.
        concurrency: The level.
        metric: Field of `Measured`.
        best: More is better; else less is.

    Returns:
        The ratio and the name of the other one; None: one side was not measured.
    """
    values = {
        name: getattr(found[name].levels[concurrency], metric)
        for name in others
        if name in found and concurrency in found[name].levels
    }
    if ours not in found or concurrency not in found[ours].levels or not values:
        return None
    other = (max if best else min)(values, key=lambda name: values[name])
    return getattr(found[ours].levels[concurrency], metric) / values[other], other


def goal(name: str, value: float | None, limit: float, unit: str = "x", at_most: bool = False) -> Row:
    """A row whose goal says whether it is met."""
    sign = "<=" if at_most else ">="
    if value is None or math.isnan(value):
        return Row(name, None, unit, f"{sign} {limit:g}: not measured")
    met = value <= limit if at_most else value >= limit
    return Row(name, value, unit, f"{sign} {limit:g}: {'met' if met else 'NOT met'}")


def peer_rows(found: Mapping[str, Summary], concurrencies: Collection[int]) -> list[Row]:
    """Our goals against the peers, at those levels that were asked for."""
    goals: list[tuple[str, Sequence[str], int, float]] = [(ours, EXACT_PEERS, 8, 1.3) for ours in OURS]
    goals += [(ours, ("vllm",), 1, 1.5) for ours in OURS]
    goals.append(("pdserve-int8", ("llamacpp-q8_0",), 8, 1.1))
    rows = [_against(found, *one) for one in goals if one[2] in concurrencies]
    rows += [_against(found, ours, EXACT_PEERS, 16, None) for ours in OURS if 16 in concurrencies]
    mixed = found.get("pdserve-mixed")
    worker = mixed.peak_process_bytes if mixed else None
    rows.append(goal("pdserve-mixed: peak resident memory of the worker", _scaled(worker, 1e9), 1.3, "GB", True))
    for ours in OURS:
        ready_s = found[ours].ready_s if ours in found else None
        rows.append(goal(f"{ours}: time to ready", ready_s, 10.0, "s", True))
    return rows


def disaggregation_rows(found: Mapping[str, Summary], concurrency: int) -> list[Row]:
    """Our goals against vLLM's disaggregation, and against our own MIXED worker."""

    def row(other: str, metric: str, what: str, limit: float, at_most: bool) -> Row:
        result = ratio(found, "pdserve-pd", (other,), concurrency, metric)
        name = f"at {concurrency}: {what}, pdserve-pd / {other}"
        return goal(name, result[0] if result else None, limit, at_most=at_most)

    return [
        row("vllm-disaggregated", "tokens_per_s", "tokens/s", 1.5, False),
        row("vllm-disaggregated", "ttft_p50_ms", "TTFT p50", 0.6, True),
        row("vllm-disaggregated", "itl_p99_ms", "ITL p99", 0.7, True),
        row("pdserve-mixed", "itl_p99_ms", "ITL p99", 0.4, True),
        row("pdserve-mixed", "tokens_per_s", "tokens/s", 0.9, False),
    ]


def limit_rows(found: Mapping[str, Summary], limits: Limits, num_params: int, levels: Sequence[Level]) -> list[Row]:
    """What the machine allows in fp32, and which share of it each fp32 system reached."""
    rows = [
        Row("memory read, measured", limits.read_bytes_per_s / 1e9, "GB/s"),
        Row("fp32 matrix products, measured", limits.gemm_flops_per_s / 1e9, "GFLOP/s"),
    ]
    for level in levels:
        work = Work(
            num_params=num_params,
            input_tokens=PROMPT_TOKENS * level.num_prompts,
            output_tokens=OUTPUT_TOKENS * level.num_prompts,
            concurrency=min(level.concurrency, level.num_prompts),
        )
        most = best_tokens_per_s(limits, work)
        rows.append(Row(f"at {level.concurrency}: limit in fp32", most, "tokens/s"))
        for name in (*OURS, *EXACT_PEERS):
            if name in found and level.concurrency in found[name].levels:
                share = 100 * found[name].levels[level.concurrency].tokens_per_s / most
                rows.append(Row(f"at {level.concurrency}: {name}, share of it", share, "%"))
    return rows


def level_table(found: Mapping[str, Summary], level: Level) -> Table:
    """The values of all systems at one level."""
    table = Table(title=f"concurrency {level.concurrency}, {level.num_prompts} requests", title_justify="left")
    table.add_column("system")
    for title, _, _ in _COLUMNS:
        table.add_column(title, justify="right")
    for name, summary in found.items():
        if (measured := summary.levels.get(level.concurrency)) is not None:
            table.add_row(name, *(format(getattr(measured, field), spec) for _, field, spec in _COLUMNS))
    return table


def start_table(found: Mapping[str, Summary]) -> Table:
    """Time to ready and memory of all systems."""
    table = Table(title="starts and memory", title_justify="left")
    for title in ("system", "rounds", "ready s", "peak GB, all processes", "the largest one"):
        table.add_column(title, justify="left" if title == "system" else "right")
    for name, summary in found.items():
        cells = (summary.ready_s, _scaled(summary.peak_bytes, 1e9), _scaled(summary.peak_process_bytes, 1e9))
        table.add_row(name, str(summary.rounds), *("-" if cell is None else f"{cell:.2f}" for cell in cells))
    return table


def answer_notes(found: Mapping[str, Summary]) -> list[str]:
    """Says which systems gave our answer: the same weights read in the same way."""
    ours = next((found[name].answer for name in OURS if name in found and found[name].answer is not None), None)
    if ours is None:
        return []
    answers = {name: summary.answer for name, summary in found.items() if summary.answer is not None}
    same = [name for name, answer in answers.items() if answer.strip() == ours.strip()]
    other = [f"{name} ({answer!r})" for name, answer in answers.items() if answer.strip() != ours.strip()]
    notes = [f"the same greedy answer {ours!r}: {', '.join(same)}"]
    return notes + ([f"another one: {', '.join(other)}"] if other else [])


def failure_notes(found: Mapping[str, Summary]) -> list[str]:
    """What broke."""
    return [f"{s.system} failed: {reason}" for s in found.values() for reason in s.failures]


def _against(
    found: Mapping[str, Summary], ours: str, others: Sequence[str], concurrency: int, limit: float | None
) -> Row:
    result = ratio(found, ours, others, concurrency, "tokens_per_s")
    against = others[0] if len(others) == 1 else "the best fp32 peer"
    against += f" ({result[1]})" if result and len(others) > 1 else ""
    name = f"at {concurrency}: tokens/s, {ours} / {against}"
    if limit is None:
        return Row(name, result[0] if result else None, "x")
    return goal(name, result[0] if result else None, limit)


def _summary(name: str, runs: Sequence[Run]) -> Summary:
    concurrencies = sorted({concurrency for run in runs for concurrency in run.levels})
    return Summary(
        system=name,
        rounds=len(runs),
        ready_s=_median(runs, lambda run: run.ready_s),
        peak_bytes=_median(runs, lambda run: run.peak_bytes),
        peak_process_bytes=_median(runs, lambda run: run.peak_process_bytes),
        levels={c: _medians([run.levels[c] for run in runs if c in run.levels]) for c in concurrencies},
        answer=next((run.answer for run in runs if run.answer is not None), None),
        failures=tuple(dict.fromkeys(run.failure for run in runs if run.failure is not None)),
    )


def _median(runs: Sequence[Run], value: Callable[[Run], float | None]) -> float | None:
    values = [found for run in runs if (found := value(run)) is not None]
    return statistics.median(values) if values else None


def _medians(measured: Sequence[Measured]) -> Measured:
    return Measured(**{f.name: statistics.median(getattr(m, f.name) for m in measured) for f in fields(Measured)})


def _scaled(value: float | None, by: float) -> float | None:
    return None if value is None else value / by
