"""EngineConfig: what the engine is told. What it measures at start-up is another object (`engine.profile`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pdserve.core.config import check, flag_name, option
from pdserve.core.errors import ConfigError
from pdserve.core.layout import FP8
from pdserve.engine.batching import BATCHINGS, DEFAULT_WINDOW_MS
from pdserve.engine.policies import DEFAULT_AGING_S_PER_LEVEL, DEFAULT_AGING_TOKENS_PER_S, POLICIES
from pdserve.engine.swap import PREEMPTION_MODES

DEFAULT_STEP_TARGET_MS = 250.0
PREFILL_STEP_TARGET_MS = 600.0  # of a worker whose steps no stream of tokens waits for
KV_DTYPES = {"auto": None, "fp8_e4m3": FP8}
"""`--kv-cache-dtype` -> dtype of the layout; None: that of the weights."""
KV_TOKENS_PER_SEQ = 512
"""Of KV, for each of `--max-num-seqs`, in a pool whose size nobody said."""
MAX_THREADS = 256
"""Of the compiled kernels; OpenMP, where torch serves, breaks the process with far more."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Model, memory and batching limits of one engine."""

    model: str = option(
        "SmolLM2-135M-Instruct",
        "model: a local directory, a hub id, a GGUF file, or the built-in SmolLM2-135M-Instruct",
    )
    served_model_name: str | None = option(None, "name that clients ask for; default: the last part of --model")
    device: str = option(
        "auto",
        "where the model and its KV are; auto: the CPU; cuda: a GPU, which no test of this version has run on",
        choices=("auto", "cpu", "cuda"),
    )
    dtype: str = option(
        "auto",
        "type of weights and KV; auto: float32 on the CPU, bfloat16 on a GPU",
        choices=("auto", "float32", "float16", "bfloat16"),
    )
    kv_cache_dtype: str = option(
        "auto",
        "type of KV in the pages; auto: that of --dtype; fp8_e4m3: 8 bits instead of 16; needs --device cuda",
        choices=tuple(KV_DTYPES),
    )
    model_impl: str = option(
        "auto",
        "whose code computes the model; lean: our own of Llama, Qwen2, Qwen3 and Mistral (on a CPU in float32); "
        "transformers: its modules; auto: lean on a CPU, where it knows the model exactly",
        choices=("auto", "lean", "transformers"),
    )
    enforce_eager: bool = option(False, "cuda: compute steps of decodes alone without CUDA graphs, too")
    quantization: str | None = option(
        None,
        "int8: linears' weights in 8 bits, a quarter of the memory; activations and KV stay float32; default: none",
        choices=("int8",),
    )
    max_model_len: int | None = option(
        None,
        "prompt and output tokens together, at most; default: what the model and the pool allow",
        unit="tokens",
        minimum=2,
    )
    page_size: int = option(16, "tokens per KV page", unit="tokens", minimum=1, maximum=512)
    kv_cache_memory_bytes: int | None = option(
        None,
        f"memory for KV pages; default: {KV_TOKENS_PER_SEQ} tokens for each of --max-num-seqs, no less than the "
        "longest sequence, and 1 GiB at most",
        unit="bytes",
        minimum=1,
    )
    num_pages: int | None = option(None, "KV pages; wins over --kv-cache-memory-bytes", unit="pages", minimum=1)
    max_num_seqs: int = option(64, "sequences that run at once, at most", unit="sequences", minimum=1)
    max_num_batched_tokens: int | None = option(
        None,
        "token budget of a step; default: what --step-target-ms or --tpot-slo-ms allows, measured at start",
        unit="tokens",
        minimum=1,
    )
    step_target_ms: float | None = option(
        None,
        "time of a step full of prompt tokens, from which the token budget is chosen; default: "
        f"{DEFAULT_STEP_TARGET_MS:g}, on prefill workers {PREFILL_STEP_TARGET_MS:g}",
        unit="ms",
        minimum=1,
    )
    tpot_slo_ms: float | None = option(
        None,
        "time that an output token may take: the token budget is chosen so that a step of --max-num-seqs decodes and a "
        "chunk stays below it (instead of --step-target-ms)",
        unit="ms",
        minimum=1,
    )
    long_prefill_token_threshold: int | None = option(
        None,
        "a prompt with more tokens is long: it takes no more per step while others want some; default: none is long",
        unit="tokens",
        minimum=1,
    )
    max_long_partial_prefills: int | None = option(
        None,
        "long prompts computed at once, at most; shorter ones pass those that wait; default: 1",
        unit="prompts",
        minimum=1,
    )
    enable_prefix_caching: bool = option(
        True, "keep computed pages and share them among requests with equal leading tokens and cache_salt"
    )
    scheduling_policy: str = option(
        "fcfs",
        "who starts first; fcfs: first come; priority: lower values; sjf: least expected work; fair: tenants in turn, "
        "by tokens served",
        choices=POLICIES,
    )
    priority_aging_s: float | None = option(
        None,
        f"policy priority: waiting that makes up for one level; default: {DEFAULT_AGING_S_PER_LEVEL:g}",
        unit="s",
        minimum=0.001,
    )
    sjf_aging_rate: float | None = option(
        None,
        "policy sjf: expected work, in prompt tokens, that a second of waiting makes up for; "
        f"default: {DEFAULT_AGING_TOKENS_PER_S:g}",
        unit="tokens/s",
        minimum=0.001,
    )
    batching: str = option(
        "continuous",
        "continuous: join and leave at every step; static: fixed batches, each run to its longest member; dynamic: as "
        "static, after collecting for --batch-window-ms (both only embedded or on MIXED workers)",
        choices=BATCHINGS,
    )
    batch_size: int | None = option(
        None, "members of a static or dynamic batch; default: --max-num-seqs", unit="sequences", minimum=1
    )
    batch_window_ms: float | None = option(
        None,
        f"dynamic: how long a batch that is not full waits for more; default: {DEFAULT_WINDOW_MS:g}",
        unit="ms",
        minimum=0,
    )
    preemption_mode: str = option(
        "auto",
        "what becomes of the KV of a preempted sequence; recompute: dropped and computed again; swap: copied to host "
        "memory and back; auto: what takes less time, by measurements at start",
        choices=PREEMPTION_MODES,
    )
    swap_space_bytes: int = option(
        0, "host memory for the KV of preempted sequences; 0, or when it is full: recompute", unit="bytes", minimum=0
    )
    max_unreserved_fraction: float = option(
        0.25,
        "share of the pool that sequences without a reserved destination may hold",
        minimum=0.0,
        maximum=1.0,
        roles=("prefill",),
    )
    threads: int | None = option(
        None,
        "CPU threads of the model; default: 1 (with pdserve up: the cores, divided among the workers of a role)",
        unit="threads",
        minimum=1,
        maximum=MAX_THREADS,
    )
    runner: str = option(
        "model",
        "model: the real one; fake: hashes of tokens in real pages (for tests of everything else)",
        choices=("model", "fake"),
    )
    fake_step_ms: float = option(0.0, "fake runner: least time of a step, for tests of faults", unit="ms", minimum=0)

    def __post_init__(self) -> None:
        check(self)
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens is {self.max_num_batched_tokens}; it must be at least --max-num-seqs "
                f"({self.max_num_seqs}), or prompts would wait for as long as a full batch decodes"
            )
        if self.enforce_eager and self.device != "cuda":
            raise ConfigError(f"--enforce-eager needs --device cuda; --device is {self.device!r}, which has no graphs")
        self._check_kv_dtype()
        self._check_targets()
        if self.max_long_partial_prefills is not None and self.long_prefill_token_threshold is None:
            raise ConfigError(
                f"--max-long-partial-prefills is {self.max_long_partial_prefills}; it needs "
                "--long-prefill-token-threshold, which says what long is"
            )
        if self.max_num_batched_tokens is not None:
            self.check_token_budget(self.max_num_batched_tokens)
        self._check_quantization()
        self._check_policy()
        self._check_batching()
        self._check_swap()

    def for_prefill(self) -> EngineConfig:
        """The same for a prefill worker beside others, without what `check_prefill` refuses."""
        return replace(self, tpot_slo_ms=None, preemption_mode="auto", swap_space_bytes=0)

    def check_hand_offs(self, instead: str = "pdserve decode --role mixed") -> None:
        """Refuses what makes no sense on a worker that other workers wait for.

        Args:
            instead: Command or flags of a worker that takes it.

        Raises:
            ConfigError: With the flag.
        """
        if self.batching != "continuous":
            raise ConfigError(
                f"--batching is {self.batching!r}; prefill and decode workers take only continuous, for a sequence "
                f"that is handed over must not wait for a batch: use {instead}, or pdserve.LLM"
            )

    def of_prefill_worker(self) -> EngineConfig:
        """The same with a prefill worker's default of --step-target-ms: no stream waits for its steps.

        Raises:
            ConfigError: With the flag that makes no sense on one.
        """
        self.check_prefill()
        if self.max_num_batched_tokens is not None or self.step_target_ms is not None:
            return self
        return replace(self, step_target_ms=PREFILL_STEP_TARGET_MS)

    def check_prefill(self) -> None:
        """Refuses what makes no sense on a prefill worker.

        Raises:
            ConfigError: With the flag.
        """
        self.check_hand_offs()
        if self.tpot_slo_ms is not None:
            raise ConfigError(
                f"--tpot-slo-ms is {self.tpot_slo_ms:g}; a prefill worker generates no further tokens: give it to the "
                "decode or mixed workers, and --step-target-ms to this one"
            )
        if self.swap_space_bytes:
            raise ConfigError(
                f"--swap-space-bytes is {self.swap_space_bytes}; a prefill worker swaps nothing, for the pages of its "
                "sequences get readers: give it to the decode or mixed workers"
            )

    def _check_targets(self) -> None:
        given = [n for n in ("max_num_batched_tokens", "step_target_ms", "tpot_slo_ms") if getattr(self, n) is not None]
        if len(given) > 1:
            names = " and ".join(f"{flag_name(name)} ({getattr(self, name):g})" for name in given)
            raise ConfigError(f"{names} all set the token budget of a step; give one of them")
        if self.tpot_slo_ms is not None and self.runner == "fake":
            raise ConfigError(f"--tpot-slo-ms is {self.tpot_slo_ms:g}; --runner fake has no step times to measure")

    def check_token_budget(self, token_budget: int) -> None:
        """Refuses limits that do not fit the token budget, given or measured.

        Raises:
            ConfigError: With the flags.
        """
        threshold, num_long = self.long_prefill_token_threshold, self.max_long_partial_prefills or 1
        if threshold is not None and threshold * num_long >= token_budget:
            raise ConfigError(
                f"--long-prefill-token-threshold is {threshold} and --max-long-partial-prefills {num_long}; together "
                f"they must be below the token budget of a step ({token_budget}), or shorter prompts get nothing"
            )

    def _check_kv_dtype(self) -> None:
        if KV_DTYPES[self.kv_cache_dtype] is None:
            return
        why = f"--kv-cache-dtype is {self.kv_cache_dtype!r}"
        if self.device != "cuda" or self.runner != "model":
            raise ConfigError(
                f"{why}; it needs --device cuda and --runner model: the CPU's kernels read KV of the type of --dtype"
            )
        if self.dtype == "float32":
            raise ConfigError(f"{why} and --dtype is 'float32'; it needs a --dtype of 16 bits, or auto")

    def _check_quantization(self) -> None:
        for name, allowed in (("device", ("auto", "cpu")), ("dtype", ("auto", "float32")), ("runner", ("model",))):
            if self.quantization is not None and getattr(self, name) not in allowed:
                raise ConfigError(
                    f"--quantization is {self.quantization!r} and {flag_name(name)} is {getattr(self, name)!r}; it "
                    f"needs {flag_name(name)} {allowed[-1]}"
                )

    def _check_policy(self) -> None:
        for policy, name in (("priority", "priority_aging_s"), ("sjf", "sjf_aging_rate")):
            if getattr(self, name) is not None and self.scheduling_policy != policy:
                raise ConfigError(
                    f"{flag_name(name)} is {getattr(self, name):g}; it needs --scheduling-policy {policy}"
                )

    def _check_batching(self) -> None:
        if self.batch_size is not None and self.batching == "continuous":
            raise ConfigError(f"--batch-size is {self.batch_size}; it needs --batching static or dynamic")
        if self.batch_size is not None and self.batch_size > self.max_num_seqs:
            raise ConfigError(
                f"--batch-size is {self.batch_size}; it must be at most --max-num-seqs ({self.max_num_seqs})"
            )
        if self.batch_window_ms is not None and self.batching != "dynamic":
            raise ConfigError(f"--batch-window-ms is {self.batch_window_ms:g}; it needs --batching dynamic")

    def _check_swap(self) -> None:
        if self.preemption_mode == "swap" and not self.swap_space_bytes:
            raise ConfigError(
                "--preemption-mode is 'swap' and --swap-space-bytes is 0; set that to the host memory that preempted "
                "sequences may take"
            )
        if self.preemption_mode == "recompute" and self.swap_space_bytes:
            raise ConfigError(
                f"--swap-space-bytes is {self.swap_space_bytes} and --preemption-mode is 'recompute', which swaps "
                "nothing; leave one of them out"
            )
