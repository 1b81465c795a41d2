"""Pages that pass a stage on their way, over one-sided transports: device memory, and pages of another size.

See `tests.support.own_process`.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from pdserve.core.config import WorkerConfig
from pdserve.engine import device
from pdserve.engine.config import EngineConfig
from pdserve.engine.fake import expected_tokens
from tests.engine_model.models import FAMILIES, VOCAB_SIZE, make_model, plain_greedy, save_model
from tests.services.one_sided_cases import CONFIGS
from tests.services.test_pair import prompt_of, run
from tests.services.world import Pair, engine_config, until


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("prefill", "decode"), [(16, 32), (32, 16), (48, 80)])
def test_unequal_pages(name: str, prefill: int, decode: int) -> None:
    """A stage of a few pages, so that long prompts pass it in pieces; some are given up on their way."""

    async def scenario(both: Pair) -> None:
        lengths = [1, prefill, decode + 1, 500, 1500]
        for n in lengths:
            await both.submit(f"r{n}", prompt_of(n))
        for n in lengths:
            p, d = await both.ended(f"r{n}")
            await until(lambda d=d: (d.finished or d.failed) is not None, "decode's end")  # type: ignore[misc]
            assert d.failed is None, d.failed
            assert p.token_ids + d.token_ids == expected_tokens(prompt_of(n), 16), n
        choose = random.Random(4)
        for i in range(8):
            await both.submit(f"a{i}", prompt_of(700, i))
        for i in range(8):
            for router in choose.sample([both.to_prefill, both.to_decode], 2):
                await both.abort(router, f"a{i}")
        await until(lambda: both.decode.metric("pdserve_kv_quarantined_pages") == 0, "the end of every read")

    run(
        scenario,
        prefill=engine_config(page_size=prefill),
        decode=engine_config(page_size=decode),
        worker=WorkerConfig(kv_transfer_config=CONFIGS[name], kv_staging_bytes=1 << 13, pull_idle_s=15),
    )


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("decode_page_size", [16, 32])
def test_device_pages(name: str, decode_page_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's pages, computed in memory of their own on both sides (the CPU plays the device); also converted."""
    monkeypatch.setattr(device, "find_device", lambda _: torch.device("cpu"))
    torch.set_num_threads(1)  # idle OpenMP threads would spin beside the workers
    save_model("llama", tmp_path)

    def engine(page_size: int) -> EngineConfig:
        return EngineConfig(
            model=str(tmp_path),
            device="cuda",
            enforce_eager=True,
            page_size=page_size,
            num_pages=32,
            max_num_seqs=4,
            max_num_batched_tokens=24,
            dtype="float32",
        )

    rng, model = random.Random(2), make_model(*FAMILIES["llama"])
    begin = [rng.randrange(VOCAB_SIZE) for _ in range(33)]

    async def scenario(both: Pair) -> None:
        for request_id, rest in (("a", 4), ("b", 9)):
            prompt = begin + [rng.randrange(VOCAB_SIZE) for _ in range(rest)]
            await both.submit(request_id, prompt, max_tokens=8)
            p, d = await both.ended(request_id)
            assert p.failed is None and d.failed is None
            assert p.token_ids + d.token_ids == plain_greedy(model, prompt, 8)[0]

    run(
        scenario,
        prefill=engine(16),
        decode=engine(decode_page_size),
        worker=WorkerConfig(kv_transfer_config=CONFIGS[name], pull_idle_s=15),
    )
