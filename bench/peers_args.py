"""The flags of `pdserve bench peers`, and the suites that they ask for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from pdserve.bench.peers_measure import Level, Run
from pdserve.bench.peers_systems import System, vllm_disaggregated
from pdserve.core.config import check, option
from pdserve.core.errors import ConfigError

SUITES = ("peers", "disaggregation", "both")
DISAGGREGATION_LEVEL = Level(concurrency=4, num_prompts=24)
DISAGGREGATION_SYSTEMS = ("pdserve-pd", "pdserve-mixed", "vllm")


@dataclass(frozen=True, kw_only=True)
class PeersConfig:
    """What is compared, and for how long."""

    model: str = option("SmolLM2-135M-Instruct", "a Llama model: the built-in one, a hub id or a local directory")
    suite: str = option(
        "peers",
        "peers: --peers and ours; disaggregation: 4 streams, vLLM's (where --peers has it) and ours",
        choices=SUITES,
    )
    peers: str = option(
        "all",
        "peers to compare with, separated by commas: vllm, llamacpp-f32, llamacpp-q8_0, transformers-continuous, "
        "transformers-static; all; none: pdserve alone",
    )
    concurrency: str = option("1,8,16", "requests in flight, separated by commas")
    num_prompts: int = option(48, "requests at each concurrency", unit="requests", minimum=1)
    num_prompts_alone: int = option(8, "requests at concurrency 1", unit="requests", minimum=1)
    repeats: int = option(3, "rounds; medians are reported", unit="rounds", minimum=1)
    max_minutes: float = option(
        45.0, "no round of a suite begins that would not end within this, no system after it", unit="min", minimum=1
    )
    cores: str | None = option(None, "cores of every system, e.g. 0,1; default: all usable ones")
    start_timeout_s: float = option(600.0, "time that a system gets to be ready", unit="s", minimum=1)
    load_timeout_s: float = option(900.0, "time that one load may take", unit="s", minimum=1)
    build_jobs: int = option(1, "compilers at once while a peer is built", minimum=1)
    build_only: bool = option(False, "build the environments, start and ask every system once, and end")
    quick: bool = option(False, "few requests, one round: to see that it works; its numbers mean little")
    seed: int = option(0, "seed of the prompts", minimum=0)
    json: str | None = option(None, "write the report to this file", unit="file")

    def __post_init__(self) -> None:
        check(self)
        self.levels()
        if self.cores is not None and not set(_numbers("--cores", self.cores)) <= os.sched_getaffinity(0):
            raise ConfigError(f"--cores is {self.cores!r}; usable are {_listed(os.sched_getaffinity(0))}")

    def levels(self) -> tuple[Level, ...]:
        """The loads of suite peers."""
        found = []
        numbers = _numbers("--concurrency", self.concurrency)
        if len(set(numbers)) != len(numbers):  # results are kept by it
            raise ConfigError(f"--concurrency is {self.concurrency!r}; name each number once")
        for concurrency in numbers:
            if concurrency < 1:
                raise ConfigError(f"--concurrency is {self.concurrency!r}; every number must be at least 1")
            num = 4 if self.quick else self.num_prompts_alone if concurrency == 1 else self.num_prompts
            found.append(Level(concurrency=concurrency, num_prompts=num))
        return tuple(found)

    def usable_cores(self) -> tuple[int, ...]:
        """Cores of every system."""
        return _numbers("--cores", self.cores) if self.cores else tuple(sorted(os.sched_getaffinity(0)))


@dataclass(kw_only=True)
class Suite:
    """Systems under the same loads, and what came of it.

    Attributes:
        name: Of the suite.
        systems: In the order of the first round.
        levels: The loads.
        runs: Every start.
        notes: What was left out.
    """

    name: str
    systems: list[System]
    levels: tuple[Level, ...]
    runs: list[Run] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def chosen_suites(config: PeersConfig, known: Mapping[str, System]) -> list[Suite]:
    """What the flags ask for.

    Raises:
        ConfigError: `--peers` names what is not there.
    """
    peers = [name for name, system in known.items() if system.environment]
    wanted = (
        peers if config.peers == "all" else [n for n in map(str.strip, config.peers.split(",")) if n and n != "none"]
    )
    if unknown := [name for name in wanted if name not in peers]:
        raise ConfigError(f"--peers: unknown {', '.join(unknown)}; known: all, none, {', '.join(peers)}")
    found = []
    if config.suite in ("peers", "both"):
        chosen = [s for name, s in known.items() if s.environment is None or name in wanted]
        found.append(Suite(name="peers", systems=chosen, levels=config.levels()))
    if config.suite in ("disaggregation", "both"):
        chosen = [known[name] for name in DISAGGREGATION_SYSTEMS] + [vllm_disaggregated()]
        chosen = [s for s in chosen if s.environment is None or "vllm" in wanted]
        level = Level(concurrency=4, num_prompts=4) if config.quick else DISAGGREGATION_LEVEL
        found.append(Suite(name="disaggregation", systems=chosen, levels=(level,)))
    return found


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise ConfigError(f"{flag} is {text!r}; write numbers with commas, e.g. 0,1") from None


def _listed(cores: set[int]) -> str:
    return ",".join(map(str, sorted(cores)))
