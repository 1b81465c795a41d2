"""EngineConfig: what the engine is told. What it measures at start-up is another object (`engine.profile`)."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.core.config import check, option
from pdserve.core.errors import ConfigError
from pdserve.engine.policies import POLICIES


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Model, memory and batching limits of one engine."""

    model: str = option(
        "SmolLM2-135M-Instruct", "model: a local directory, a hub id, or the built-in SmolLM2-135M-Instruct"
    )
    served_model_name: str | None = option(None, "name that clients ask for; default: the last part of --model")
    device: str = option(
        "auto", "where the model runs; auto: the CPU, the only one so far", choices=("auto", "cpu", "cuda")
    )
    dtype: str = option(
        "auto",
        "type of weights and KV; auto: float32",
        choices=("auto", "float32", "float16", "bfloat16"),
    )
    max_model_len: int | None = option(
        None,
        "prompt and output tokens together, at most; default: what the model and the pool allow",
        unit="tokens",
        minimum=2,
    )
    page_size: int = option(16, "tokens per KV page", unit="tokens", minimum=1, maximum=512)
    kv_cache_memory_bytes: int = option(1 << 30, "memory for KV pages", unit="bytes", minimum=1)
    num_pages: int | None = option(None, "KV pages; wins over --kv-cache-memory-bytes", unit="pages", minimum=1)
    max_num_seqs: int = option(64, "sequences that run at once, at most", unit="sequences", minimum=1)
    max_num_batched_tokens: int | None = option(
        None,
        "token budget of a step; default: what --step-target-ms allows, measured at start",
        unit="tokens",
        minimum=1,
    )
    step_target_ms: float = option(250.0, "step time that the measured token budget aims at", unit="ms", minimum=1)
    scheduling_policy: str = option(
        "fcfs", "order of waiting sequences; fcfs: by priority, then first come first served", choices=tuple(POLICIES)
    )
    max_unreserved_fraction: float = option(
        0.25,
        "prefill: share of the pool that sequences without a reserved destination may hold",
        minimum=0.0,
        maximum=1.0,
    )
    threads: int | None = option(
        None,
        "CPU threads of the model; default: 1 (with pdserve up: the cores, shared evenly among the workers)",
        unit="threads",
        minimum=1,
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
