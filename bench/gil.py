"""`pdserve bench gil`: what Python's lock costs when the engine steps in a thread of the process that streams.

    this process (reader) ◀── real gRPC, one StepOutputs per step ── host process: detokenise, build messages, write
                                                                       │ engine: a thread of the host, or a process
                                                                       ▼ that sends one pickled StepEvents per step

Three modes, run in turn, several rounds, medians: `alone` (engine thread, nothing streamed: the step time without
contention), `thread`, `process`. A step is the fake runner's work, plus `--step-ms` of fixed computing: matrix
products, which release the lock, and `--python-share` of it in plain Python, which holds it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import grpc
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pdserve.bench.gil_engine import Case
from pdserve.bench.gil_host import host_main
from pdserve.bench.report import Report, Row, check_json, print_report, write_json
from pdserve.bench.serve_args import positive
from pdserve.core.config import Parser
from pdserve.core.errors import ConfigError, EngineError
from pdserve.v1 import worker_pb2_grpc

MODES = ("alone", "thread", "process")
START_TIMEOUT_S = 120.0
RUN_TIMEOUT_S = 600.0
MAX_MESSAGE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Measured:
    """One run.

    Attributes:
        step_ms: Median time of a decode step, milliseconds.
        tokens_per_s: Tokens that arrived at the reader per second; None in mode "alone".
        messages_per_step: Messages that arrived per step, the one of the prompts included; None in mode "alone".
    """

    step_ms: float
    tokens_per_s: float | None
    messages_per_step: float | None


def main(argv: Sequence[str]) -> int:
    """Runs the bench; returns the exit status."""
    args = _parser().parse_args(argv)
    check_json(args.json)
    if any(ms < 0 for ms in args.step_ms) or not all(0 <= share <= 1 for share in args.python_share):
        raise ConfigError("--step-ms must be at least 0 and --python-share in [0, 1]")
    cases = [
        Case(
            num_streams=args.num_streams,
            num_steps=args.steps,
            step_ms=ms,
            python_share=share if ms else 0.0,
            tokenizer_dir=args.tokenizer,
        )
        for ms in args.step_ms
        for share in (args.python_share if ms else [0.0])
    ]
    results = _run_all(cases, args.runs)
    report = Report(
        title=f"the engine as a thread and as a process, {args.num_streams} streams, medians of {args.runs} runs",
        command=["pdserve", "bench", "gil", *argv],
        seed=0,
        rows=[row for case in cases for row in _rows(case, results[case])],
        notes=[
            f"a case of x ms: that much fixed computing per step beside the fake runner; {os.cpu_count()} cores are "
            "shared by host, reader and (mode process) engine"
        ],
    )
    print_report(report, Console())
    if args.json:
        write_json(report, Path(args.json))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "pdserve bench gil",
        "Measure what Python's global lock costs when the engine is a thread of the process that streams,\n"
        "compared with an engine in a process of its own. Needs nothing running.",
    )
    parser.add_argument("--num-streams", type=positive(int), default=256, metavar="N", help="streams (default: 256)")
    parser.add_argument(
        "--steps", type=positive(int), default=200, metavar="N", help="decode steps of a run (default: 200)"
    )
    parser.add_argument("--runs", type=positive(int), default=3, metavar="N", help="rounds over all modes (default: 3)")
    parser.add_argument(
        "--step-ms", type=float, nargs="+", default=[0.0, 20.0], metavar="MS", help="computing per step (default: 0 20)"
    )
    parser.add_argument(
        "--python-share",
        type=float,
        nargs="+",
        default=[0.0, 0.5],
        metavar="X",
        help="share of it that holds the lock, in [0, 1] (default: 0 0.5)",
    )
    parser.add_argument("--tokenizer", metavar="DIR", help="model whose tokenizer detokenises (default: a cheap fake)")
    parser.add_argument("--json", metavar="FILE", help="write rows, command, commit, machine and seed")
    return parser


def _run_all(cases: Sequence[Case], runs: int) -> dict[Case, dict[str, list[Measured]]]:
    results: dict[Case, dict[str, list[Measured]]] = {case: defaultdict(list) for case in cases}
    columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=len(cases) * len(MODES) * runs)
        for _ in range(runs):  # modes side by side in every round: a slow minute hits all of them
            for case in cases:
                for mode in MODES:
                    results[case][mode].append(measure(case, mode))
                    progress.update(bar, advance=1)
    return results


def measure(case: Case, mode: str) -> Measured:
    """One run in fresh processes.

    Raises:
        EngineError: The host process died.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    host = context.Process(target=host_main, args=(theirs, case, mode), name="gil-host")
    with _one_blas_thread():
        host.start()
    theirs.close()
    try:
        port = _receive(ours, START_TIMEOUT_S)
        try:
            messages, tokens, seconds = _read_stream(f"127.0.0.1:{port}")
        except grpc.RpcError as e:
            raise EngineError(f"the host process of the bench failed: {e.details()}") from e
        durations_s = cast(list[float], _receive(ours, START_TIMEOUT_S))
        host.join(START_TIMEOUT_S)
    finally:
        if host.is_alive():
            host.terminate()
            host.join()
        ours.close()
    streamed = mode != "alone"
    return Measured(
        step_ms=statistics.median(durations_s) * 1000,
        tokens_per_s=tokens / seconds if streamed else None,
        messages_per_step=messages / (case.num_steps + 1) if streamed else None,
    )


def _read_stream(address: str) -> tuple[int, int, float]:
    """Messages, tokens, and the seconds from the first message to the end."""
    messages = tokens = 0
    first_s: float | None = None
    options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(address, options=options) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        for message in stub.Session(iter(()), timeout=RUN_TIMEOUT_S):
            first_s = time.perf_counter() if first_s is None else first_s
            messages += 1
            tokens += sum(len(output.delta.token_ids) for output in message.step_outputs.outputs)
    return messages, tokens, time.perf_counter() - (first_s or 0.0)


def _receive(connection: Connection, timeout_s: float) -> object:
    try:
        if connection.poll(timeout_s):
            return connection.recv()
    except EOFError:
        raise EngineError("the host process of the bench died; its traceback is above") from None
    raise EngineError(f"the host process of the bench said nothing for {timeout_s:g} s")


@contextmanager
def _one_blas_thread() -> Iterator[None]:
    """Children started inside compute on one core each: threads of a BLAS library would be measured instead."""
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _rows(case: Case, results: dict[str, list[Measured]]) -> list[Row]:
    rows = []
    steps = {mode: statistics.median(m.step_ms for m in results[mode]) for mode in MODES}
    rates = {mode: statistics.median(m.tokens_per_s or 0.0 for m in results[mode]) for mode in ("thread", "process")}
    rows += [Row(f"{case.label}: step time, {mode}", steps[mode], "ms") for mode in MODES]
    rows += [Row(f"{case.label}: streamed, {mode}", rate, "tokens/s") for mode, rate in rates.items()]
    rows.append(Row(f"{case.label}: step time, thread / alone", steps["thread"] / steps["alone"], "x"))
    rows.append(Row(f"{case.label}: step time, process / alone", steps["process"] / steps["alone"], "x"))
    rows.append(Row(f"{case.label}: streamed, process / thread", rates["process"] / rates["thread"], "x"))
    per_step = max(m.messages_per_step or 0.0 for mode in rates for m in results[mode])
    rows.append(Row(f"{case.label}: messages per step, most", per_step, "", "<= 1"))
    return rows
