"""Prefill and decode workers with pages of unlike sizes and dtypes: every token is that of equal ones."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import torch

from pdserve.core.config import WorkerConfig
from pdserve.engine.config import EngineConfig
from pdserve.engine.fake import expected_tokens
from tests.engine_model.models import FAMILIES, VOCAB_SIZE, make_model, plain_greedy, save_model
from tests.services.world import Pair, engine_config, pair, until

PAIRS = [(16, 32), (32, 16), (16, 128), (24, 16), (16, 24), (48, 80), (1, 16), (16, 1)]


def run(scenario: Callable[[Pair], Awaitable[None]], **world: object) -> None:
    async def main() -> None:
        async with pair(**world) as both:  # type: ignore[arg-type]
            await scenario(both)
            await both.all_free()

    asyncio.run(main())


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_no_foreign_or_missing_token_at_any_border(prefill: int, decode: int) -> None:
    """Prompts that begin alike, so that both sides have some of them cached; in chunks, and several at once."""
    rng = random.Random(prefill * 1000 + decode)
    common = rng.choices(range(256), k=500)

    async def scenario(both: Pair) -> None:
        borders = [prefill, decode, prefill * decode // 16, 300]
        for turn in range(4):
            prompts = []
            for border in borders:
                shared = rng.choice([0, border, rng.randint(0, 500), 500])
                length = max(1, rng.choice([border - 1, border, border + 1]))
                prompts.append(common[:shared] + rng.choices(range(256), k=length))
            for i, prompt in enumerate(prompts):
                await both.submit(f"r{turn}-{i}", prompt, max_tokens=40)
            for i, prompt in enumerate(prompts):
                p, d = await both.ended(f"r{turn}-{i}")
                assert d.failed is None, d.failed
                got = p.token_ids + d.token_ids
                assert got == expected_tokens(prompt, 40), (turn, i, len(prompt))
        num = both.decode.metric("pdserve_kv_transfers_total", outcome="complete")
        assert num == 4 * len(borders)
        welcomes = both.to_prefill.welcome, both.to_decode.welcome  # the router pairs by it
        assert [w and w.kv_staging_bytes for w in welcomes] == [0, 1 << 12]

    run(
        scenario,
        prefill=engine_config(page_size=prefill, num_pages=6000, max_num_batched_tokens=100),
        decode=engine_config(page_size=decode, num_pages=6000),
        worker=WorkerConfig(kv_staging_bytes=1 << 12, pull_idle_s=15),
    )


@pytest.mark.parametrize(("prefill", "decode"), [(128, 256), (256, 128)])
def test_only_what_decode_lacks_is_pulled(prefill: int, decode: int) -> None:
    async def scenario(both: Pair) -> None:
        begin = random.Random(1).choices(range(256), k=1024)
        pulled = []
        for i, prompt in enumerate([[*begin, 1], [*begin, *range(160)], begin]):
            await both.submit(f"r{i}", prompt)
            d = both.to_decode.of(f"r{i}")
            await until(lambda d=d: d.finished is not None, "the end")  # type: ignore[misc]
            assert d.timings is not None
            pulled.append(d.timings.transfer_bytes // (prefill * 16))
        # 1025 tokens; then 1184 of which 1024 are here; then the 1024 that are all here.
        assert pulled == [-(-1025 // prefill), -(-1184 // prefill) - 1024 // prefill, 0]

    run(scenario, prefill=engine_config(page_size=prefill), decode=engine_config(page_size=decode))


@pytest.mark.parametrize("n", [1, 3])
def test_aborts_leave_nothing_behind(n: int) -> None:
    rng = random.Random(n)

    async def scenario(both: Pair) -> None:
        for i in range(30):
            await both.submit(f"r{i}", rng.choices(range(256), k=rng.randint(1, 700)), n=n, max_tokens=30)
            if i % 2:
                gone = f"r{rng.randint(i - 1, i)}"
                for router in rng.sample([both.to_prefill, both.to_decode], 2):
                    await both.abort(router, gone)
        await both.all_free()

    run(
        scenario,
        prefill=engine_config(page_size=16, max_num_batched_tokens=64),
        decode=engine_config(page_size=48, num_pages=4096),
        worker=WorkerConfig(kv_staging_bytes=1 << 12, pull_idle_s=15),
    )


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Idle OpenMP threads would spin beside the workers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model_config(directory: Path, **options: object) -> EngineConfig:
    values = {"page_size": 16, "num_pages": 32, "max_num_seqs": 4, "max_num_batched_tokens": 24, "dtype": "float32"}
    return EngineConfig(model=str(directory), **{**values, **options})  # type: ignore[arg-type]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("family", "prefill", "decode"), [("llama", 16, 32), ("gemma4: wider heads in some layers", 32, 16)]
)
def test_real_models_give_the_same_tokens(family: str, prefill: int, decode: int, tmp_path: Path) -> None:
    save_model(family, tmp_path)
    rng, model = random.Random(2), make_model(*FAMILIES[family])
    begin = [rng.randrange(VOCAB_SIZE) for _ in range(40)]

    async def scenario(both: Pair) -> None:
        for i, rest in enumerate((0, 9, 30)):
            prompt = begin + [rng.randrange(VOCAB_SIZE) for _ in range(rest)]
            await both.submit(f"r{i}", prompt, max_tokens=8)
            p, d = await both.ended(f"r{i}")
            assert p.failed is None and d.failed is None
            assert p.token_ids + d.token_ids == plain_greedy(model, prompt, 8)[0]

    run(
        scenario,
        prefill=model_config(tmp_path, page_size=prefill),
        decode=model_config(tmp_path, page_size=decode),
    )


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("allowed", [True, False])
def test_another_dtype_needs_a_flag(allowed: bool, tmp_path: Path) -> None:
    save_model("llama", tmp_path)

    async def scenario(both: Pair) -> None:
        prompt = random.Random(3).choices(range(VOCAB_SIZE), k=50)
        await both.submit("r", prompt, max_tokens=8)
        p, d = await both.ended("r")
        if not allowed:
            assert d.failed is not None and d.failed.reason == "LAYOUT" and "--kv-convert-dtype" in d.failed.message
            await both.abort(both.to_prefill, "r")
            return
        assert d.failed is None and len(p.token_ids + d.token_ids) == 8
        assert p.token_ids == plain_greedy(make_model(*FAMILIES["llama"]), prompt, 1)[0]

    run(
        scenario,
        prefill=model_config(tmp_path),
        decode=model_config(tmp_path, dtype="bfloat16", page_size=32),
        worker=WorkerConfig(kv_convert_dtype=allowed),
    )
