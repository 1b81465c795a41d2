"""Experiment: decodes in flight when long prompts arrive. A chunk bounds the step, and so the gap between two tokens.

What is left of the gap, with any chunk, is what a prefill worker of its own takes away.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.bench.engine_lab import Findings, Lab, Setting, bench_request
from pdserve.bench.metrics import percentile
from pdserve.bench.report import Row
from pdserve.bench.workload import random_items
from pdserve.core.config import check, option
from pdserve.core.errors import ConfigError, EngineError
from pdserve.engine.engine_core import EngineCore
from pdserve.engine.step import Abort, Add, SequenceFailed, TokensSampled

DEFAULTS: dict[str, object] = {"threads": 2, "num_pages": 1024, "max_num_seqs": 64}
QUICK: dict[str, object] = {
    "num_decodes": 3,
    "prompt_len": 200,
    "num_prompts": 1,
    "chunk": 8,
    "max_num_seqs": 4,
    "repeats": 1,
}
_DECODE_PROMPT = 4
_now = time.perf_counter


@dataclass(frozen=True, kw_only=True)
class InterferenceOptions:
    """Sizes of the interference measurement."""

    num_decodes: int = option(32, "sequences that decode", unit="sequences", minimum=1)
    prompt_len: int = option(4000, "tokens of each long prompt, before --scale", unit="tokens", minimum=1)
    scale: float = option(5.0, "divides the length of the long prompts", minimum=1)
    num_prompts: int = option(2, "long prompts, one after the other", unit="requests", minimum=1)
    chunk: int = option(64, "prompt tokens per step beside the decodes, when chunked", unit="tokens", minimum=1)

    def __post_init__(self) -> None:
        check(self)

    @property
    def length(self) -> int:
        """Tokens of a long prompt."""
        return max(1, round(self.prompt_len / self.scale))


OPTIONS = InterferenceOptions


@dataclass(frozen=True, slots=True)
class Gaps:
    """Of one run, seconds.

    Attributes:
        alone: Between two tokens of a sequence while nothing else is computed.
        beside: The same from a long prompt's arrival to its first token.
        prompts: From a long prompt's arrival to its first token.
    """

    alone: tuple[float, ...]
    beside: tuple[float, ...]
    prompts: tuple[float, ...]


def run(options: InterferenceOptions, setting: Setting) -> Findings:
    """Measures with chunks and without, in turns."""
    if options.num_decodes >= setting.engine.max_num_seqs:
        raise ConfigError(
            f"--num-decodes is {options.num_decodes}; --max-num-seqs ({setting.engine.max_num_seqs}) must be more"
        )
    if setting.engine.batching != "continuous":
        raise ConfigError(f"--batching is {setting.engine.batching!r}; prompts join running decodes only in continuous")
    lab = Lab(setting.engine)
    lab.warm_up()
    at_least = setting.engine.max_num_seqs  # of a token budget
    chunked, whole = (max(options.num_decodes + n, at_least) for n in (options.chunk, options.length))
    ways = {
        f"chunked (budget {chunked:,})": (chunked, math.inf),
        f"whole (budget {whole:,})": (whole, math.inf),
    }
    if lab.context_unit < math.inf:
        ways[f"chunked, context counted (budget {chunked:,})"] = (chunked, lab.context_unit)
    runs: dict[str, list[Gaps]] = {name: [] for name in ways}
    predicted: dict[str, list[float]] = {name: [] for name in ways}
    for at in range(setting.repeats):
        setting.say(f"run {at + 1} of {setting.repeats}")
        for name in sorted(ways, reverse=at % 2 == 1):
            budget, context_unit = ways[name]
            tokens = min(budget, options.num_decodes + options.length)
            predicted[name].append(lab.step_s(tokens, options.num_decodes, _DECODE_PROMPT))
            runs[name].append(_measure(lab, budget, context_unit, options, setting.seed))
    rows = [
        Row(
            f"{options.num_decodes} decodes alone: ITL, median",
            1000 * statistics.median(statistics.median(g.alone) for several in runs.values() for g in several),
            "ms",
        )
    ]
    for name, several in runs.items():
        rows += _rows(f"prompts {name}", several, statistics.median(predicted[name]))
    notes = [
        f"{options.num_prompts} x a prompt of {options.length:,} tokens ({options.prompt_len:,} ÷ {options.scale:g}), "
        "one after the other",
        "ITL: between two tokens of a decode, from a prompt's arrival to its first token; TTFT: that time",
        "predicted: a step with these decodes and a chunk that fills the budget, measured by itself; the context "
        "behind the chunk, which grows with the prompt, is not in it",
    ]
    if lab.context_unit < math.inf:
        notes.append(
            "context counted, as engines do that measure their budget: beside decodes a prompt's token takes twice as "
            f"much of it after {lab.context_unit:,.0f} others"
        )
    return Findings(title="decodes while long prompts arrive", rows=rows, notes=notes)


def _rows(what: str, several: Sequence[Gaps], predicted_s: float) -> list[Row]:
    p99 = statistics.median(percentile(g.beside, 99) for g in several)
    return [
        Row(f"{what}: ITL, median", 1000 * statistics.median(statistics.median(g.beside) for g in several), "ms"),
        Row(f"{what}: ITL, P99", 1000 * p99, "ms"),
        Row(f"{what}: ITL, greatest", 1000 * statistics.median(max(g.beside) for g in several), "ms"),
        Row(f"{what}: ITL predicted (a full step)", 1000 * predicted_s, "ms"),
        Row(f"{what}: ITL P99 ÷ predicted", p99 / predicted_s, ""),
        Row(f"{what}: TTFT of a prompt", statistics.median(statistics.fmean(g.prompts) for g in several), "s"),
    ]


def _measure(lab: Lab, budget: int, context_unit: float, options: InterferenceOptions, seed: int) -> Gaps:
    core, _ = lab.engine(context_unit, max_num_batched_tokens=budget)
    decodes = [f"decode {i}" for i in range(options.num_decodes)]
    room = lab.max_model_len - _DECODE_PROMPT
    core.begin_step(
        [Add(bench_request(key, _prompt(lab, _DECODE_PROMPT, seed + i), room, 0.0)) for i, key in enumerate(decodes)]
    )
    last: dict[str, float] = {}
    while len(last) < len(decodes):
        last.update(dict.fromkeys(_sampled(core), _now()))
    alone, beside, prompts = list[float](), list[float](), list[float]()
    for number in range(options.num_prompts):
        for _ in range(3):
            alone += _gaps(last, _sampled(core))
        arrived, key = _now(), f"prompt {number}"
        core.begin_step([Add(bench_request(key, _prompt(lab, options.length, -number - 1), 1, arrived))])
        while True:
            sampled = _sampled(core)
            beside += _gaps(last, sampled)
            if key in sampled:
                break
        prompts.append(_now() - arrived)
    core.begin_step([Abort(key) for key in decodes])
    core.check()
    return Gaps(tuple(alone), tuple(beside), tuple(prompts))


def _sampled(core: EngineCore) -> list[str]:
    """Computes a step; the keys of the sequences that got a token."""
    step = core.step(_now())
    if failed := [event for event in step.events if isinstance(event, SequenceFailed)]:
        raise EngineError(f"a request of the bench failed: {failed[0].message}", reason=failed[0].reason)
    if not step.num_tokens:
        raise EngineError("the engine stands still although requests are open", reason="STALLED")
    return [event.key for event in step.events if isinstance(event, TokensSampled)]


def _gaps(last: dict[str, float], sampled: Sequence[str]) -> list[float]:
    """Seconds since the last token of each of those that decode; `last` becomes now."""
    now = _now()
    keys = [key for key in sampled if key in last]
    gaps = [now - last[key] for key in keys]
    last.update(dict.fromkeys(keys, now))
    return gaps


def _prompt(lab: Lab, num_tokens: int, seed: int) -> tuple[int, ...]:
    return random_items([0.0], num_tokens, 1, 0.0, lab.vocab_size, seed)[0].prompt_token_ids
