"""Prefill and decode over one-sided transports; see `tests.support.own_process`."""

from __future__ import annotations

import random

import pytest

from pdserve.core.config import WorkerConfig
from pdserve.engine.fake import expected_tokens
from tests.services.test_pair import prompt_of, run
from tests.services.world import Pair, until

CONFIGS = {
    "mooncake": '{"transports": ["mooncake"], "mooncake": {"host": "127.0.0.1"}}',
    "nixl": '{"transports": ["nixl"], "nixl": {"ucx_tls": "tcp", "ucx_net_devices": "lo"}}',
}


@pytest.mark.parametrize("name", CONFIGS)
def test_requests_and_aborts_over_a_one_sided_transport(name: str) -> None:
    async def scenario(both: Pair) -> None:
        lengths = [1, 16, 257, 1000]
        for n in lengths:
            await both.submit(f"r{n}", prompt_of(n))
        for n in lengths:
            p, d = await both.ended(f"r{n}")
            await until(lambda d=d: (d.finished or d.failed) is not None, "decode's end")  # type: ignore[misc]
            assert d.failed is None, d.failed
            assert p.token_ids + d.token_ids == expected_tokens(prompt_of(n), 16), n
        choose = random.Random(3)
        for i in range(12):
            await both.submit(f"a{i}", prompt_of(400, i))
        for i in range(12):
            for router in choose.sample([both.to_prefill, both.to_decode], 2):
                await both.abort(router, f"a{i}")
        await until(lambda: both.decode.metric("pdserve_kv_quarantined_pages") == 0, "the end of every read")

    run(scenario, worker=WorkerConfig(kv_transfer_config=CONFIGS[name]))
