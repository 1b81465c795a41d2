"""`pdserve bench serve`: latency, throughput, goodput of a running system. Flags are named as in `vllm bench serve`."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx2
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pdserve.bench import workload
from pdserve.bench.backends import Generation, OpenAIBackend, PdserveBackend
from pdserve.bench.load import Backend, Outcome, run_load
from pdserve.bench.metrics import MEANINGS, METRICS, summarize
from pdserve.bench.report import Report, check_json, print_report, write_json
from pdserve.bench.serve_args import build_parser
from pdserve.cli.arguments import router_addresses
from pdserve.client import AsyncClient
from pdserve.core.clock import MonotonicClock
from pdserve.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Options:
    """The checked command line, beside what goes straight through.

    Attributes:
        metrics: Names in `METRICS`.
        percentiles: Each in 0..100.
        limits_ms: Of the goodput.
    """

    metrics: tuple[str, ...]
    percentiles: tuple[float, ...]
    limits_ms: dict[str, float]


def main(argv: Sequence[str]) -> int:
    """Runs the bench; returns 0 when at least one request succeeded, else 1."""
    args = build_parser().parse_args(argv)
    check_json(args.json)
    options = _checked(args)
    console = Console(stderr=True)
    outcomes, notes = asyncio.run(_run(args, console))
    report = Report(
        title=f"{len(outcomes)} requests to {args.base_url if args.backend == 'openai' else args.router}",
        command=["pdserve", "bench", "serve", *argv],
        seed=args.seed,
        rows=summarize(outcomes, options.metrics, options.percentiles, options.limits_ms),
        notes=[*notes, "; ".join(f"{METRICS[name]}: {MEANINGS[name]}" for name in options.metrics)],
    )
    print_report(report, Console())
    if args.json:
        write_json(report, Path(args.json))
    if args.save_result:
        path = Path(args.result_filename or time.strftime(f"pdserve-{args.backend}-%Y%m%d-%H%M%S.json"))
        detailed = Report(
            title=report.title,
            command=report.command,
            seed=report.seed,
            rows=report.rows,
            notes=report.notes,
            extra={"requests": [_raw(o) for o in outcomes]},
        )
        write_json(detailed, path)
        console.print(f"saved {path}", markup=False, highlight=False)
    return 0 if any(o.error is None for o in outcomes) else 1


async def _run(args: argparse.Namespace, console: Console) -> tuple[list[Outcome], list[str]]:
    generation = Generation(args.model, args.temperature, args.ignore_eos, args.timeout_s)
    async with AsyncExitStack() as stack:
        backend: Backend
        if args.backend == "openai":
            headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get("OPENAI_API_KEY")) else {}
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
            http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, limits=limits))
            backend = OpenAIBackend(http, args.base_url.rstrip("/") + args.endpoint, generation)
            vocab_size, max_model_len = args.vocab_size or 32000, args.max_model_len
        else:
            client = await stack.enter_async_context(AsyncClient(router_addresses(args.router)))
            backend = PdserveBackend(client, generation)
            model = await backend.model()
            vocab_size = args.vocab_size or model.vocab_size
            max_model_len = args.max_model_len or model.max_model_len
        items, notes = build_items(args, vocab_size, max_model_len)
        return await _load(items, backend, args.max_concurrency, console), notes


def build_items(
    args: argparse.Namespace, vocab_size: int, max_model_len: int | None
) -> tuple[list[workload.Item], list[str]]:
    """The workload that the flags describe, and what to say about it in the report."""
    rate = math.inf if args.request_rate is None else args.request_rate
    notes = []
    if args.dataset_name == "trace":
        rows = workload.read_trace(Path(args.trace))
        if len(rows) < args.num_prompts:
            notes.append(f"the trace has only {len(rows)} requests; all are sent")
        rows = rows[: args.num_prompts]
        arrivals = None
        if args.request_rate is not None:
            arrivals = workload.arrival_times(len(rows), rate, args.burstiness, args.seed)
        items = workload.trace_items(rows, args.scale, arrivals, vocab_size, args.seed)
        slowed = "arrivals from --request-rate" if arrivals is not None else f"gaps between arrivals x {args.scale:g}"
        notes.append(f"trace {Path(args.trace).name}: lengths / {args.scale:g}, {slowed}")
    else:
        arrivals = workload.arrival_times(args.num_prompts, rate, args.burstiness, args.seed)
        items = workload.random_items(
            arrivals, args.random_input_len, args.random_output_len, args.random_range_ratio, vocab_size, args.seed
        )
    if max_model_len is not None:
        items, cut = workload.fit(items, max_model_len)
        if cut:
            notes.append(f"{cut} of {len(items)} requests were cut to the model's {max_model_len} tokens")
    return items, notes


async def _load(
    items: Sequence[workload.Item], backend: Backend, max_concurrency: int | None, console: Console
) -> list[Outcome]:
    failed = 0
    columns = (
        TextColumn("requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=len(items))

        def on_end(outcome: Outcome) -> None:
            nonlocal failed
            failed += outcome.error is not None
            progress.update(bar, advance=1, description=f"{failed} failed" if failed else "")

        return await run_load(items, backend, MonotonicClock(), max_concurrency, on_end)


def _checked(args: argparse.Namespace) -> Options:
    if args.dataset_name == "trace" and not args.trace:
        raise ConfigError("--dataset-name trace needs --trace FILE")
    if args.trace:
        args.dataset_name = "trace"
    if args.backend == "openai" and not (str(args.base_url).startswith(("http://", "https://")) and args.model):
        raise ConfigError("--backend openai needs --base-url (e.g. http://127.0.0.1:8000) and --model")
    return Options(
        metrics=_metrics(args.percentile_metrics),
        percentiles=_percentiles(args.metric_percentiles),
        limits_ms=dict(_limit(text) for text in args.goodput or ()),
    )


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if unknown := [name for name in names if name not in METRICS]:
        raise ConfigError(f"--percentile-metrics: unknown {', '.join(unknown)}; known: {', '.join(METRICS)}")
    return names


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(p) for p in text.split(","))
    except ValueError:
        raise ConfigError(f"--metric-percentiles is {text!r}; write e.g. 50,90,99") from None
    if not all(0 <= p <= 100 for p in values):
        raise ConfigError(f"--metric-percentiles is {text!r}; each must be in 0..100")
    return values


def _limit(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    try:
        if name not in METRICS or name == "itl":
            raise ValueError(name)
        return name, float(limit)
    except ValueError:
        raise ConfigError(f"--goodput {text!r}: write metric:ms, e.g. ttft:200 tpot:50 e2el:2000") from None


def _raw(outcome: Outcome) -> dict[str, object]:
    return {
        "arrival_s": outcome.item.arrival_s,
        "input_tokens": len(outcome.item.prompt_token_ids),
        "output_tokens": outcome.output_tokens,
        "output_after_s": [t - outcome.sent_s for t in outcome.output_s],
        "e2e_s": outcome.end_s - outcome.sent_s,
        "error": outcome.error,
    }
