"""Experiment: what a preempted sequence costs by swap and by recompute, at several lengths, and which one is chosen.

An older sequence grows into the pages of a younger one and is then aborted, so that the younger comes back at once. The
cost is the time from the step that preempts to the younger one's next token, less that of two steps undisturbed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.bench.engine_lab import Findings, Lab, Setting, bench_request
from pdserve.bench.report import Row
from pdserve.bench.workload import random_items
from pdserve.core.config import check, option
from pdserve.core.errors import ConfigError, EngineError
from pdserve.engine.engine_core import EngineCore
from pdserve.engine.step import Abort, Add, StepEvents, TokensSampled

DEFAULTS: Mapping[str, object] = {
    "threads": 2,
    "num_pages": 512,
    "swap_space_bytes": 1 << 30,
    "enable_prefix_caching": False,
}
QUICK: Mapping[str, object] = {"lengths": "16,32,64", "num_pages": 64, "max_num_seqs": 4, "repeats": 1}
_MODES = ("swap", "recompute")
_now = time.perf_counter


@dataclass(frozen=True, kw_only=True)
class SwapOptions:
    """Sizes of the comparison."""

    lengths: str = option("64,256,1024", "tokens of the preempted sequence, comma separated", unit="tokens")

    def __post_init__(self) -> None:
        check(self)
        if not all(part.strip().isdecimal() and int(part) > 0 for part in self.lengths.split(",")):
            raise ConfigError(f"--lengths is {self.lengths!r}; it must be positive numbers, comma separated")

    @property
    def sizes(self) -> list[int]:
        """The lengths as numbers."""
        return [int(part) for part in self.lengths.split(",")]


OPTIONS = SwapOptions


def run(options: SwapOptions, setting: Setting) -> Findings:
    """Measures both at each length, in turns."""
    engine = setting.engine
    if engine.preemption_mode != "auto" or not engine.swap_space_bytes:
        raise ConfigError(
            f"--preemption-mode is {engine.preemption_mode!r} with --swap-space-bytes {engine.swap_space_bytes}; this "
            "compares the choices of auto: leave the mode out, and give some space"
        )
    if engine.enable_prefix_caching:
        raise ConfigError("--enable-prefix-caching is True; what is kept would be neither copied nor computed again")
    lab = Lab(engine)
    lab.warm_up()
    assert lab.costs is not None
    rows: list[Row] = []
    for length in options.sizes:
        setting.say(f"{length} tokens")
        seconds: dict[str, list[float]] = {mode: [] for mode in _MODES}
        for at in range(setting.repeats):
            for mode in sorted(_MODES, reverse=at % 2 == 1):
                seconds[mode].append(_cost(lab, mode, length, engine.swap_space_bytes, setting.seed))
        medians = {mode: statistics.median(several) for mode, several in seconds.items()}
        chosen = "swap" if lab.costs.prefer_swap(length) else "recompute"
        rows += [
            Row(f"{length:,} tokens: swap", 1000 * medians["swap"], "ms"),
            Row(f"{length:,} tokens: swap, estimated", 1000 * lab.costs.swap_s(length), "ms"),
            Row(f"{length:,} tokens: recompute", 1000 * medians["recompute"], "ms"),
            Row(f"{length:,} tokens: recompute, estimated", 1000 * lab.costs.recompute_s(length), "ms"),
            Row(f"{length:,} tokens: chosen ({chosen}) ÷ the faster", _ratio(medians, chosen), "", "<= 1"),
        ]
    notes = [
        "the length when the older one arrives; some twenty tokens more when it preempts",
        "from the step that preempts to the sequence's next token, less two steps undisturbed; 0 or less: noise",
        "estimated: from what was measured at start; --preemption-mode auto chooses by it",
        f"measured at start: {lab.costs}",
    ]
    return Findings(title="swap against recompute", rows=rows, notes=notes)


def _ratio(seconds: Mapping[str, float], chosen: str) -> float:
    fastest = min(seconds.values())
    return seconds[chosen] / fastest if fastest > 0 else 1.0


def _cost(lab: Lab, mode: str, length: int, space: int, seed: int) -> float:
    """Seconds of engine time that one preemption costs."""
    size = lab.page_size
    # The younger one's tokens, and for the older one two pages, a third that it takes at first, and none more.
    num_pages = -(-length // size) + 4
    if num_pages * size > lab.max_model_len:
        raise ConfigError(f"--lengths has {length}; with --num-pages the engine takes {lab.max_model_len - 4 * size}")
    core, _ = lab.engine(
        num_pages=num_pages, preemption_mode=mode, swap_space_bytes=space if mode == "swap" else 0, max_num_seqs=4
    )
    prompt = random_items([0.0], max(length - 2, 1), 1, 0.0, lab.vocab_size, seed)[0].prompt_token_ids
    room = num_pages * size - len(prompt)
    core.begin_step([Add(bench_request("young", prompt, room, 1.0))])
    while "young" not in _sampled(core.step(_now())):
        pass
    alone = statistics.median(_seconds(core) for _ in range(5))
    core.begin_step([Add(bench_request("old", prompt[: 2 * size - 1] or prompt, room, 0.0))])
    while True:
        before = _num_preemptions(core)
        began = _now()
        step = core.step(began)
        if _num_preemptions(core) > before:
            break
        if not step.num_tokens:
            raise EngineError("nothing was preempted", reason="STALLED")
    core.begin_step([Abort("old")])
    while "young" not in _sampled(core.step(_now())):
        pass
    seconds = _now() - began
    core.begin_step([Abort("young")])
    core.step(_now())
    core.check()
    return seconds - 2 * alone


def _seconds(core: EngineCore) -> float:
    began = _now()
    core.step(began)
    return _now() - began


def _num_preemptions(core: EngineCore) -> int:
    totals = core.load().preemptions
    return totals.num_swaps + totals.num_recomputes


def _sampled(step: StepEvents) -> list[str]:
    if not step.num_tokens:
        raise EngineError("the engine stands still although requests are open", reason="STALLED")
    return [event.key for event in step.events if isinstance(event, TokensSampled)]
