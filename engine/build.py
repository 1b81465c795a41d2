"""Puts an engine together from its configuration: model or fake, layout, pages, token budget, core."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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
from pdserve.engine.config import KV_DTYPES, KV_TOKENS_PER_SEQ, EngineConfig
from pdserve.engine.engine_core import EngineCore, Staging
from pdserve.engine.kv_cache import PlainPool, PoolMemory
from pdserve.engine.measuring import MAX_TOKEN_BUDGET, EngineSizes, chooses_by_costs, measure
from pdserve.engine.page_pool import PagePool
from pdserve.engine.policies import make_policy
from pdserve.engine.prefix_cache import PrefixCache
from pdserve.engine.preparation import PREPARE_WAIT_S, Prepare, finish
from pdserve.engine.profile import StepProfile
from pdserve.engine.progress import Progress, SilentProgress
from pdserve.engine.step import Runner, RunnerOutput, SchedulerOutput
from pdserve.engine.swap import PreemptionCosts, SwapSpace

if TYPE_CHECKING:
    import torch

    from pdserve.engine.grammars import Grammars
    from pdserve.engine.loader import LoadedModel
    from pdserve.engine.logits import LogitsProcessor
    from pdserve.engine.runner import ModelRunner

MakePool = Callable[[KVLayout, int], PoolMemory]

_FAKE_MAX_MODEL_LEN = 1 << 20
_FAKE_NUM_PAGES = 4096
_MOST_KV_BYTES = 1 << 30  # of a pool whose size nobody said

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
    num_pages = config.num_pages or min(_num_pages(config, layout, _FAKE_MAX_MODEL_LEN), _FAKE_NUM_PAGES)
    _check_memory(config, layout, num_pages)
    memory = make_pool(layout, num_pages)
    host_pages = _num_host_pages(config, layout)
    host = PlainPool(layout, host_pages).buffer if host_pages else None
    runner: Runner = FakeRunner(memory.buffer, layout, host=host)
    if config.fake_step_ms:
        runner = _Paced(runner, config.fake_step_ms / 1000)
    budget = config.max_num_batched_tokens or max(config.max_num_seqs, MAX_TOKEN_BUDGET)
    max_model_len = _max_model_len(config, layout, num_pages, _FAKE_MAX_MODEL_LEN)
    costs = fake_costs(config.page_size, budget) if chooses_by_costs(config) else None
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
    from pdserve.engine.grammars import Grammars

    model_dir, loaded, where = _load(config, progress)
    sizes = _sizes(config, loaded, where)
    memory = make_pool(sizes.layout, sizes.num_pages)
    tokenizer = Tokenizer.from_dir(model_dir)
    grammars = Grammars(model_dir / "tokenizer.json", loaded.vocab_size, loaded.eos_token_ids)
    processors = _processors(config, loaded, tokenizer, grammars)
    runner, staging = _make_runner(config, loaded, where, sizes, memory, processors, progress)
    identity = loaded.identity_digest(_model_name(config))
    measured = measure(config, runner, sizes, progress)
    budget, costs = measured.token_budget, measured.preemption_costs
    swap = make_swap_space(config, sizes.layout, costs)
    length, unit = sizes.max_model_len, measured.context_unit
    return BuiltCore(
        core=make_core(config, runner, sizes.num_pages, budget, length, identity, swap, staging, unit),
        layout=sizes.layout,
        num_pages=sizes.num_pages,
        identity_digest=identity,
        model_name=_model_name(config),
        max_model_len=length,
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        model_dir=model_dir,
        tokenizer=tokenizer,
        pool_memory=memory,
        token_budget=budget,
        profile=measured.profile,
        prepare=grammars.prepare,
        preemption_costs=costs,
    )


def _load(config: EngineConfig, progress: Progress) -> tuple[Path, LoadedModel, torch.device]:
    """Finds the device and the model, divides the threads, and loads."""
    import torch

    from pdserve.engine.device import find_device
    from pdserve.engine.loader import load_model
    from pdserve.engine.model_store import resolve_model

    threads = config.threads or 1
    _check_threads(threads)
    where = find_device(config.device)
    model_dir = resolve_model(config.model, progress)
    if where.type == "cpu":
        _use_cpu_kernels(threads)
    torch.set_num_threads(threads)
    loaded = load_model(
        model_dir, config.dtype, progress, where, impl=config.model_impl, quantization=config.quantization
    )
    return model_dir, loaded, where


def _sizes(config: EngineConfig, loaded: LoadedModel, where: torch.device) -> EngineSizes:
    layout = loaded.layout(config.page_size, KV_DTYPES[config.kv_cache_dtype])
    num_pages = _num_pages(config, layout, loaded.max_model_len)
    if where.type == "cpu":  # else that of the device counts
        _check_memory(config, layout, num_pages)
    return EngineSizes(
        layout=layout,
        num_pages=num_pages,
        num_host_pages=_num_host_pages(config, layout),
        max_model_len=_max_model_len(config, layout, num_pages, loaded.max_model_len),
    )


def _processors(
    config: EngineConfig, loaded: LoadedModel, tokenizer: Tokenizer, grammars: Grammars
) -> list[LogitsProcessor]:
    """Features that edit logits, in the order of application; see engine.logits."""
    from pdserve.engine.processors import standard_processors
    from pdserve.engine.structured import StructuredProcessor

    return [
        *standard_processors(loaded.eos_token_ids, tokenizer.encode_part, loaded.model.device),
        StructuredProcessor(grammars, 2 * config.max_num_seqs),
    ]


def _make_runner(
    config: EngineConfig,
    loaded: LoadedModel,
    where: torch.device,
    sizes: EngineSizes,
    memory: PoolMemory,
    processors: Sequence[LogitsProcessor],
    progress: Progress,
) -> tuple[ModelRunner, Staging | None]:
    """The runner, with pages of its own and graphs on a GPU, and what keeps those pages level with the host's."""
    from pdserve.engine.device import DevicePool
    from pdserve.engine.graphs import CudaCapture
    from pdserve.engine.runner import ModelRunner

    layout, num_pages = sizes.layout, sizes.num_pages
    host = PlainPool(layout, sizes.num_host_pages) if sizes.num_host_pages else None
    device_pool = DevicePool(layout, num_pages, where) if config.device == "cuda" else None
    runner = ModelRunner(loaded, layout, num_pages, memory, host, processors, device_pool)
    if device_pool is None:
        return runner, None
    if not config.enforce_eager:
        progress.begin("capturing CUDA graphs")
        runner.use_graphs(CudaCapture(where), config.max_num_seqs, sizes.max_model_len)
        progress.end()
    return runner, device_pool.staging(memory)


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
    if costs is None or not chooses_by_costs(config):  # all or nothing
        return SwapSpace(num_pages, layout.page_size, layout.page_bytes)
    return SwapSpace(num_pages, layout.page_size, layout.page_bytes, costs.prefer_swap)


def _model_name(config: EngineConfig) -> str:
    return config.served_model_name or Path(config.model).name


def _num_pages(config: EngineConfig, layout: KVLayout, of_model: int | None) -> int:
    """Pages in the pool: as asked, else what the sequences are likely to use. More would fill, too, in time, with
    prefixes that nobody may ask for again.
    """
    if config.num_pages is not None:
        return config.num_pages
    if config.kv_cache_memory_bytes is None:
        longest = config.max_model_len or of_model or 0
        wanted = math.ceil(max(config.max_num_seqs * KV_TOKENS_PER_SEQ, longest) / layout.page_size)
        return max(1, min(wanted, _MOST_KV_BYTES // layout.page_bytes))
    if (num_pages := config.kv_cache_memory_bytes // layout.page_bytes) < 1:
        raise ConfigError(
            f"--kv-cache-memory-bytes is {config.kv_cache_memory_bytes}; one page of this model takes "
            f"{layout.page_bytes} bytes"
        )
    return num_pages


def _check_memory(config: EngineConfig, layout: KVLayout, num_pages: int) -> None:
    """Refuses a pool that this machine could never fill: shared memory is given out without being there."""
    size, there = num_pages * layout.page_bytes, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > there:
        flag = "--kv-cache-memory-bytes" if config.num_pages is None else "--num-pages"
        given = (config.kv_cache_memory_bytes or size) if config.num_pages is None else num_pages
        raise ConfigError(
            f"{flag} is {given}; KV pages would take {size} bytes, and this machine has {there}: it must be at most "
            f"{there if config.num_pages is None else there // layout.page_bytes}"
        )


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


def _num_host_pages(config: EngineConfig, layout: KVLayout) -> int:
    if 0 < config.swap_space_bytes < layout.page_bytes:
        raise ConfigError(
            f"--swap-space-bytes is {config.swap_space_bytes}; one page of this model takes {layout.page_bytes} bytes"
        )
    return config.swap_space_bytes // layout.page_bytes
