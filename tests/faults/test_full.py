"""P full of leases and D full of reservations at once: nobody waits in a circle, every request ends, and well.

A link that holds every page back keeps both full, so it does not depend on the pace of anybody that they are seen.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from pdserve.client import AsyncClient
from pdserve.engine.fake import expected_tokens
from tests.kvtransfer.blackhole import blackhole
from tests.support.deployment import Deployment, deploy, wait_until
from tests.support.redis_server import free_port

from .planes import plane_flags
from .streams import prompt_of

PAGE_SIZE, NUM_PAGES = 16, 32
LONGEST = 20 * PAGE_SIZE  # with its output more than half of either pool: two of them never fit
NUM_FIRST, FIRST = 3, 9 * PAGE_SIZE  # they fill both pools: the next of their kind has no room
FLAGS = ["--num-pages", str(NUM_PAGES), "--max-num-seqs", "16", "--max-num-batched-tokens", "64"]
LIMITS = ["--reserve-wait-s", "0.2", "--pull-idle-s", "60", "--router-timeout-s", "60"]
ROUTER_LIMITS = ["--queue-timeout-s", "800", "--worker-timeout-s", "60"]
WORKERS = ("prefill-0", "decode-0")


def wait_full(deployment: Deployment) -> None:
    """Waits until the first requests hold most pages of both workers; while the link is held they go on doing so."""
    for worker, holders in (("decode-0", "pdserve_kv_reservations"), ("prefill-0", "pdserve_kv_leases")):

        def full(worker: str = worker, holders: str = holders) -> bool:
            free = deployment.metric(worker, "pdserve_engine_kv_free_pages")
            return free < FIRST // PAGE_SIZE and deployment.metric(worker, holders) >= NUM_FIRST

        wait_until(full, 30, f"{worker} to be full")


def wait_no_room(deployment: Deployment) -> None:
    """Waits until a reservation waits for pages, or has waited in vain."""

    def waits() -> bool:
        refused = "pdserve_kv_reservations_refused_total"
        return any(deployment.metric("decode-0", name) > 0 for name in ("pdserve_engine_sequences_waiting", refused))

    wait_until(waits, 30, "a reservation to find no room")


async def load(deployment: Deployment, number: int, let_go: Callable[[], object]) -> None:
    """The first ones fill both pools; all others come meanwhile, at once. Each is checked token by token."""
    rng = random.Random(number)

    async def one(client: AsyncClient, seed: int, length: int) -> None:
        prompt, num_tokens = prompt_of(length, seed), rng.randint(2, 40)
        result = await client.generate(
            prompt_token_ids=prompt, max_tokens=num_tokens, ignore_eos=True, cache_salt=str(seed), timeout_s=800
        )
        assert list(result.token_ids) == expected_tokens(prompt, num_tokens), "a wrong token"

    def release() -> None:
        wait_no_room(deployment)
        let_go()

    async with AsyncClient(deployment.address) as client, asyncio.TaskGroup() as tasks:
        for seed in range(NUM_FIRST):
            tasks.create_task(one(client, seed, FIRST))
        await asyncio.to_thread(wait_full, deployment)
        for seed in range(NUM_FIRST, number):
            tasks.create_task(one(client, seed, rng.randint(PAGE_SIZE, LONGEST)))
        await asyncio.to_thread(release)


def serve(directory: Path, number: int, port: int, link: str, let_go: Callable[[], object]) -> None:
    """The whole deployment; its pages are read through `link`."""
    flags = [*FLAGS, *LIMITS, *plane_flags("tcp")]
    data = {"prefill-0": ["--data-port", str(port), "--advertise-data-address", link]}
    with deploy(directory, "fake", WORKERS, flags, ROUTER_LIMITS, worker_flags=data) as deployment:
        asyncio.run(load(deployment, number, let_go))
        for worker in WORKERS:
            wait_until(lambda worker=worker: deployment.all_pages_free(worker), 20, f"{worker} to free every page")


async def serve_over_a_held_link(directory: Path, number: int) -> None:
    port, loop = free_port(), asyncio.get_running_loop()  # this loop is the link's alone
    async with blackhole(f"127.0.0.1:{port}") as link:
        link.hold()
        let_go = partial(loop.call_soon_threadsafe, link.let_go)
        await asyncio.to_thread(serve, directory, number, port, link.address, let_go)


@pytest.mark.parametrize("number", [24, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_full_pools_on_both_sides(tmp_path: Path, number: int) -> None:
    asyncio.run(serve_over_a_held_link(tmp_path, number))
