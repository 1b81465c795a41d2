"""A worker that drains under a load of short requests: no client sees it, as others can take what was on its way."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from pdserve.client import AsyncClient
from pdserve.engine.fake import expected_tokens
from tests.support.deployment import deploy
from tests.support.waiting import eventually

from .streams import prompt_of

FLAGS = ["--max-num-batched-tokens", "512", "--max-num-seqs", "64", "--num-pages", "2048", "--fake-step-ms", "2"]
NUM_CLIENTS = 40


def test_drains_unseen(tmp_path: Path) -> None:
    with deploy(tmp_path, "fake", ["prefill-0", "prefill-1", "decode-0", "decode-1"], flags=FLAGS) as deployment:

        async def body() -> None:
            done, stopping = 0, False

            async def one_after_another(client: AsyncClient, seed: int) -> None:
                nonlocal done
                while not stopping:
                    prompt = prompt_of(20, seed)
                    result = await client.generate(prompt_token_ids=prompt, max_tokens=3, ignore_eos=True, timeout_s=60)
                    assert list(result.token_ids) == expected_tokens(prompt, 3)
                    done += 1

            async with AsyncClient(deployment.address) as client, asyncio.TaskGroup() as clients:
                for seed in range(NUM_CLIENTS):
                    clients.create_task(one_after_another(client, seed))
                for worker in ("decode-0", "prefill-0"):
                    before = done
                    await eventually(lambda before=before: done > before + NUM_CLIENTS, 60)
                    deployment.children[worker].send_signal(signal.SIGTERM)
                    assert await asyncio.to_thread(deployment.children[worker].wait, 40)
                    assert deployment.children[worker].returncode == 0
                before = done
                await eventually(lambda: done > before + NUM_CLIENTS, 60)
                stopping = True

        asyncio.run(body())
