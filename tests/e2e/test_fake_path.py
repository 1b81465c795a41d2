"""The whole path over real processes with the KV-hashing fake runner: a wrong page is a wrong token."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pdserve.client import AsyncClient, Client
from pdserve.engine.fake import expected_tokens
from tests.support.deployment import Deployment, deploy, wait_until

ENGINE_FLAGS = ["--num-pages", "4096", "--max-num-seqs", "256", "--max-num-batched-tokens", "2048"]
WORKERS = ("prefill-0", "decode-0")
PATIENT = ["--queue-timeout-s", "200"]


@pytest.fixture(scope="module")
def disaggregated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deploy(tmp_path_factory.mktemp("pd"), "fake", WORKERS, ENGINE_FLAGS, PATIENT) as running:
        yield running


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deploy(tmp_path_factory.mktemp("mixed"), "fake", ["mixed-0"], ENGINE_FLAGS) as running:
        yield running


LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 500, 2047, 2048, 2049, 5000]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(1000 * seed + length).choices(range(256), k=length)


@pytest.mark.parametrize("where", ["disaggregated", "mixed"])
def test_tokens_are_right_at_page_and_chunk_borders(where: str, request: pytest.FixtureRequest) -> None:
    deployment: Deployment = request.getfixturevalue(where)
    with deployment.client() as client:
        for length in LENGTHS:
            prompt = prompt_of(length)
            result = client.generate(prompt_token_ids=prompt, max_tokens=20, temperature=0)
            assert list(result.token_ids) == expected_tokens(prompt, 20), f"length {length}"
            assert result.finish_reason == "length"
            assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (length, 20)


@pytest.mark.parametrize("where", ["disaggregated", "mixed"])
def test_several_choices(where: str, request: pytest.FixtureRequest) -> None:
    deployment: Deployment = request.getfixturevalue(where)
    with deployment.client() as client:
        for length, n in ((1, 16), (33, 3), (3000, 4)):
            prompt = prompt_of(length)
            result = client.generate(prompt_token_ids=prompt, max_tokens=20, n=n)
            assert [list(c.token_ids) for c in result.choices] == [expected_tokens(prompt, 20)] * n
            assert {c.finish_reason for c in result.choices} == {"length"}
            assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (length, 20 * n)
        stream = client.stream(prompt_token_ids=prompt_of(100), max_tokens=5000, n=4, ignore_eos=True)
        seen: set[int] = set()
        while len(seen) < 4:
            seen.add(next(iter(stream)).choice)
        stream.close()
    assert_all_free(deployment)


@pytest.mark.parametrize("where", ["disaggregated", "mixed"])
def test_one_token_requests(where: str, request: pytest.FixtureRequest) -> None:
    deployment: Deployment = request.getfixturevalue(where)
    with deployment.client() as client:
        for length in (1, 16, 100):
            prompt = prompt_of(length)
            result = client.generate(prompt_token_ids=prompt, max_tokens=1)
            assert list(result.token_ids) == expected_tokens(prompt, 1)
    assert_all_free(deployment)


@pytest.mark.parametrize("where", ["disaggregated", "mixed"])
def test_stop_string_over_token_borders(where: str, request: pytest.FixtureRequest) -> None:
    deployment: Deployment = request.getfixturevalue(where)
    prompt = prompt_of(40)
    with deployment.client() as client:
        whole = client.generate(prompt_token_ids=prompt, max_tokens=12)
        for first in (0, 1, 5):
            border = len(client_text(client, prompt, first + 1))
            stop = whole.text[border - 2 : border + 3]  # the end of one token's text and the start of the next one's
            stopped = client.generate(prompt_token_ids=prompt, max_tokens=12, stop=[stop])
            assert stopped.finish_reason == "stop" and stopped.stop_reason == stop
            assert stopped.text == whole.text[: whole.text.index(stop)]
    assert_all_free(deployment)


@pytest.mark.parametrize("where", ["disaggregated", "mixed"])
def test_prompt_logprobs_and_echo(where: str, request: pytest.FixtureRequest) -> None:
    deployment: Deployment = request.getfixturevalue(where)
    with deployment.client() as client:
        for length in (1, 2, 5000):
            prompt = prompt_of(length)
            result = client.generate(prompt_token_ids=prompt, max_tokens=3, prompt_logprobs=1)
            assert list(result.token_ids) == expected_tokens(prompt, 3)
            first, *others = result.prompt_logprobs
            assert first is None and [p.chosen.token_id for p in others if p] == prompt[1:]
        stream = client.stream("t1  t2", max_tokens=3, echo=True, logprobs=0)
        deltas = list(stream)
        tokens = expected_tokens([1, 2], 3)
        assert deltas[0].text == "t1  t2" and deltas[0].token_ids == ()
        assert "".join(d.text for d in deltas) == stream.result.text == "t1  t2" + "".join(f" t{t}" for t in tokens)
        assert len(stream.result.prompt_logprobs) == 2 and len(stream.result.logprobs) == 3
        plain = client.generate(prompt_token_ids=[1, 2], max_tokens=3, logprobs=0)
        assert plain.prompt_logprobs == ()
    assert_all_free(deployment)


@pytest.mark.parametrize("where", ["disaggregated", "mixed"])
def test_constraints_hold_on_either_side_of_the_hand_off(where: str, request: pytest.FixtureRequest) -> None:
    deployment: Deployment = request.getfixturevalue(where)
    stop = f"t{expected_tokens([1], 3)[2]}"
    with deployment.client() as client:
        result = client.generate(prompt_token_ids=[1], max_tokens=9, allowed_token_ids=[3, 5])
        assert set(result.token_ids) == {3, 5}
        assert len(client.generate(prompt_token_ids=[1], max_tokens=9, stop=[stop]).token_ids) == 3
        result = client.generate(prompt_token_ids=[1], max_tokens=9, stop=[stop], min_tokens=5)
        assert len(result.token_ids) > 5


def client_text(client: Client, prompt: list[int], max_tokens: int) -> str:
    return client.generate(prompt_token_ids=prompt, max_tokens=max_tokens).text


def assert_all_free(deployment: Deployment) -> None:
    for worker in deployment.children:
        if worker != "router":
            wait_until(lambda worker=worker: deployment.all_pages_free(worker), 20, f"{worker} to free every page")


def test_wire_bytes_within_two_percent(disaggregated: Deployment) -> None:
    """The fake's pages are tiny: the overhead is judged on the real model (tests/parity); here pages are counted."""
    with disaggregated.client() as client:
        result = client.generate(prompt_token_ids=prompt_of(160), max_tokens=2)
    assert result.timings.transfer_bytes >= 10 * 16 * 16
    moved = "pdserve_kv_transfer_bytes_total"
    assert disaggregated.metric("decode-0", moved) == disaggregated.metric("decode-0", moved, transport="shm") > 0


@pytest.mark.parametrize("where", ["disaggregated", "mixed"])
def test_the_turns_of_a_conversation_reuse_what_was_computed(where: str, request: pytest.FixtureRequest) -> None:
    """Each turn repeats the one before and its answer. Prefill has its prompts, decode and MIXED the answers too."""
    deployment: Deployment = request.getfixturevalue(where)
    known, in_prompt, in_answer = prompt_of(70, seed=5), 0, 0
    with deployment.client() as client:
        for turn in range(3):
            options = {"prompt_token_ids": known, "max_tokens": 20, "temperature": 0, "cache_salt": f"mine {where}"}
            result = client.generate(**options)
            assert list(result.token_ids) == expected_tokens(known, 20)
            assert result.usage.cached_tokens == (in_prompt if where == "disaggregated" else in_answer)
            if where == "disaggregated":
                num_pulled = -(-len(known) // 16) - in_answer // 16
                assert num_pulled * 256 <= result.timings.transfer_bytes < num_pulled * 512  # with headers
            in_prompt = len(known) // 16 * 16
            known = [*known, *result.token_ids, *prompt_of(9, seed=turn)]
            in_answer = (len(known) - 10) // 16 * 16  # not the last token: it was never computed
        other = client.generate(**{**options, "cache_salt": "another"})
        assert other.usage.cached_tokens == 0 and other.token_ids == result.token_ids
    assert_all_free(deployment)


def test_at_most_one_message_per_step_and_router(tmp_path: Path) -> None:
    def counters(d: Deployment) -> tuple[float, float, float]:
        return (
            d.metric("decode-0", "pdserve_session_messages_total", direction="sent", kind="step_outputs"),
            d.metric("decode-0", "pdserve_engine_steps_total"),
            d.metric("decode-0", "pdserve_generation_tokens_total"),
        )

    async def load(address: str) -> None:
        options = {"max_tokens": 60, "ignore_eos": True}
        async with AsyncClient(address) as client:
            await asyncio.gather(*(client.generate(prompt_token_ids=prompt_of(64, i), **options) for i in range(32)))

    with deploy(tmp_path, "fake", WORKERS, [*ENGINE_FLAGS, "--fake-step-ms", "10"]) as running:
        asyncio.run(load(running.address))
        messages, steps, tokens = counters(running)
    assert tokens == 32 * 59
    assert messages <= steps < tokens, "deltas of one step share a message"


@dataclass
class Tally:
    """What became of the streams of a storm."""

    right: int = 0
    cancelled: int = 0
    problems: list[str] = field(default_factory=list)


async def storm(address: str, num_streams: int, max_prompt: int, max_output: int, seed: int) -> Tally:
    """Streams of mixed lengths, half of them left at a random moment: queued, prefilling, transferring or decoding."""
    rng, tally = random.Random(seed), Tally()

    async def keep(client: AsyncClient, prompt: list[int], num_tokens: int) -> None:
        result = await client.generate(prompt_token_ids=prompt, max_tokens=num_tokens, ignore_eos=True, timeout_s=220)
        if list(result.token_ids) == expected_tokens(prompt, num_tokens):
            tally.right += 1
        else:
            tally.problems.append(f"wrong tokens for a prompt of {len(prompt)}")

    async def leave(client: AsyncClient, prompt: list[int], num_tokens: int, after_tokens: int, after_s: float) -> None:
        expected = expected_tokens(prompt, num_tokens)
        stream = client.stream(prompt_token_ids=prompt, max_tokens=num_tokens, ignore_eos=True, timeout_s=220)
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
        if got != expected[: len(got)]:
            tally.problems.append(f"wrong tokens before cancel for a prompt of {len(prompt)}")
        tally.cancelled += 1

    async with AsyncClient(address) as client:
        tasks = []
        for i in range(num_streams):
            prompt = prompt_of(rng.randint(1, max_prompt), seed + i)
            num_tokens = rng.randint(2, max_output)
            if i % 2:
                tasks.append(keep(client, prompt, num_tokens))
            else:
                after_s = rng.choice([0.001, 0.01, 0.05, 0.2, 1.0, 100.0])
                tasks.append(leave(client, prompt, num_tokens, rng.randint(0, num_tokens), after_s))
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    tally.problems += [repr(o) for o in outcomes if isinstance(o, BaseException)]
    return tally


@pytest.mark.timeout(240)
def test_a_thousand_streams_half_of_them_cancelled(disaggregated: Deployment) -> None:
    tally = asyncio.run(storm(disaggregated.address, 1000, max_prompt=300, max_output=60, seed=11))
    assert not tally.problems, tally.problems[:5]
    assert (tally.right, tally.cancelled) == (500, 500)
    assert_all_free(disaggregated)


@pytest.mark.timeout(240)
def test_the_same_over_tcp(tmp_path: Path) -> None:
    tcp_only = ["--kv-transfer-config", '{"transports": ["tcp"]}']
    with deploy(tmp_path, "fake", WORKERS, [*ENGINE_FLAGS, *tcp_only]) as running:
        tally = asyncio.run(storm(running.address, 100, max_prompt=300, max_output=30, seed=7))
        assert not tally.problems, tally.problems[:5]
        assert (tally.right, tally.cancelled) == (50, 50)
        moved = "pdserve_kv_transfer_bytes_total"
        assert running.metric("decode-0", moved) == running.metric("decode-0", moved, transport="tcp") > 0
        assert_all_free(running)


@pytest.mark.timeout(240)
def test_tiny_pools(tmp_path_factory: pytest.TempPathFactory) -> None:
    """P full of leases and D full of reservations: refusals are requeued, everything ends, nothing leaks."""
    flags = ["--num-pages", "48", "--max-num-seqs", "16", "--max-num-batched-tokens", "128"]
    flags += ["--reserve-wait-s", "0.2"]
    with deploy(tmp_path_factory.mktemp("tiny"), "fake", WORKERS, flags, PATIENT) as running:
        tally = asyncio.run(storm(running.address, 120, max_prompt=300, max_output=40, seed=5))
        assert not tally.problems, tally.problems[:5]
        assert (tally.right, tally.cancelled) == (60, 60)
        assert_all_free(running)
