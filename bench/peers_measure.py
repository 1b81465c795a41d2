"""One system under load: started, asked once, warmed up, measured at every level, and ended, whatever happens."""

from __future__ import annotations

import asyncio
import math
import random
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.bench.load import Outcome, run_load
from pdserve.bench.metrics import percentile, values_ms
from pdserve.bench.peers_clients import Endpoint, ask
from pdserve.bench.peers_process import Processes, SystemFailed
from pdserve.bench.peers_systems import Place, System
from pdserve.bench.workload import Item
from pdserve.core.clock import MonotonicClock

PROMPT_TOKENS, MAX_PROMPT_TOKENS = 110, 429
OUTPUT_TOKENS, MAX_OUTPUT_TOKENS = 66, 256
SPREAD = 0.69
"""Standard deviation of the logarithm of a length: the longest of 48 is then the maximum."""
QUESTION_TOKENS = 16
_FIRST_ORDINARY_TOKEN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """One load.

    Attributes:
        concurrency: Requests in flight.
        num_prompts: Requests in all.
    """

    concurrency: int
    num_prompts: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one load showed. Times in milliseconds.

    Attributes:
        tokens_per_s: Output tokens per second, from the first request to the end of the last.
        ttft_p50_ms: Sent to first output, median.
        ttft_p99_ms: The same, 99th percentile.
        tpot_p50_ms: (End - first output) / (tokens - 1), median.
        tpot_p99_ms: The same, 99th percentile.
        itl_p50_ms: Gap between two outputs of a request, median.
        itl_p99_ms: The same, 99th percentile.
        tokens_per_cpu_s: Output tokens per second of CPU time of all of the system's processes.
        cores_busy: That CPU time per second.
        outputs_per_token: Pieces of output that came, per token: below 1 where a system sends several at once.
        duration_s: Of the load.
    """

    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    tokens_per_cpu_s: float
    cores_busy: float
    outputs_per_token: float
    duration_s: float


@dataclass(kw_only=True)
class Run:
    """One start of one system.

    Attributes:
        system: Its name.
        ready_s: From the start of its processes until it serves.
        answer: Its greedy answer to the question that all get.
        peak_bytes: Highest resident memory of all processes.
        peak_process_bytes: Highest resident memory of one process.
        levels: Concurrency -> what was measured.
        failure: Why it, or a level of it, was not measured.
    """

    system: str
    ready_s: float | None = None
    answer: str | None = None
    peak_bytes: int | None = None
    peak_process_bytes: int | None = None
    levels: dict[int, Measured] = field(default_factory=dict)
    failure: str | None = None


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What is the same for all systems.

    Attributes:
        levels: Loads, one after the other.
        vocab_size: Of the model.
        question: Prompt of the question that all get.
        seed: Of the tokens.
        start_timeout_s: Limit of a start.
        load_timeout_s: Limit of one load.
    """

    levels: tuple[Level, ...]
    vocab_size: int
    question: tuple[int, ...]
    seed: int
    start_timeout_s: float
    load_timeout_s: float


def run_system(system: System, place: Place, conditions: Conditions, round_: int) -> Run:
    """Starts, measures and ends one system. What breaks is in `Run.failure`; what was measured before stays.

    Args:
        system: The system.
        place: Where and with what.
        conditions: The loads.
        round_: Makes other prompts of the same lengths, so that no cache helps.
    """
    run = Run(system=system.name)
    launch = system.launch(place)
    try:
        processes = Processes(launch.commands, place.scratch)
    except SystemFailed as e:
        run.failure = e.reason
        return run
    try:
        run.ready_s = processes.wait_ready(launch.endpoint.ready, conditions.start_timeout_s)
        run.answer = ask(launch.endpoint, conditions.question, QUESTION_TOKENS, conditions.start_timeout_s)
        _warm_up(launch.endpoint, conditions, round_)
        for level in conditions.levels:
            run.levels[level.concurrency] = _measure(launch.endpoint, processes, level, conditions, round_)
            processes.check()
        if launch.proof is not None and launch.proof not in processes.log(launch.commands[-1]):
            run.levels.clear()
            raise SystemFailed(f"its log never says {launch.proof!r}: it did something else than what is compared")
    except SystemFailed as e:
        run.failure = e.reason
    finally:
        usage = processes.usage()
        run.peak_bytes, run.peak_process_bytes = usage.peak_bytes, usage.peak_process_bytes
        processes.end()
        if launch.litter is not None:
            shutil.rmtree(launch.litter, ignore_errors=True)
    return run


def items(num: int, vocab_size: int, seed: str) -> list[Item]:
    """Requests whose lengths are the same for every seed: quantiles of log-normal distributions, shuffled.

    Args:
        num: Requests.
        vocab_size: Of the model.
        seed: Of the tokens.
    """
    order, rng = random.Random(f"order {num}"), random.Random(f"tokens {seed}")
    prompts = lengths(num, PROMPT_TOKENS, MAX_PROMPT_TOKENS)
    outputs = lengths(num, OUTPUT_TOKENS, MAX_OUTPUT_TOKENS)
    order.shuffle(prompts)
    order.shuffle(outputs)
    first = min(_FIRST_ORDINARY_TOKEN, vocab_size - 1)
    return [
        Item(0.0, tuple(rng.randrange(first, vocab_size) for _ in range(prompt)), output)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def lengths(num: int, mean: float, maximum: int) -> list[int]:
    """`num` lengths, ascending, log-normal around `mean`, at least 2 and at most `maximum`."""
    normal = statistics.NormalDist()
    raw = [math.exp(SPREAD * normal.inv_cdf((i + 0.5) / num)) for i in range(num)]
    scale = mean / statistics.fmean(raw)
    return [max(2, min(maximum, round(scale * value))) for value in raw]


def summarize(outcomes: Sequence[Outcome], cpu_s: float) -> Measured:
    """The numbers of one load.

    Args:
        outcomes: All of its requests.
        cpu_s: CPU time that the system took for it.

    Raises:
        SystemFailed: A request failed, or did not bring the tokens that were asked for.
    """
    for outcome in outcomes:
        if outcome.error is not None:
            failed = sum(o.error is not None for o in outcomes)
            raise SystemFailed(f"{failed} of {len(outcomes)} requests failed: {outcome.error}")
        if outcome.output_tokens != outcome.item.max_tokens or not outcome.output_s:
            raise SystemFailed(
                f"{outcome.output_tokens} tokens in {len(outcome.output_s)} pieces came where "
                f"{outcome.item.max_tokens} were asked for"
            )
    duration_s = max(o.end_s for o in outcomes) - min(o.sent_s for o in outcomes)
    tokens = sum(o.output_tokens for o in outcomes)

    def at(metric: str, p: float) -> float:
        values = [value for o in outcomes for value in values_ms(o, metric)]
        return percentile(values, p) if values else math.nan

    return Measured(
        tokens_per_s=tokens / duration_s,
        ttft_p50_ms=at("ttft", 50),
        ttft_p99_ms=at("ttft", 99),
        tpot_p50_ms=at("tpot", 50),
        tpot_p99_ms=at("tpot", 99),
        itl_p50_ms=at("itl", 50),
        itl_p99_ms=at("itl", 99),
        tokens_per_cpu_s=tokens / cpu_s if cpu_s > 0 else math.nan,
        cores_busy=cpu_s / duration_s,
        outputs_per_token=sum(len(o.output_s) for o in outcomes) / tokens,
        duration_s=duration_s,
    )


def _measure(endpoint: Endpoint, processes: Processes, level: Level, conditions: Conditions, round_: int) -> Measured:
    load = items(level.num_prompts, conditions.vocab_size, f"{conditions.seed} {round_} {level.concurrency}")
    before_s = processes.usage().cpu_s
    outcomes = _send(endpoint, load, level.concurrency, conditions.load_timeout_s)
    return summarize(outcomes, processes.usage().cpu_s - before_s)


def _warm_up(endpoint: Endpoint, conditions: Conditions, round_: int) -> None:
    """Short requests at the highest concurrency: what is done once is done."""
    most = max(level.concurrency for level in conditions.levels)
    prompts = items(most, conditions.vocab_size, f"warm-up {conditions.seed} {round_}")
    short = [Item(0.0, item.prompt_token_ids[:32], 4) for item in prompts]
    summarize(_send(endpoint, short, most, conditions.load_timeout_s), 0.0)


def _send(endpoint: Endpoint, load: Sequence[Item], concurrency: int, timeout_s: float) -> list[Outcome]:
    async def main() -> list[Outcome]:
        async with asyncio.timeout(timeout_s), endpoint.backend(timeout_s) as backend:
            return await run_load(load, backend, MonotonicClock(), concurrency, lambda _: None)

    try:
        return asyncio.run(main())
    except TimeoutError:
        raise SystemFailed(f"{len(load)} requests at {concurrency} took more than {timeout_s:g} s") from None
