"""What an engine measures as it starts: the token budget, what context takes of it, and what preemption costs."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace

from pdserve.core.layout import KVLayout
from pdserve.engine.chunks import LEAST_TOKENS
from pdserve.engine.config import DEFAULT_STEP_TARGET_MS, EngineConfig
from pdserve.engine.preemption_costs import PreemptionMeter, measure_preemption
from pdserve.engine.profile import StepMeter, StepProfile, measure_context_unit, profile_steps
from pdserve.engine.progress import Progress
from pdserve.engine.step import Runner
from pdserve.engine.swap import PreemptionCosts

MAX_TOKEN_BUDGET = 2048
_CONTEXT_CHUNK, _CONTEXT = 16, 2048  # tokens: what the cost of context is measured with

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EngineSizes:
    """How much a runner has room for.

    Attributes:
        layout: Layout of the pages.
        num_pages: Pages in the pool, >= 1.
        num_host_pages: Pages for what is swapped; 0: nothing is.
        max_model_len: Prompt and output tokens together, at most.
    """

    layout: KVLayout
    num_pages: int
    num_host_pages: int
    max_model_len: int

    @property
    def max_tokens(self) -> int:
        """Tokens of one sequence that the pool holds, too."""
        return min(self.max_model_len, self.num_pages * self.layout.page_size)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What came of it.

    Attributes:
        token_budget: Tokens that a step may compute, as given or measured.
        profile: What the token budget was chosen from; None when it was given.
        preemption_costs: What swap or recompute is chosen from; None when there is no choice.
    """

    token_budget: int
    profile: StepProfile | None
    preemption_costs: PreemptionCosts | None

    @property
    def context_unit(self) -> float:
        """See `SchedulerLimits`."""
        return math.inf if self.profile is None else self.profile.context_unit


def chooses_by_costs(config: EngineConfig) -> bool:
    """Says whether it depends on costs what is swapped."""
    return config.preemption_mode == "auto" and config.swap_space_bytes > 0


def measure(config: EngineConfig, runner: Runner, sizes: EngineSizes, progress: Progress) -> Measured:
    """Measures what the configuration leaves open, on a runner that is not in use yet.

    Args:
        config: What the engine is told.
        runner: Its pages hold nothing: they are written.
        sizes: Of the runner.
        progress: Told about long steps.
    """
    budget, profile, costs = config.max_num_batched_tokens, None, None
    if budget is not None:
        _log.info("token budget %d, as --max-num-batched-tokens says", budget)
    else:
        progress.begin("measuring step times")
        profile = _profile(config, runner, sizes)
        budget = profile.token_budget
        progress.end()
    if chooses_by_costs(config):
        progress.begin("measuring the costs of preemption")
        meter = PreemptionMeter(runner, sizes.layout, sizes.max_tokens)
        most_copied = min(sizes.num_pages, sizes.num_host_pages)
        costs = measure_preemption(meter, budget, sizes.layout.page_size, most_copied)
        _log.info("costs of preemption: %s", costs)
        progress.end()
    return Measured(token_budget=budget, profile=profile, preemption_costs=costs)


def _profile(config: EngineConfig, runner: Runner, sizes: EngineSizes) -> StepProfile:
    """Measures the token budget, and what context takes of it."""
    of_slo = config.tpot_slo_ms
    profile = _for_target(config, runner, sizes) if of_slo is None else _for_slo(config, of_slo, runner, sizes)
    num = min(_CONTEXT_CHUNK, sizes.max_model_len)
    context = min(_CONTEXT, sizes.max_tokens - num)
    if context < 1:
        return profile
    meter = StepMeter(runner, sizes.layout.page_size, sizes.num_pages)
    unit = measure_context_unit(lambda before: meter.measure_chunk(num, before), profile.token_s, num, context)
    if math.isinf(unit):
        _log.info("context costs a prompt's token nothing noticeable")
    else:
        _log.info("a prompt's token takes twice as long after %.0f others", unit)
    return replace(profile, context_unit=unit)


def _for_target(config: EngineConfig, runner: Runner, sizes: EngineSizes) -> StepProfile:
    """The tokens of a step that takes `step_target_ms`."""
    meter = StepMeter(runner, sizes.layout.page_size, sizes.num_pages)
    target_ms = config.step_target_ms or DEFAULT_STEP_TARGET_MS
    profile = profile_steps(meter.measure, target_ms / 1000, LEAST_TOKENS, min(MAX_TOKEN_BUDGET, sizes.max_tokens))
    _log.info("token budget %d for steps of %g ms; measured: %s", profile.token_budget, target_ms, profile)
    if not profile.holds(target_ms / 1000):
        _log.warning(
            "even the smallest step measured takes longer than --step-target-ms %g (%s), so prompts are computed "
            "in small chunks: if other work kept the cores busy, start again, or set --max-num-batched-tokens",
            *(target_ms, profile),
        )
    return profile


def _for_slo(config: EngineConfig, slo_ms: float, runner: Runner, sizes: EngineSizes) -> StepProfile:
    """The tokens of a step that holds the SLO with a full batch of decodes beside a chunk."""
    num, size = config.max_num_seqs, sizes.layout.page_size
    # As long as the members of a full batch can be on average.
    context = max(1, min(sizes.max_model_len - 1, sizes.num_pages * size // num - 1))
    meter = StepMeter(runner, size, sizes.num_pages, context)
    limit = num + min(MAX_TOKEN_BUDGET, sizes.max_tokens)
    profile = profile_steps(
        lambda tokens: meter.measure(tokens, num), slo_ms / 1000, num + LEAST_TOKENS, limit, num_decodes=num
    )
    _log.info(
        "token budget %d for --tpot-slo-ms %g with %d decodes of %d tokens; measured: %s",
        *(profile.token_budget, slo_ms, num, context, profile),
    )
    if not profile.holds(slo_ms / 1000):
        _log.warning(
            "--tpot-slo-ms %g cannot be held with --max-num-seqs %d: the smallest step with all of them takes longer "
            "(%s); lower --max-num-seqs",
            *(slo_ms, num, profile),
        )
    return profile
