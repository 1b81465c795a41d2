"""The real model through the SDK and real processes, disaggregated and MIXED, against transformers' `generate`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdserve.client import AsyncClient
from pdserve.client.types import Result
from pdserve.core.hashing import choice_seed
from pdserve.core.layout import KVLayout
from pdserve.engine.model_store import BUILT_IN_MODEL, resolve_model
from tests.parity.features import CASES, NUM_TOKENS, Case
from tests.parity.features import expected as kept_features
from tests.parity.prompts import PAGE_SIZE
from tests.parity.reference import NEAR_TIE_GAP, Reference, assert_parity
from tests.support.deployment import deploy, wait_until

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
    left: list[tuple[int, ...]]
    with_logprobs: Result
    features: list[Result]
    choices: Result
    single: list[Result]


def is_all(expected: list[Reference]) -> bool:
    """Says whether this is the long run, with every prompt."""
    return len(expected) > 16


def feature_step(expected: list[Reference]) -> int:
    """Every so-manyth case of sampling parameters is asked here; `test_features` asks all, embedded."""
    return 3 if is_all(expected) else 6


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


async def ask_case(client: AsyncClient, case: Case) -> Result:
    """One request with sampling parameters."""
    options = {"messages": case.prompt} if isinstance(case.prompt, list) else {"prompt": case.prompt}
    asked = {"temperature": 0, "max_tokens": NUM_TOKENS, "logprobs": 0, "prompt_logprobs": 0}
    return await ask(client, options, **asked, **case.sampling)


async def leave(client: AsyncClient, reference: Reference, after_s: float, after_tokens: int) -> tuple[int, ...]:
    """A greedy request left at some moment: queued, prefilling, transferring or decoding. Returns what came."""
    options = {"temperature": 0, "max_tokens": reference.prompt.max_tokens, "timeout_s": 200}
    stream = client.stream(prompt_token_ids=reference.prompt.token_ids, **options)
    got: list[int] = []
    try:
        async with asyncio.timeout(after_s):
            async for delta in stream:
                got += delta.token_ids
                if len(got) >= after_tokens:
                    break
    except TimeoutError:
        pass
    await stream.aclose()
    return tuple(got)


async def run_all(address: str, expected: list[Reference]) -> Outcome:
    rng = random.Random(3)
    async with AsyncClient(address) as client:
        greedy = [ask(client, prompt_options(r), temperature=0, max_tokens=r.prompt.max_tokens) for r in expected]
        leavers = [leave(client, r, rng.choice([0.01, 0.3, 2, 8, 30, 200]), rng.randint(0, 8)) for r in expected]
        answers = await asyncio.gather(*greedy, *leavers)
        greedy_results, left = answers[: len(expected)], answers[len(expected) :]
        first = [prompt_options(r) for r in expected[: 16 if is_all(expected) else 6]]
        together = await asyncio.gather(*(ask(client, o, seed=i, **SAMPLED) for i, o in enumerate(first)))
        alone = [await ask(client, first[i], seed=i, **SAMPLED) for i in range(0, len(first), 5)]
        with_logprobs = await ask(client, first[1], temperature=0, max_tokens=4, logprobs=3)
        features = await asyncio.gather(*(ask_case(client, case) for case in CASES[:: feature_step(expected)]))
        choices, *single = await asyncio.gather(
            ask(client, first[1], seed=11, n=3, **SAMPLED),
            *(ask(client, first[1], seed=choice_seed(11, i), **SAMPLED) for i in range(3)),
        )
    return Outcome(
        list(greedy_results), list(together), alone, list(left), with_logprobs, features, choices, list(single)
    )


def outcome_of(directory: Path, workers: list[str], expected: list[Reference], threads: int, *more: str) -> Outcome:
    model = str(resolve_model(BUILT_IN_MODEL))
    with deploy(directory, model, workers, [*ENGINE, "--threads", str(threads), *more]) as running:
        outcome = asyncio.run(run_all(running.address, expected))
        for worker in workers:
            wait_until(lambda worker=worker: running.all_pages_free(worker), 30, f"{worker} to free every page")
        return outcome


@pytest.fixture(scope="module")
def disaggregated(tmp_path_factory: pytest.TempPathFactory, expected: list[Reference]) -> Iterator[Outcome]:
    yield outcome_of(tmp_path_factory.mktemp("pd"), ["prefill-0", "decode-0"], expected, threads=1)


@pytest.fixture(scope="module")
def over_tcp(tmp_path_factory: pytest.TempPathFactory, expected: list[Reference]) -> Iterator[Outcome]:
    flags = ["--kv-transfer-config", '{"transports": ["tcp"]}']
    yield outcome_of(tmp_path_factory.mktemp("tcp"), ["prefill-0", "decode-0"], expected, 1, *flags)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory, expected: list[Reference]) -> Iterator[Outcome]:
    yield outcome_of(tmp_path_factory.mktemp("mixed"), ["mixed-0"], expected, threads=2)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("where", ["disaggregated", pytest.param("over_tcp", marks=pytest.mark.slow), "mixed"])
def test_greedy_equals_generate(where: str, request: pytest.FixtureRequest, expected: list[Reference]) -> None:
    outcome: Outcome = request.getfixturevalue(where)
    assert [r.usage.prompt_tokens for r in outcome.greedy] == [len(r.prompt.token_ids) for r in expected]
    assert_parity(expected, [r.token_ids for r in outcome.greedy])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("where", ["disaggregated", "mixed"])
def test_streams_that_are_left(where: str, request: pytest.FixtureRequest, expected: list[Reference]) -> None:
    """As many were left at random moments beside those that were not; what they got was right, and no page leaked."""
    outcome: Outcome = request.getfixturevalue(where)
    assert len(outcome.left) == len(outcome.greedy) == len(expected)
    for reference, got in zip(expected, outcome.left, strict=True):
        gap = min(reference.gaps[: len(got)], default=1.0)
        assert got == reference.token_ids[: len(got)] or gap < NEAR_TIE_GAP


@pytest.mark.timeout(300)
def test_seeded_sampling_is_the_same_everywhere(disaggregated: Outcome, mixed: Outcome) -> None:
    """MIXED and disaggregated, alone and in a batch."""
    assert [r.token_ids for r in disaggregated.together] == [r.token_ids for r in mixed.together]
    assert len({r.token_ids for r in mixed.together}) == len(mixed.together) > 5
    for outcome in (disaggregated, mixed):
        assert [r.token_ids for r in outcome.alone] == [r.token_ids for r in outcome.together[::5]]


def test_choices_are_what_requests_with_their_seeds_give(disaggregated: Outcome, mixed: Outcome) -> None:
    for outcome in (disaggregated, mixed):
        assert [c.token_ids for c in outcome.choices.choices] == [r.token_ids for r in outcome.single]
        assert [c.text for c in outcome.choices.choices] == [r.text for r in outcome.single]
    assert [r.token_ids for r in disaggregated.single] == [r.token_ids for r in mixed.single]
    assert len({r.token_ids for r in mixed.single}) > 1


def test_logprobs_are_the_same_everywhere(disaggregated: Outcome, mixed: Outcome) -> None:
    """One entry per token, the first one too, which another worker sampled; best first."""
    here, there = disaggregated.with_logprobs, mixed.with_logprobs
    assert len(here.logprobs) == len(there.logprobs) == len(here.token_ids) == 4
    for a, b, token in zip(here.logprobs, there.logprobs, here.token_ids, strict=True):
        assert a.chosen.token_id == b.chosen.token_id == token == a.top[0].token_id
        assert a.chosen.rank == 1 and [t.rank for t in a.top] == [1, 2, 3]
        assert [t.token_id for t in a.top] == [t.token_id for t in b.top]
        assert [t.logprob for t in a.top] == pytest.approx([t.logprob for t in b.top], abs=1e-4)
        assert 0 > a.top[0].logprob >= a.top[1].logprob >= a.top[2].logprob


def test_sampling_parameters_equal_generate(disaggregated: Outcome, mixed: Outcome, expected: list[Reference]) -> None:
    """Every choice and every log-probability, on whichever worker they were made."""
    for outcome in (disaggregated, mixed):
        check_features(outcome.features, feature_step(expected))


def check_features(results: list[Result], step: int) -> None:
    for case, want, got in zip(CASES[::step], kept_features()[::step], results, strict=True):
        assert list(got.token_ids) == want.token_ids, case.name
        assert [p.chosen.logprob for p in got.logprobs] == pytest.approx(want.logprobs, abs=1e-4), case.name
        first, *others = got.prompt_logprobs
        assert first is None and len(others) == got.usage.prompt_tokens - 1
        assert [p.chosen.logprob for p in others if p] == pytest.approx(want.prompt_logprobs, abs=1e-4), case.name


def test_bytes_on_the_wire(disaggregated: Outcome, mixed: Outcome) -> None:
    """At most pages x page bytes + 2 %, and nothing at all for a prompt whose first token ended it."""
    moved = [r for r in disaggregated.greedy if len(r.token_ids) > 1]
    assert len(moved) >= 0.8 * len(disaggregated.greedy)
    for result in moved:
        page_bytes = -(-result.usage.prompt_tokens // PAGE_SIZE) * PAGE_BYTES
        assert result.timings.transfer_bytes <= 1.02 * page_bytes  # less where decode had pages cached
    assert all(r.timings.transfer_bytes == 0 for r in mixed.greedy)
