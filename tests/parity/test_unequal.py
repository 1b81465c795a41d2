"""The real model over real processes with pages of unlike sizes, against transformers' `generate`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pdserve.client import AsyncClient
from pdserve.engine.model_store import BUILT_IN_MODEL, resolve_model
from tests.parity.reference import Reference, assert_parity, some_references
from tests.support.deployment import deploy, wait_until

ENGINE = ["--dtype", "float32", "--num-pages", "300", "--max-num-batched-tokens", "128", "--threads", "1"]
WORKERS = ("prefill-0", "decode-0")


async def ask_all(address: str, expected: list[Reference]) -> list[tuple[int, ...]]:
    async with AsyncClient(address) as client:
        answers = await asyncio.gather(
            *(
                client.generate(
                    prompt_token_ids=r.prompt.token_ids, temperature=0, max_tokens=r.prompt.max_tokens, timeout_s=200
                )
                for r in expected
            )
        )
    return [answer.token_ids for answer in answers]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("prefill", "decode"), [(16, 32), pytest.param(32, 16, marks=pytest.mark.slow)])
def test_greedy_equals_generate(prefill: int, decode: int, tmp_path: Path) -> None:
    """Every prompt twice: the second time both sides have some of its pages, in their own sizes."""
    expected = some_references()[::4]
    flags = {"prefill-0": ["--page-size", str(prefill)], "decode-0": ["--page-size", str(decode)]}
    model = str(resolve_model(BUILT_IN_MODEL))
    with deploy(tmp_path, model, WORKERS, ENGINE, worker_flags=flags) as running:
        for _ in range(2):
            assert_parity(expected, asyncio.run(ask_all(running.address, expected)))
        for worker in WORKERS:
            wait_until(lambda worker=worker: running.all_pages_free(worker), 30, f"{worker} to free every page")
        assert running.metric("decode-0", "pdserve_kv_transfers_total", outcome="complete") > len(expected)
