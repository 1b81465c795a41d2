"""Runs what `pdserve bench handoff` measures: one deployment for each data plane, one request at a time, then the bare
plane with ranges of the same size while the deployment idles."""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from pdserve.bench.handoff_args import HandoffConfig
from pdserve.bench.handoff_numbers import Group, Sample, sample_of
from pdserve.bench.peers_clients import Endpoint
from pdserve.bench.peers_process import Command, Processes, SystemFailed
from pdserve.bench.peers_systems import free_port
from pdserve.bench.transfer_elsewhere import Elsewhere
from pdserve.bench.transfer_libraries import LIBRARIES
from pdserve.bench.transfer_methods import Case, Method, PlaneMethod
from pdserve.bench.transfer_source import PLANES, make_pool
from pdserve.client import AsyncClient, PdserveError
from pdserve.core.errors import ConfigError
from pdserve.core.extras import install_command

RATE_RUNS = 15
WARM_UP_RUNS = 3
MOVE_TIMEOUT_S = 60.0
FIRST_ORDINARY_TOKEN = 3
RESERVE_S = 15.0
"""For the bare plane and the end of a deployment, out of its time."""
Say = Callable[[str], None]


DEFAULT_LIBRARIES = ("nixl-shm",)


def chosen_planes(wanted: str) -> list[str]:
    """The planes that `--planes` names, as `pdserve bench transfer` does.

    Raises:
        ConfigError: One is not known, or not installed.
    """
    if wanted == "all":
        return [*PLANES, *(name for name in DEFAULT_LIBRARIES if LIBRARIES[name].is_installed)]
    chosen, known = [name for name in wanted.split(",") if name], [*PLANES, *LIBRARIES]
    if unknown := [name for name in chosen if name not in known]:
        raise ConfigError(f"--planes: unknown {', '.join(unknown)}; known: all, {', '.join(known)}")
    if missing := [name for name in chosen if name in LIBRARIES and not LIBRARIES[name].is_installed]:
        extra = LIBRARIES[missing[0]].transport
        raise ConfigError(f"--planes: {missing[0]} is not installed: {install_command(f'server,bench,{extra}')}")
    return chosen


class Budget:
    """Time that may be used until something must have ended.

    Args:
        until_s: Then; of `time.monotonic`.
    """

    def __init__(self, until_s: float) -> None:
        self._until_s = until_s
        self._longest_s: dict[int, float] = {}

    def took(self, size: int, seconds: float) -> None:
        """A piece of work of this size took so long."""
        self._longest_s[size] = max(seconds, self._longest_s.get(size, 0.0))

    def allows(self, size: int, now: float) -> bool:
        """False when another one like it would probably end too late; the first of a size is always allowed."""
        return size not in self._longest_s or now + self._longest_s[size] <= self._until_s


def schedule(config: HandoffConfig) -> list[int]:
    """Lengths of the prompts in the order in which they are sent: round after round, each length once per round."""
    lengths = config.prompt_lens()
    rounds = max(config.repeats_of(length) for length in lengths)
    return [length for at in range(rounds) for length in lengths if at < config.repeats_of(length)]


def measure_plane(
    plane: str, config: HandoffConfig, scratch: Path, until_s: float, say: Say
) -> tuple[list[Group], list[str]]:
    """Measures one plane.

    Args:
        plane: Its name.
        config: What to measure.
        scratch: Existing empty directory for logs and data.
        until_s: When it should have ended, of `time.monotonic`.
        say: Told of progress.

    Returns:
        One group per length, and what to say about them.

    Raises:
        SystemFailed: The deployment cannot be started, or broke; nothing of it is left.
        NotHandedOff: A request did not take the way that is measured.
    """
    with deployment(plane, config, scratch) as (endpoint, processes):
        samples, notes = asyncio.run(_requests(plane, endpoint, config, until_s - RESERVE_S, say))
        processes.check()
        backend_s = asyncio.run(backend_times(plane, samples))
    lengths = sorted({s.num_prompt_tokens for s in samples})
    by_length = ([s for s in samples if s.num_prompt_tokens == length] for length in lengths)
    return [Group(plane, same, backend_s) for same in by_length], notes


@contextmanager
def deployment(plane: str, config: HandoffConfig, scratch: Path) -> Iterator[tuple[Endpoint, Processes]]:
    """Store, router, one prefill and one decode worker whose pages travel over one plane; ended with the block.

    Raises:
        SystemFailed: It does not become ready.
    """
    library = LIBRARIES.get(plane)
    transport, env = (plane, {}) if library is None else (library.transport, dict(library.environment))
    port = free_port()
    argv = [sys.executable, "-m", "pdserve.cli", "up", "--port", str(port), "--data-dir", str(scratch / "up")]
    argv += ["--no-sample", "--drain-grace-s", "2", "--kv-transfer-config", json.dumps({"transports": [transport]})]
    cores = tuple(sorted(os.sched_getaffinity(0)))
    processes = Processes([Command(name="pdserve", argv=(*argv, *config.words()), cores=cores, env=env)], scratch)
    try:
        endpoint = Endpoint("pdserve", (port,))
        processes.wait_ready(endpoint.ready, config.start_timeout_s)
        yield endpoint, processes
    finally:
        processes.end()


async def _requests(
    plane: str, endpoint: Endpoint, config: HandoffConfig, until_s: float, say: Say
) -> tuple[list[Sample], list[str]]:
    """One warm-up, then every request of the schedule that there is time for."""
    samples: list[Sample] = []
    planned, budget, prompts = schedule(config), Budget(until_s), random.Random(f"{config.seed} {plane}")
    async with AsyncClient([f"127.0.0.1:{endpoint.ports[0]}"]) as client:
        try:
            (model,) = await client.models()

            async def send(length: int) -> Sample:
                tokens = [prompts.randrange(FIRST_ORDINARY_TOKEN, model.vocab_size) for _ in range(length)]
                result = await client.generate(
                    prompt_token_ids=tokens,
                    max_tokens=config.output_len,
                    temperature=0.0,
                    ignore_eos=True,
                    timeout_s=config.request_timeout_s,
                )
                return sample_of(result, length, config.output_len)

            await send(min(planned))  # connects the pair
            for length in planned:
                began_s = time.monotonic()
                if budget.allows(length, began_s):
                    samples.append(await send(length))
                    budget.took(length, time.monotonic() - began_s)
                    say(f"{plane}: {length} tokens in {time.monotonic() - began_s:.1f} s")
        except PdserveError as e:
            raise SystemFailed(f"a request over {plane} failed: {e} ({e.reason})") from e
    left_out = len(planned) - len(samples)
    notes = [f"{plane}: {left_out} of {len(planned)} requests left out, for --max-minutes"] if left_out else []
    return samples, notes


async def backend_times(plane: str, samples: Sequence[Sample]) -> Mapping[int, float]:
    """What the bare plane takes for ranges of the sizes that were seen last, between two processes, with checksums.

    Returns:
        Pages -> median seconds.
    """
    page_bytes, sizes = samples[0].page_bytes, sorted({s.last_pages for s in samples})
    pool = make_pool(page_bytes, max(sizes))
    method: Method
    if plane in LIBRARIES:
        method = Elsewhere(plane, False, pool, MOVE_TIMEOUT_S)
    else:
        method = PlaneMethod(plane, pool, "host", MOVE_TIMEOUT_S)
    found = {}
    try:
        for num_pages in sizes:
            case = Case(page_bytes, num_pages, scattered=False)
            moved = [await method.move(case, 0) for _ in range(WARM_UP_RUNS + RATE_RUNS)]
            found[num_pages] = statistics.median(m.wall_s for m in moved[WARM_UP_RUNS:])
    finally:
        await method.close()
        pool.close()
    return found
