"""P full of leases and D full of reservations at once: nobody waits in a circle, every request ends, and well."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdserve.client import AsyncClient
from pdserve.engine.fake import expected_tokens
from tests.support.deployment import Deployment, deploy, wait_until

from .streams import prompt_of

PAGE_SIZE, NUM_PAGES = 16, 32
LONGEST = 20 * PAGE_SIZE  # with its output more than half of either pool: two of them never fit
FLAGS = ["--num-pages", str(NUM_PAGES), "--max-num-seqs", "16", "--max-num-batched-tokens", "64"]
WAITS = ["--reserve-wait-s", "0.2"]
WORKERS = ("prefill-0", "decode-0")


@dataclass
class Seen:
    """What the workers said of themselves meanwhile, in moments.

    Attributes:
        both: D said that it was full between two words of P that said the same; `tests.sim.test_full_pools` sees both
            at one instant.
    """

    full_of_leases: int = 0
    full_of_reservations: int = 0
    both: int = 0


async def watch(deployment: Deployment, seen: Seen) -> None:
    """Reads the pools until it is cancelled; full: less than half is free, so a longest prompt has to wait."""

    async def full(worker: str, holders: str) -> bool:
        free = await asyncio.to_thread(deployment.metric, worker, "pdserve_engine_kv_free_pages")
        return free < NUM_PAGES / 2 and await asyncio.to_thread(deployment.metric, worker, holders) > 0

    before = False
    while True:
        decode = await full("decode-0", "pdserve_kv_reservations")
        prefill = await full("prefill-0", "pdserve_kv_leases")
        seen.full_of_leases += prefill
        seen.full_of_reservations += decode
        seen.both += before and decode and prefill
        before = prefill


async def load(deployment: Deployment, number: int) -> Seen:
    """All requests at once, each checked token by token."""
    rng, seen = random.Random(number), Seen()

    async def one(client: AsyncClient, seed: int) -> None:
        prompt, num_tokens = prompt_of(rng.randint(PAGE_SIZE, LONGEST), seed), rng.randint(2, 40)
        result = await client.generate(
            prompt_token_ids=prompt, max_tokens=num_tokens, ignore_eos=True, cache_salt=str(seed), timeout_s=800
        )
        assert list(result.token_ids) == expected_tokens(prompt, num_tokens), "a wrong token"

    async with AsyncClient(deployment.address) as client:
        watching = asyncio.create_task(watch(deployment, seen))
        try:
            await asyncio.gather(*(one(client, seed) for seed in range(number)))
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
    return seen


@pytest.mark.parametrize("number", [24, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_full_pools_on_both_sides(tmp_path: Path, number: int) -> None:
    router_flags = ["--queue-timeout-s", "800"]
    with deploy(tmp_path, "fake", WORKERS, [*FLAGS, *WAITS], router_flags=router_flags) as deployment:
        seen = asyncio.run(load(deployment, number))
        assert seen.full_of_leases and seen.full_of_reservations, seen
        assert seen.both or number < 1000, seen
        for worker in WORKERS:
            wait_until(lambda worker=worker: deployment.all_pages_free(worker), 20, f"{worker} to free every page")
