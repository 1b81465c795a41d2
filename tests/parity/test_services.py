"""The real model through the SDK and real processes, disaggregated and MIXED, against transformers' `generate`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from pdserve.client import AsyncClient
from pdserve.client.types import Result
from pdserve.core.layout import KVLayout
from pdserve.engine.model_store import BUILT_IN_MODEL, resolve_model
from tests.parity.prompts import PAGE_SIZE
from tests.parity.reference import Reference, assert_parity, references
from tests.support.deployment import deploy

ENGINE = ["--dtype", "float32", "--num-pages", "400", "--max-num-batched-tokens", "128", "--page-size", str(PAGE_SIZE)]
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "top_k": 200, "max_tokens": 6}
PAGE_BYTES = KVLayout.uniform(
    num_layers=30, num_kv_heads=3, head_dim=64, page_size=PAGE_SIZE, dtype="float32"
).page_bytes


@dataclass(frozen=True)
class Outcome:
    """What one kind of deployment answered."""

    greedy: list[Result]
    together: list[Result]
    alone: list[Result]


def prompt_options(reference: Reference) -> dict:
    """Keywords of the SDK for a prompt as a client would send it."""
    prompt = reference.prompt.prompt
    if isinstance(prompt, str):
        return {"prompt": prompt}
    return {"messages": prompt} if isinstance(prompt[0], dict) else {"prompt_token_ids": prompt}


async def ask(client: AsyncClient, options: dict, **sampling: object) -> Result:
    """One request; chat prompts go through `chat`."""
    if "messages" in options:
        return await client.chat(options["messages"], timeout_s=200, **sampling)
    return await client.generate(**options, timeout_s=200, **sampling)


async def run_all(address: str, expected: list[Reference]) -> Outcome:
    async with AsyncClient(address) as client:
        greedy = [ask(client, prompt_options(r), temperature=0, max_tokens=r.prompt.max_tokens) for r in expected]
        greedy_results = await asyncio.gather(*greedy)
        first = [prompt_options(r) for r in expected[:16]]
        together = await asyncio.gather(*(ask(client, o, seed=i, **SAMPLED) for i, o in enumerate(first)))
        alone = [await ask(client, first[i], seed=i, **SAMPLED) for i in range(0, 16, 5)]
    return Outcome(list(greedy_results), list(together), alone)


@pytest.fixture(scope="module")
def expected() -> list[Reference]:
    return references()


def outcome_of(directory, workers: list[str], expected: list[Reference]) -> Outcome:
    model = str(resolve_model(BUILT_IN_MODEL))
    with deploy(directory, model, workers, ENGINE) as running:
        return asyncio.run(run_all(running.address, expected))


@pytest.fixture(scope="module")
def disaggregated(tmp_path_factory: pytest.TempPathFactory, expected: list[Reference]) -> Iterator[Outcome]:
    yield outcome_of(tmp_path_factory.mktemp("pd"), ["prefill-0", "decode-0"], expected)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory, expected: list[Reference]) -> Iterator[Outcome]:
    yield outcome_of(tmp_path_factory.mktemp("mixed"), ["mixed-0"], expected)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("where", ["disaggregated", "mixed"])
def test_greedy_equals_generate(where: str, request: pytest.FixtureRequest, expected: list[Reference]) -> None:
    outcome: Outcome = request.getfixturevalue(where)
    assert len(expected) >= 40
    assert [r.usage.prompt_tokens for r in outcome.greedy] == [len(r.prompt.token_ids) for r in expected]
    assert_parity(expected, [r.token_ids for r in outcome.greedy])


@pytest.mark.timeout(300)
def test_seeded_sampling_is_the_same_everywhere(disaggregated: Outcome, mixed: Outcome) -> None:
    """MIXED and disaggregated, alone and in a batch of 16."""
    assert [r.token_ids for r in disaggregated.together] == [r.token_ids for r in mixed.together]
    assert len({r.token_ids for r in mixed.together}) == 16
    for outcome in (disaggregated, mixed):
        assert [r.token_ids for r in outcome.alone] == [outcome.together[i].token_ids for i in range(0, 16, 5)]


def test_bytes_on_the_wire(disaggregated: Outcome, mixed: Outcome) -> None:
    """At most pages x page bytes + 2 %, and nothing at all for a prompt whose first token ended it."""
    moved = [r for r in disaggregated.greedy if len(r.token_ids) > 1]
    assert len(moved) >= 40
    for result in moved:
        page_bytes = -(-result.usage.prompt_tokens // PAGE_SIZE) * PAGE_BYTES
        assert page_bytes <= result.timings.transfer_bytes <= 1.02 * page_bytes
    assert all(r.timings.transfer_bytes == 0 for r in mixed.greedy)
