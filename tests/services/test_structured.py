"""Structured outputs over two workers: the first token comes from one, the rest from the other, under one grammar."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from pdserve import LLM, SamplingParams, StructuredOutputs
from pdserve.core.request import Role
from pdserve.v1 import common_pb2
from tests.engine_model.structures import tiny_model
from tests.services.world import Heard, Pair, engine_config, pair, until

PROMPTS = {"a": [5, 6, 7], "b": [9] * 20}
PATTERN = r"(a\d|[b-e]{2}){12}"
SAMPLING = {"seed": 3, "temperature": 1.0, "max_tokens": 60}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def embedded(directory: Path) -> dict[str, tuple[int, ...]]:
    llm = LLM(directory, num_pages=64, max_num_batched_tokens=64, max_num_seqs=8)
    params = SamplingParams(structured_outputs=StructuredOutputs(regex=PATTERN), **SAMPLING)  # type: ignore[arg-type]
    done = llm.generate(list(PROMPTS.values()), params)
    assert all(re.fullmatch(PATTERN, c.text) for c in done)
    return {name: c.token_ids for name, c in zip(PROMPTS, done, strict=True)}


async def over(both: Pair, request_id: str) -> tuple[Heard, Heard]:
    """Waits for the end, which may be that of prefill alone."""
    p, d = await both.ended(request_id)
    await until(lambda: bool(p.failed or d.failed or d.finished or p.finished), f"the end of {request_id}")
    return p, d


def run(directory: Path, role: Role, embedded: dict[str, tuple[int, ...]]) -> None:
    config = engine_config(
        runner="model", model=str(directory), num_pages=64, max_num_batched_tokens=64, max_num_seqs=8
    )
    form = common_pb2.StructuredOutputs(regex=PATTERN)
    wrong = common_pb2.StructuredOutputs(regex="(")  # a router refuses it; a worker must not trust that it did

    async def submit(
        both: Pair, name: str, prompt: list[int], form: common_pb2.StructuredOutputs, **more: object
    ) -> None:
        options = {**SAMPLING, "structured_outputs": form, **more}
        if role is Role.MIXED:
            part = common_pb2.ROLE_MIXED
            await both.to_decode.send(submit=both.submission(name, prompt, part, **options))  # type: ignore[arg-type]
        else:
            await both.submit(name, prompt, **options)

    async def scenario() -> None:
        async with pair(config, config, decode_role=role) as both:
            await submit(both, "wrong", [5], wrong)
            p, d = await over(both, "wrong")
            failed = p.failed or d.failed
            assert failed is not None
            assert (failed.status, failed.reason) == ("INVALID_ARGUMENT", "BAD_STRUCTURED_OUTPUTS")
            for router in (both.to_prefill, both.to_decode):
                await both.abort(router, "wrong")
            for name, prompt in PROMPTS.items():
                await submit(both, name, prompt, form)
            for name, prompt in PROMPTS.items():
                p, d = await over(both, name)
                assert tuple(p.token_ids + d.token_ids) == embedded[name]
                assert re.fullmatch(PATTERN, p.text + d.text)
                # another try goes on in the middle of the form, as after a lost worker
                half = list(embedded[name][:5])
                await submit(both, f"{name}-again", prompt, form, emitted=half, attempt=2)
                p, d = await over(both, f"{name}-again")
                assert tuple(half + p.token_ids + d.token_ids) == embedded[name]
            await both.all_free()

    asyncio.run(scenario())


def test_disaggregated_gives_the_tokens_of_the_embedded_engine(
    directory: Path, embedded: dict[str, tuple[int, ...]]
) -> None:
    run(directory, Role.DECODE, embedded)


def test_mixed_gives_the_tokens_of_the_embedded_engine(directory: Path, embedded: dict[str, tuple[int, ...]]) -> None:
    run(directory, Role.MIXED, embedded)
