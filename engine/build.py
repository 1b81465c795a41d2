"""Puts an engine together from its configuration: model or fake, layout, pages, token budget, core."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from pdserve.core.clock import MonotonicClock
from pdserve.core.errors import ConfigError, PdserveError
from pdserve.core.hashing import identity_digest
from pdserve.core.layout import KVLayout
from pdserve.core.sampling import SamplingParams
from pdserve.core.structured import StructuredOutputs, unsupported_here
from pdserve.core.tokenizer import Tokenizer
from pdserve.engine.async_engine import AsyncEngine
from pdserve.engine.batching import make_batching
from pdserve.engine.chunks import SchedulerLimits
from pdserve.engine.config import DEFAULT_STEP_TARGET_MS, KV_DTYPES, EngineConfig
from pdserve.engine.engine_core import EngineCore, Staging
from pdserve.engine.kv_cache import PlainPool, PoolMemory
from pdserve.engine.page_pool import PagePool
from pdserve.engine.policies import make_policy
from pdserve.engine.preemption_costs import PreemptionMeter, measure_preemption
from pdserve.engine.prefix_cache import PrefixCache
from pdserve.engine.preparation import PREPARE_WAIT_S, Prepare, finish
from pdserve.engine.profile import StepMeter, StepProfile, measure_context_unit, profile_steps
from pdserve.engine.progress import Progress, SilentProgress
from pdserve.engine.step import Runner, RunnerOutput, SchedulerOutput
from pdserve.engine.swap import PreemptionCosts, SwapSpace

MakePool = Callable[[KVLayout, int], PoolMemory]

_FAKE_MAX_MODEL_LEN = 1 << 20
_FAKE_NUM_PAGES = 4096
_MAX_TOKEN_BUDGET = 2048
_CONTEXT_CHUNK, _CONTEXT = 16, 2048  # tokens: what the cost of context is measured with

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What the owner of an engine needs to know of it.

    Attributes:
        layout: Layout of its pages.
        num_pages: Pages in the pool.
        identity_digest: Must be equal on all workers that exchange pages.
        model_name: Name that clients ask for.
        max_model_len: Prompt and output tokens together, at most.
        vocab_size: Token ids are below it.
        eos_token_ids: End-of-sequence tokens.
        model_dir: Directory of the model; None for the fake.
        tokenizer: Of the model.
        pool_memory: Memory of the pages.
        token_budget: Tokens that a step may compute.
        profile: What the token budget was chosen from; None when it was given.
        prepare: Told of a request's parameters before it is added: refuses what this engine cannot do, and begins to
            compile its grammar, which must be ready then.
        preemption_costs: What swap or recompute is chosen from; None when there is no choice.
    """

    layout: KVLayout
    num_pages: int
    identity_digest: bytes
    model_name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    model_dir: Path | None
    tokenizer: Tokenizer
    pool_memory: PoolMemory
    token_budget: int
    profile: StepProfile | None
    prepare: Prepare
    preemption_costs: PreemptionCosts | None


@dataclass(frozen=True, kw_only=True)
class BuiltCore(EngineFacts):
    """An engine without a thread, and its facts."""

    core: EngineCore


@dataclass(frozen=True, kw_only=True)
class BuiltEngine(EngineFacts):
    """An engine in its own thread, not started, and its facts."""

    engine: AsyncEngine


def build_engine(config: EngineConfig, make_pool: MakePool, progress: Progress | None = None) -> BuiltEngine:
    """Builds an engine for a service. See `build_core`."""
    facts = vars(build_core(config, make_pool, progress)).copy()
    if config.runner == "model":
        _prepare_once(facts["prepare"])
    return BuiltEngine(engine=AsyncEngine(facts.pop("core"), MonotonicClock().now, facts["prepare"]), **facts)


def _prepare_once(prepare: Prepare) -> None:
    """Compiles a small grammar, for which the library reads the tokenizer: in the first request that would hold
    Python's lock, and with it all streams and heartbeats, for most of a second."""
    try:
        if (preparation := prepare(SamplingParams(structured_outputs=StructuredOutputs(choice=("yes",))))) is not None:
            finish(preparation, PREPARE_WAIT_S)
    except PdserveError as e:
        _log.warning("requests with structured_outputs will fail: %s", e)


def build_core(config: EngineConfig, make_pool: MakePool, progress: Progress | None = None) -> BuiltCore:
    """Builds an engine: loads the model, takes the memory, measures the token budget.

    Args:
        config: What the engine is told.
        make_pool: Makes the memory of so many pages.
        progress: Told about long steps.

    Raises:
        ConfigError: The model, its tokenizer or the memory does not fit the configuration.
    """
    if config.runner == "fake":
        return _build_fake(config, make_pool)
    return _build_model(config, make_pool, progress or SilentProgress())


def _build_fake(config: EngineConfig, make_pool: MakePool) -> BuiltCore:
    from pdserve.engine.fake import FAKE_EOS, FAKE_VOCAB_SIZE, FakeRunner, fake_costs, fake_layout

    layout = fake_layout(config.page_size)
    num_pages = config.num_pages or min(_num_pages(config, layout), _FAKE_NUM_PAGES)
    memory = make_pool(layout, num_pages)
    host_pages = _num_host_pages(config, layout)
    host = PlainPool(layout, host_pages).buffer if host_pages else None
    runner: Runner = FakeRunner(memory.buffer, layout, host=host)
    if config.fake_step_ms:
        runner = _Paced(runner, config.fake_step_ms / 1000)
    budget = config.max_num_batched_tokens or max(config.max_num_seqs, _MAX_TOKEN_BUDGET)
    max_model_len = _max_model_len(config, layout, num_pages, _FAKE_MAX_MODEL_LEN)
    costs = fake_costs(config.page_size, budget) if _chooses(config) else None
    swap = make_swap_space(config, layout, costs)
    identity = identity_digest({"runner": "fake", "model": _model_name(config)})
    return BuiltCore(
        core=make_core(config, runner, num_pages, budget, max_model_len, identity, swap),
        layout=layout,
        num_pages=num_pages,
        identity_digest=identity,
        model_name=_model_name(config),
        max_model_len=max_model_len,
        vocab_size=FAKE_VOCAB_SIZE,
        eos_token_ids=frozenset({FAKE_EOS}),
        model_dir=None,
        tokenizer=Tokenizer.fake(FAKE_VOCAB_SIZE),
        pool_memory=memory,
        token_budget=budget,
        profile=None,
        prepare=_refuse_structured,
        preemption_costs=costs,
    )


def _build_model(config: EngineConfig, make_pool: MakePool, progress: Progress) -> BuiltCore:
    # Idle OpenMP threads spin by default and starve neighbours on shared cores; read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    from pdserve.engine.device import DevicePool, find_device
    from pdserve.engine.grammars import Grammars
    from pdserve.engine.graphs import CudaCapture
    from pdserve.engine.loader import load_model
    from pdserve.engine.model_store import resolve_model
    from pdserve.engine.processors import standard_processors
    from pdserve.engine.runner import ModelRunner
    from pdserve.engine.structured import StructuredProcessor

    _check_threads(config.threads or 1)
    where = find_device(config.device)
    model_dir = resolve_model(config.model, progress)
    if where.type == "cpu":
        _use_cpu_kernels(config.threads or 1)
    torch.set_num_threads(config.threads or 1)
    loaded = load_model(
        model_dir, config.dtype, progress, where, impl=config.model_impl, quantization=config.quantization
    )
    layout = loaded.layout(config.page_size, KV_DTYPES[config.kv_cache_dtype])
    num_pages = config.num_pages or _num_pages(config, layout)
    memory = make_pool(layout, num_pages)
    max_model_len = _max_model_len(config, layout, num_pages, loaded.max_model_len)
    tokenizer = Tokenizer.from_dir(model_dir)
    # Features that edit logits, in the order of application; see engine.logits.
    grammars = Grammars(model_dir / "tokenizer.json", loaded.vocab_size, loaded.eos_token_ids)
    processors = [
        *standard_processors(loaded.eos_token_ids, tokenizer.encode_part, loaded.model.device),
        StructuredProcessor(grammars, 2 * config.max_num_seqs),
    ]
    host_pages = _num_host_pages(config, layout)
    host = PlainPool(layout, host_pages) if host_pages else None
    device_pool = DevicePool(layout, num_pages, where) if config.device == "cuda" else None
    runner = ModelRunner(loaded, layout, num_pages, memory, host, processors, device_pool)
    if device_pool is not None and not config.enforce_eager:
        progress.begin("capturing CUDA graphs")
        runner.use_graphs(CudaCapture(where), config.max_num_seqs, max_model_len)
        progress.end()
    identity = loaded.identity_digest(_model_name(config))
    budget, profile, costs = config.max_num_batched_tokens, None, None
    if budget is not None:
        _log.info("token budget %d, as --max-num-batched-tokens says", budget)
    else:
        progress.begin("measuring step times")
        profile = _profile(config, runner, layout, num_pages, max_model_len)
        budget = profile.token_budget
        progress.end()
    if _chooses(config):
        progress.begin("measuring the costs of preemption")
        meter = PreemptionMeter(runner, layout, min(max_model_len, num_pages * layout.page_size))
        costs = measure_preemption(meter, budget, layout.page_size, min(num_pages, host_pages))
        _log.info("costs of preemption: %s", costs)
        progress.end()
    return BuiltCore(
        core=make_core(
            config,
            runner,
            num_pages,
            budget,
            max_model_len,
            identity,
            make_swap_space(config, layout, costs),
            None if device_pool is None else device_pool.staging(memory),
            math.inf if profile is None else profile.context_unit,
        ),
        layout=layout,
        num_pages=num_pages,
        identity_digest=identity,
        model_name=_model_name(config),
        max_model_len=max_model_len,
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        model_dir=model_dir,
        tokenizer=tokenizer,
        pool_memory=memory,
        token_budget=budget,
        profile=profile,
        prepare=grammars.prepare,
        preemption_costs=costs,
    )


def _check_threads(threads: int) -> None:
    if threads > (cores := len(os.sched_getaffinity(0))):
        _log.warning(
            "--threads is %d and this process has %d cores: more threads than cores stall each other", threads, cores
        )


def _use_cpu_kernels(threads: int) -> None:
    from pdserve.kernels.cpu import library

    if reason := library.why_not():
        _log.warning("no compiled CPU kernels, torch serves more slowly: %s", reason)
        return
    try:
        library.set_threads(threads)
    except RuntimeError as e:
        raise ConfigError(f"--threads is {threads}: {e}") from e


def _refuse_structured(params: SamplingParams) -> None:
    if params.structured_outputs is not None:
        raise unsupported_here()


class _Paced:
    """A runner whose steps take at least so long, as a real one's do."""

    def __init__(self, runner: Runner, step_s: float) -> None:
        self._runner = runner
        self._step_s = step_s

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """See `Runner`."""
        time.sleep(self._step_s)
        return self._runner.execute(output)


def make_core(
    config: EngineConfig,
    runner: Runner,
    num_pages: int,
    budget: int,
    max_model_len: int,
    identity: bytes = b"",
    swap: SwapSpace | None = None,
    staging: Staging | None = None,
    context_unit: float = math.inf,
) -> EngineCore:
    """A core over a runner that exists already.

    Args:
        config: What the engine is told.
        runner: Computes steps over `num_pages` pages.
        num_pages: Pages in the pool.
        budget: Tokens of a step, whatever the configuration says.
        max_model_len: Known tokens of one sequence.
        identity: What cached KV depends on beside the tokens.
        swap: What becomes of the KV of preempted sequences; None: all are computed anew.
        staging: See `EngineCore`.
        context_unit: See `SchedulerLimits`.
    """
    limits = SchedulerLimits(
        page_size=config.page_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        long_tokens=config.long_prefill_token_threshold,
        max_num_long=config.max_long_partial_prefills or 1,
        max_unreserved_fraction=config.max_unreserved_fraction,
        context_unit=context_unit,
    )
    config.check_token_budget(budget)
    pool = PagePool(num_pages)
    batching = make_batching(config.batching, config.batch_size or config.max_num_seqs, config.batch_window_ms)
    policy = make_policy(
        config.scheduling_policy,
        aging_s_per_level=config.priority_aging_s,
        aging_tokens_per_s=config.sjf_aging_rate,
    )
    cache = PrefixCache(pool, config.page_size, identity) if config.enable_prefix_caching else None
    return EngineCore(limits, pool, runner, policy, batching, swap, cache, staging)


def make_swap_space(config: EngineConfig, layout: KVLayout, costs: PreemptionCosts | None) -> SwapSpace:
    """Host pages as the configuration says; `costs` decide when it leaves the choice to them."""
    num_pages = _num_host_pages(config, layout)
    if costs is None or not _chooses(config):  # all or nothing
        return SwapSpace(num_pages, layout.page_size, layout.page_bytes)
    return SwapSpace(num_pages, layout.page_size, layout.page_bytes, costs.prefer_swap)


def _model_name(config: EngineConfig) -> str:
    return config.served_model_name or Path(config.model).name


def _num_pages(config: EngineConfig, layout: KVLayout) -> int:
    if (num_pages := config.kv_cache_memory_bytes // layout.page_bytes) < 1:
        raise ConfigError(
            f"--kv-cache-memory-bytes is {config.kv_cache_memory_bytes}; one page of this model takes "
            f"{layout.page_bytes} bytes"
        )
    return num_pages


def _max_model_len(config: EngineConfig, layout: KVLayout, num_pages: int, of_model: int | None) -> int:
    asked, in_pool = config.max_model_len, num_pages * layout.page_size
    if asked is not None and of_model is not None and asked > of_model:
        raise ConfigError(f"--max-model-len is {asked}; the model knows {of_model} positions")
    if asked is None and of_model is None:
        raise ConfigError("the model does not say how long a sequence may be; set --max-model-len")
    length = min(n for n in (asked, of_model, in_pool) if n is not None)
    if length < 2:
        raise ConfigError(f"the KV pages hold {in_pool} token; a sequence needs 2: raise --num-pages")
    return length


def _profile(config: EngineConfig, runner: Runner, layout: KVLayout, num_pages: int, max_model_len: int) -> StepProfile:
    """Measures the token budget, and what context takes of it."""
    profile = _profile_budget(config, runner, layout, num_pages, max_model_len)
    num = min(_CONTEXT_CHUNK, max_model_len)
    context = min(_CONTEXT, min(max_model_len, num_pages * layout.page_size) - num)
    if context < 1:
        return profile
    meter = StepMeter(runner, layout.page_size, num_pages)
    unit = measure_context_unit(lambda before: meter.measure_chunk(num, before), profile.token_s, num, context)
    if math.isinf(unit):
        _log.info("context costs a prompt's token nothing noticeable")
    else:
        _log.info("a prompt's token takes twice as long after %.0f others", unit)
    return replace(profile, context_unit=unit)


def _profile_budget(
    config: EngineConfig, runner: Runner, layout: KVLayout, num_pages: int, max_model_len: int
) -> StepProfile:
    size = layout.page_size
    if config.tpot_slo_ms is None:
        meter = StepMeter(runner, size, num_pages)
        target_ms = config.step_target_ms or DEFAULT_STEP_TARGET_MS
        limit = min(_MAX_TOKEN_BUDGET, max_model_len, num_pages * size)
        profile = profile_steps(meter.measure, target_ms / 1000, size, limit)
        _log.info("token budget %d for steps of %g ms; measured: %s", profile.token_budget, target_ms, profile)
        return profile
    num, slo_ms = config.max_num_seqs, config.tpot_slo_ms
    # As long as the members of a full batch can be on average.
    context = max(1, min(max_model_len - 1, num_pages * size // num - 1))
    meter = StepMeter(runner, size, num_pages, context)
    limit = num + min(_MAX_TOKEN_BUDGET, max_model_len, num_pages * size)
    profile = profile_steps(
        lambda tokens: meter.measure(tokens, num), slo_ms / 1000, num + size, limit, num_decodes=num
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


def _num_host_pages(config: EngineConfig, layout: KVLayout) -> int:
    if 0 < config.swap_space_bytes < layout.page_bytes:
        raise ConfigError(
            f"--swap-space-bytes is {config.swap_space_bytes}; one page of this model takes {layout.page_bytes} bytes"
        )
    return config.swap_space_bytes // layout.page_bytes


def _chooses(config: EngineConfig) -> bool:
    """Says whether it depends on costs what is swapped."""
    return config.preemption_mode == "auto" and config.swap_space_bytes > 0
