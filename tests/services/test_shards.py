"""A real decode worker takes one prompt of a real model from two processes that have half of its KV heads each.

No prefill worker computes a range of heads yet: what a whole one computed is taken from it and cut in two.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from pdserve.core.clock import MonotonicClock
from pdserve.core.hashing import token_digest
from pdserve.core.layout import KVLayout, LayerGroup
from pdserve.kvtransfer.control_client import TransferClient, TransferPeer
from pdserve.kvtransfer.convert import HeadShard
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.tcp import TcpPageSink, TcpPageSource
from pdserve.kvtransfer.timeline import TransferResult
from pdserve.v1 import common_pb2, worker_pb2
from tests.engine_model.models import FAMILIES, VOCAB_SIZE, make_model, plain_greedy, save_model
from tests.kvtransfer.ranks import Rank, rank
from tests.services.test_unequal import model_config, one_thread
from tests.services.world import Pair, pair

__all__ = ["one_thread"]
NUM_TOKENS = 50


async def computed(both: Pair, prompt: list[int]) -> tuple[KVLayout, list[bytes], TransferResult]:
    """Has the prefill worker compute a prompt; its layout, pages and first token."""
    assert both.to_prefill.welcome is not None
    layout, digest = KVLayout.from_json(both.to_prefill.welcome.layout), both.to_prefill.welcome.identity_digest
    pool = KvPool(layout, layout.num_pages(len(prompt)))
    client = TransferClient(
        worker_id="cutter",
        incarnation="c1",
        identity_digest=digest,
        layout=layout,
        sinks={"tcp": TcpPageSink(pool, digest)},
        clock=MonotonicClock(),
    )
    at = both.prefill.peer
    incoming = client.start(
        "t-r-1",
        TransferPeer(at.worker_id, at.address, at.incarnation),
        num_cached_pages=0,
        destinations=range(pool.num_pages),
        expected_num_tokens=len(prompt),
        expected_digest=token_digest(prompt),
    )
    await both.to_prefill.send(submit=both.submission("r", prompt, common_pb2.ROLE_PREFILL, max_tokens=8))
    result = await asyncio.wait_for(incoming.result(), 20)
    await client.close()
    return layout, [bytes(pool.page(i)) for i in range(pool.num_pages)], result


@asynccontextmanager
async def halves(layout: KVLayout, pages: list[bytes], digest: bytes) -> AsyncIterator[list[Rank]]:
    """Two sources of half of the heads each; in a page the heads lie one after the other."""
    (group,) = layout.groups
    num, size = group.num_kv_heads // 2, layout.page_bytes // 2
    half = KVLayout(layout.page_size, layout.dtype, (LayerGroup(group.layers, num, group.k_dim, group.v_dim),))
    async with AsyncExitStack() as stack:
        found = []
        for i in range(2):
            one = await stack.enter_async_context(
                rank(
                    i,
                    HeadShard(half, (i * num,)),
                    "tcp",
                    lambda pool: TcpPageSource(pool, digest),
                    num_pages=len(pages),
                    digest=digest,
                )
            )
            one.offer([page[i * size : (i + 1) * size] for page in pages])
            found.append(one)
        yield found


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("agree", [True, False])
def test_a_prompt_cut_in_two_gives_the_tokens_of_the_whole(agree: bool, tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    prompt = random.Random(4).choices(range(VOCAB_SIZE), k=NUM_TOKENS)

    async def body() -> None:
        async with pair(prefill=model_config(tmp_path), decode=model_config(tmp_path, page_size=32)) as both:
            layout, pages, result = await computed(both, prompt)
            assert both.to_decode.welcome is not None
            async with halves(layout, pages, both.to_decode.welcome.identity_digest) as sources:
                first, second = (
                    worker_pb2.Peer(worker_id=p.worker_id, address=p.address, incarnation=p.incarnation)
                    for p in (source.peer for source in sources)
                )
                submit = both.submission("r", prompt, common_pb2.ROLE_DECODE, max_tokens=8)
                submit.transfer_id = "t"
                submit.prefill.CopyFrom(first)
                submit.prefill_shards.append(second)
                await both.to_decode.send(submit=submit)
                for i, source in enumerate(sources):
                    source.ready(0)
                    token_id = result.token_id if agree or i == 0 else result.token_id ^ 1
                    source.complete(len(prompt), token_id=token_id, digest=token_digest(prompt))
                _, d = await both.ended("r")
                if agree:
                    assert d.failed is None
                    expected = plain_greedy(make_model(*FAMILIES["llama"]), prompt, 8)[0]
                    assert [result.token_id, *d.token_ids] == expected
                else:
                    assert d.failed is not None and d.failed.reason == "SHARDS_DISAGREE"
                for source in sources:
                    await source.listener.end_of("t")
            await both.all_free()

    asyncio.run(body())
