"""Experiment: the same requests under continuous, dynamic and static batching, beside what slot arithmetic allows.

All requests of a workload arrive at once: a policy's batches follow from the lengths, and the arithmetic is exact.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdserve.bench.engine_lab import Findings, Lab, Served, Setting, Step, WallTime, serve
from pdserve.bench.engine_reservation import TRACE
from pdserve.bench.metrics import percentile, values_ms
from pdserve.bench.report import Row
from pdserve.bench.slots import continuous, fit_cost, fixed
from pdserve.bench.workload import Item, chat_items, fit, random_items, read_trace, trace_items
from pdserve.core.config import check, option
from pdserve.core.errors import ConfigError
from pdserve.engine.batching import BATCHINGS

DEFAULTS: dict[str, object] = {"max_num_seqs": 4, "threads": 2, "num_pages": 512, "max_num_batched_tokens": 128}
QUICK: dict[str, object] = {"scale": 64.0, "mixed_scale": 10.0, "num_prompts": 4, "uniform_len": 4, "repeats": 1}
_MIXED = (10, 50, 100, 200)
_PROMPT_LEN = 8


@dataclass(frozen=True, kw_only=True)
class BatchingOptions:
    """Sizes of the batching comparison. Slots per batch: --max-num-seqs."""

    scale: float = option(16.0, "divides the lengths of the chat and azure workloads", minimum=1)
    mixed_scale: float = option(8.0, "divides the output lengths 10, 50, 100, 200 of the mixed workload", minimum=1)
    num_prompts: int = option(8, "requests of each workload", unit="requests", minimum=1)
    uniform_len: int = option(12, "output of each request of the uniform workload", unit="tokens", minimum=1)
    workloads: str = option("mixed,chat,azure,uniform", "which to run, with commas")

    def __post_init__(self) -> None:
        check(self)
        if unknown := [name for name in self.names() if name not in WORKLOADS]:
            raise ConfigError(f"--workloads: unknown {', '.join(unknown)}; known: {', '.join(WORKLOADS)}")

    def names(self) -> list[str]:
        """`workloads` as a list."""
        return [name.strip() for name in self.workloads.split(",")]


OPTIONS = BatchingOptions


def _mixed(options: BatchingOptions, vocab_size: int, seed: int) -> list[Item]:
    lengths = [max(1, round(n / options.mixed_scale)) for n in _MIXED]
    plain = random_items([0.0] * options.num_prompts, _PROMPT_LEN, 1, 0.0, vocab_size, seed)
    return [Item(0.0, item.prompt_token_ids, lengths[i % len(lengths)]) for i, item in enumerate(plain)]


def _chat(options: BatchingOptions, vocab_size: int, seed: int) -> list[Item]:
    return chat_items(options.num_prompts, options.scale, vocab_size, seed)


def _azure(options: BatchingOptions, vocab_size: int, seed: int) -> list[Item]:
    rows = read_trace(TRACE)[: options.num_prompts]
    return trace_items(rows, options.scale, [0.0] * len(rows), vocab_size, seed)


def _uniform(options: BatchingOptions, vocab_size: int, seed: int) -> list[Item]:
    return random_items([0.0] * options.num_prompts, _PROMPT_LEN, options.uniform_len, 0.0, vocab_size, seed)


WORKLOADS: dict[str, Callable[[BatchingOptions, int, int], list[Item]]] = {
    "mixed": _mixed,
    "chat": _chat,
    "azure": _azure,
    "uniform": _uniform,
}


def run(options: BatchingOptions, setting: Setting) -> Findings:
    """Runs every workload under every policy, in turns."""
    if setting.engine.batching != "continuous":
        raise ConfigError(f"--batching is {setting.engine.batching!r}; this experiment runs all of them")
    lab, size = Lab(setting.engine), setting.engine.max_num_seqs
    lab.warm_up()
    rows, notes, found, extra = list[Row](), _notes(options, size), list[str](), dict[str, object]()
    for name in options.names():
        items, cut = fit(WORKLOADS[name](options, lab.vocab_size, setting.seed), lab.max_model_len)
        if cut:
            notes.append(f"{name}: {cut} of {len(items)} requests were cut to {lab.max_model_len} tokens")
        runs: dict[str, list[Served]] = {policy: [] for policy in BATCHINGS}
        for at in range(setting.repeats):
            setting.say(f"{name}, run {at + 1} of {setting.repeats}")
            for policy in (*BATCHINGS[at % 3 :], *BATCHINGS[: at % 3]):
                core, recorder = lab.engine(batching=policy)
                runs[policy].append(serve(core, recorder, items, WallTime()))
        rows += _rows(name, items, runs, size)
        found.append(f"{name}: continuous makes {_gain(runs):.2f} times as many tokens per second as static")
        extra[name] = {policy: [served.seconds for served in several] for policy, several in runs.items()}
    return Findings(title=f"batching policies, {size} slots", rows=rows, notes=found + notes, extra={"seconds": extra})


def _rows(name: str, items: Sequence[Item], runs: dict[str, list[Served]], size: int) -> list[Row]:
    rows = []
    for policy, several in runs.items():
        latencies = [[v / 1000 for o in served.outcomes for v in values_ms(o, "e2el")] for served in several]
        tokens = sum(item.max_tokens for item in items)
        what = f"{name}, {policy}"
        rows += [
            Row(f"{what}: output", statistics.median(tokens / s.seconds for s in several), "tokens/s"),
            Row(f"{what}: latency, mean", statistics.median(map(statistics.fmean, latencies)), "s"),
            Row(f"{what}: latency, P99", statistics.median(percentile(v, 99) for v in latencies), "s"),
            Row(f"{what}: useful slots", statistics.median(_useful(s.steps, size) for s in several), "%"),
        ]
    ratio = _gain(runs)
    if name == "uniform":
        return [*rows, Row(f"{name}: continuous ÷ static", ratio, "", "0.97 .. 1.03")]
    return [*rows, *_arithmetic(name, items, runs, size, ratio), *_composition(name, runs["continuous"])]


def _gain(runs: dict[str, list[Served]]) -> float:
    pairs = zip(runs["continuous"], runs["static"], strict=True)
    return statistics.median(static.seconds / cont.seconds for cont, static in pairs)


def _arithmetic(
    name: str, items: Sequence[Item], runs: dict[str, list[Served]], size: int, measured: float
) -> list[Row]:
    lengths = [item.max_tokens for item in items]
    ours, theirs = continuous(lengths, size), fixed(lengths, size)
    cost = fit_cost(
        [
            (s.num_decodes, s.num_chunk_tokens, s.seconds)
            for several in runs.values()
            for served in several
            for s in served.steps
        ]
    )
    prompt_tokens = sum(len(item.prompt_token_ids) for item in items)
    allowed = cost.of(theirs, prompt_tokens) / max(cost.of(ours, prompt_tokens), 1e-9)
    return [
        Row(f"{name}: slots taken by static", theirs.steps * size, "slots"),
        Row(f"{name}: slots taken by continuous", ours.steps * size, "slots"),
        Row(f"{name}: slots, static ÷ continuous", theirs.steps / ours.steps, ""),
        Row(f"{name}: rows, static ÷ continuous", theirs.rows / ours.rows, ""),
        Row(f"{name}: time of a step, fitted", cost.step_s * 1000, "ms"),
        Row(f"{name}: and of each row in it", cost.row_s * 1000, "ms"),
        Row(f"{name}: and of each prompt token in it", cost.chunk_token_s * 1000, "ms"),
        Row(f"{name}: continuous ÷ static, allowed", allowed, ""),
        Row(f"{name}: continuous ÷ static, measured", measured, ""),
        Row(f"{name}: measured ÷ allowed", measured / allowed if allowed else None, "", ">= 0.9"),
    ]


def _composition(name: str, runs: Sequence[Served]) -> list[Row]:
    """Step time by what was in the step: decodes alone, and decodes beside a prompt's chunk."""
    steps = [s for served in runs for s in served.steps if s.num_decodes]
    alone = [s.seconds * 1000 for s in steps if not s.num_chunk_tokens]
    beside = [s.seconds * 1000 for s in steps if s.num_chunk_tokens]
    return [
        Row(f"{name}: step with decodes alone", _median(alone), "ms"),
        Row(f"{name}: step with prompts beside them", _median(beside), "ms"),
    ]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _useful(steps: Sequence[Step], size: int) -> float:
    return 100 * sum(s.num_useful for s in steps) / (len(steps) * size)


def _notes(options: BatchingOptions, size: int) -> list[str]:
    return [
        f"lengths: mixed 10, 50, 100, 200 ÷ {options.mixed_scale:g}; chat (ShareGPT-like) and {TRACE.name} ÷ "
        f"{options.scale:g}; uniform {options.uniform_len}; {options.num_prompts} requests each, all at once: "
        "so dynamic differs from static only in what the last, smaller batch waits",
        f"a slot is one of {size} places in every step, a row a place with a sequence in it; useful: rows whose work "
        "somebody wanted / slots",
        "continuous ÷ static: tokens per second; allowed: what the output lengths alone give, with the time of steps, "
        "rows and prompt tokens fitted to the steps that were measured here; the last two: medians of continuous",
    ]
