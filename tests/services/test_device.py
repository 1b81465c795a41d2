"""Workers whose pages are computed in other memory than transports read and write; the CPU plays the device."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import torch

from pdserve.engine import device
from pdserve.engine.config import EngineConfig
from tests.engine_model.models import FAMILIES, VOCAB_SIZE, make_model, plain_greedy, save_model
from tests.services.world import pair


def test_pages_pass_through_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts with one beginning: of the second, cached pages are announced again and not pulled."""
    monkeypatch.setattr(device, "find_device", lambda _: torch.device("cpu"))
    save_model("llama", tmp_path)
    options = {"page_size": 16, "num_pages": 32, "max_num_seqs": 4, "max_num_batched_tokens": 24, "dtype": "float32"}
    engine = EngineConfig(model=str(tmp_path), device="cuda", enforce_eager=True, **options)  # type: ignore[arg-type]
    rng, model = random.Random(2), make_model(*FAMILIES["llama"])
    begin = [rng.randrange(VOCAB_SIZE) for _ in range(33)]

    async def main() -> None:
        async with pair(engine, engine) as both:
            for request_id, rest in (("a", 4), ("b", 9)):
                prompt = begin + [rng.randrange(VOCAB_SIZE) for _ in range(rest)]
                await both.submit(request_id, prompt, max_tokens=8)
                p, d = await both.ended(request_id)
                assert p.failed is None and d.failed is None
                assert p.token_ids + d.token_ids == plain_greedy(model, prompt, 8)[0]
            await both.all_free()

    asyncio.run(main())
