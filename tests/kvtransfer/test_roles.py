"""A transfer assumes no role: one worker gives and takes pages of one pool, in both directions at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio
import pytest

from pdserve.core.clock import MonotonicClock
from pdserve.kvtransfer.control_client import TransferClient, TransferPeer
from pdserve.kvtransfer.control_server import TransferServer
from pdserve.kvtransfer.handoff import TransferState
from pdserve.kvtransfer.pool import KvPool

from .world import DIGEST, HOST_ID, PROMPT_DIGEST, SMALL, Listener, Ref, run, sink_over, source_over


@dataclass
class Member:
    """A worker with both ends over its pool, whose pages say whose they are."""

    pool: KvPool
    server: TransferServer
    client: TransferClient
    listener: Listener
    peer: TransferPeer

    def page(self, page_id: int) -> bytes:
        return bytes(self.pool.page(page_id))

    def compute(self, page_id: int) -> bytes:
        """Fills a page as nobody else does; what it holds now."""
        self.pool.page(page_id)[:] = f"{self.peer.worker_id}/{page_id:08}".encode().ljust(self.pool.page_bytes, b".")
        return self.page(page_id)

    async def take(self, transfer_id: str, giver: Member, pages: Sequence[int], into: Sequence[int]) -> None:
        """Brings pages of another one here."""
        giver.server.offer(transfer_id, len(pages))
        incoming = self.client.start(
            transfer_id,
            giver.peer,
            num_cached_pages=0,
            destinations=into,
            expected_num_tokens=8 * len(pages),
            expected_digest=PROMPT_DIGEST,
        )
        giver.server.pages_ready(transfer_id, 0, [Ref(page) for page in pages])
        giver.server.complete(transfer_id, num_tokens=8 * len(pages), token_id=1, index=0, prompt_digest=PROMPT_DIGEST)
        await incoming.result()
        assert (await giver.listener.end_of(transfer_id))[0] is TransferState.COMPLETE


@asynccontextmanager
async def member(name: str, plane: str) -> AsyncIterator[Member]:
    pool, listener, clock = KvPool(SMALL, 16), Listener(), MonotonicClock()
    source = source_over(plane, pool)
    server = TransferServer(
        memory=pool,
        sources={plane: source},
        layout=SMALL,
        identity_digest=DIGEST,
        incarnation=name,
        listener=listener,
        clock=clock,
        host_id=HOST_ID,
    )
    grpc_server = grpc.aio.server()
    server.register(grpc_server)
    port = grpc_server.add_insecure_port("127.0.0.1:0")
    await grpc_server.start()
    await server.start()
    client = TransferClient(
        worker_id=name,
        incarnation=name,
        identity_digest=DIGEST,
        layout=SMALL,
        sinks={plane: sink_over(plane, pool)},
        clock=clock,
        host_id=HOST_ID,
    )
    try:
        yield Member(pool, server, client, listener, TransferPeer(name, f"127.0.0.1:{port}", name))
    finally:
        await client.close()
        await server.stop()
        await grpc_server.stop(None)
        source.close()
        assert server.num_leases == client.num_open == 0
        pool.close()


@pytest.mark.parametrize("plane", ["tcp", "shm"])
def test_pages_go_from_prefill_to_decode_on_to_another_decode_and_back(plane: str) -> None:
    async def body() -> None:
        async with member("prefill", plane) as p, member("decode-1", plane) as d, member("decode-2", plane) as e:
            prompt = [p.compute(page) for page in (3, 1, 2)]
            await d.take("hand-off", p, (3, 1, 2), (7, 8, 9))
            answer, other = d.compute(10), [e.compute(page) for page in (14, 15)]
            await asyncio.gather(
                e.take("migration", d, (7, 8, 9, 10), (0, 1, 2, 3)), d.take("the other way", e, (14, 15), (0, 1))
            )
            assert [d.page(page) for page in (0, 1)] == other
            await p.take("reuse", e, (0, 1, 2, 3), (10, 11, 12, 13))
            assert [p.page(page) for page in (10, 11, 12, 13)] == [*prompt, answer]
            assert [p.page(page) for page in (3, 1, 2)] == prompt

    run(body())
