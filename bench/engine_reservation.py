"""Experiment: how much of the reserved KV memory holds tokens, by reservation policy, over real traffic.

Paged on demand is the engine itself (real scheduler, fake runner); the others are `bench.reservation`. All have the
same memory, the same trace and the same virtual time per step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from pdserve.bench.engine_lab import Findings, Lab, Setting, VirtualTime, serve
from pdserve.bench.report import Row
from pdserve.bench.reservation import Buddy, MaximumLength, Sample, Use, averaged, power_of_two, simulate
from pdserve.bench.workload import TraceRow, read_trace, trace_items
from pdserve.core.config import check, option
from pdserve.core.errors import ConfigError

TRACE = Path(__file__).parent / "data" / "azure2023_conv_2000.csv"
DEFAULTS: dict[str, object] = {"runner": "fake", "max_num_seqs": 256}
QUICK: dict[str, object] = {"num_prompts": 12}


@dataclass(frozen=True, kw_only=True)
class ReservationOptions:
    """Sizes of the memory comparison."""

    num_prompts: int = option(1000, "requests, from the start of the trace", unit="requests", minimum=1)
    kv_tokens: int = option(16384, "KV memory, a power of two", unit="tokens", minimum=1)
    longest: int = option(
        8192, "greatest length of a sequence, what maximum-length reserves; longer requests are left out", unit="tokens"
    )
    step_ms: float = option(20.0, "virtual time of a step", unit="ms", minimum=0)
    token_us: float = option(25.0, "virtual time of each of its tokens", unit="us", minimum=0)
    token_budget: int = option(2048, "tokens of a step", unit="tokens", minimum=1)

    def __post_init__(self) -> None:
        check(self)
        if self.kv_tokens != power_of_two(self.kv_tokens):
            raise ConfigError(f"--kv-tokens is {self.kv_tokens}; buddy blocks need a power of two")
        if not 2 <= self.longest <= self.kv_tokens:
            raise ConfigError(f"--longest is {self.longest}; it must be in [2, --kv-tokens ({self.kv_tokens})]")


OPTIONS = ReservationOptions


def run(options: ReservationOptions, setting: Setting) -> Findings:
    """Runs the trace through every policy. Virtual time: nothing varies, so nothing is repeated."""
    if setting.engine.runner != "fake":
        raise ConfigError(
            f"--runner is {setting.engine.runner!r}; this experiment takes only fake: its time is virtual"
        )
    rows = read_trace(TRACE)[: options.num_prompts]
    kept = [r for r in rows if power_of_two(r.input_tokens + power_of_two(r.output_tokens)) <= options.longest]
    rows_: list[Row] = []
    uses: dict[str, Use] = {}
    for name in ("paged on demand", "maximum length", "buddy blocks"):
        setting.say(name)
        uses[name] = use = _use(name, kept, options, setting)
        goal = ">= 95" if name == "paged on demand" else None
        rows_ += [
            Row(f"{name}: tokens held / tokens reserved", 100 * use.held_of_reserved, "%", goal),
            Row(f"{name}: tokens held / all memory", 100 * use.held_of_all, "%"),
            Row(f"{name}: running at once, mean", use.num_running, "sequences"),
            Row(f"{name}: first arrival to last end", use.seconds, "s (virtual)"),
        ]
    notes = [
        f"{TRACE.name}, unscaled: {len(kept)} of {len(rows)} requests (the others exceed --longest in blocks of "
        f"powers of two); {options.kv_tokens:,} tokens of KV memory, pages of {setting.engine.page_size}",
        "held: its KV exists; reserved: set aside for a sequence, so that no other can have it",
        "averages over the time in which memory is reserved; published: 96 % paged, 20-38 % contiguous (of all memory)",
    ]
    return Findings(title="KV memory by reservation policy", rows=rows_, notes=notes)


def _use(name: str, rows: list[TraceRow], options: ReservationOptions, setting: Setting) -> Use:
    step_s, token_s = options.step_ms / 1e3, options.token_us / 1e6
    if name == "paged on demand":
        return paged(rows, options, setting)
    memory = MaximumLength(options.kv_tokens, options.longest) if name == "maximum length" else Buddy(options.kv_tokens)
    return simulate(rows, memory, options.kv_tokens, setting.engine.max_num_seqs, options.token_budget, step_s, token_s)


def paged(rows: list[TraceRow], options: ReservationOptions, setting: Setting) -> Use:
    """The engine's own use of its pages."""
    step_s, token_s = options.step_ms / 1e3, options.token_us / 1e6
    page_size = setting.engine.page_size
    config = replace(
        setting.engine,
        num_pages=options.kv_tokens // page_size,
        max_num_batched_tokens=max(options.token_budget, setting.engine.max_num_seqs),
    )
    lab = Lab(config)
    core, recorder = lab.engine()
    items = trace_items(rows, 1.0, None, lab.vocab_size, setting.seed)
    served = serve(core, recorder, items, VirtualTime(step_s, token_s))
    samples = [
        Sample(
            step_s + token_s * (s.num_decodes + s.num_chunk_tokens),
            s.num_held_tokens,
            s.num_pages * page_size,
            s.num_useful,
        )
        for s in served.steps
    ]
    return averaged(samples, options.kv_tokens, served.seconds)
