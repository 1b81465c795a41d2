"""A prefill process that has a range of the KV heads, made of a real server and a real plane."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio

from pdserve.core.clock import MonotonicClock
from pdserve.kvtransfer.control_client import TransferPeer
from pdserve.kvtransfer.control_server import TransferServer
from pdserve.kvtransfer.convert import HeadShard
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.transport import PageSource

from .layouts import poisoned_pool, put
from .world import DIGEST, HOST_ID, PROMPT_DIGEST, Listener, Ref


@dataclass
class Rank:
    """One source of transfer "t"."""

    shard: HeadShard
    pool: KvPool
    server: TransferServer
    grpc_server: grpc.aio.Server
    listener: Listener
    peer: TransferPeer
    num_pages: int = 0

    def offer(self, pages: list[bytes]) -> None:
        """Puts its heads of a prompt into its pool, and offers it."""
        self.num_pages = len(pages)
        put(self.pool, list(range(len(pages))), pages)
        self.server.offer("t", len(pages))

    def ready(self, first: int, end: int | None = None) -> None:
        """These pages are final; None: all that follow."""
        end = self.num_pages if end is None else end
        self.server.pages_ready("t", first, [Ref(i) for i in range(first, end)])

    def complete(
        self, num_tokens: int, *, token_id: int = 7, digest: bytes = PROMPT_DIGEST, finished: bool = False
    ) -> None:
        """The prompt is computed."""
        self.server.complete(
            "t", num_tokens=num_tokens, token_id=token_id, index=0, prompt_digest=digest, finished=finished
        )


@asynccontextmanager
async def rank(
    index: int,
    shard: HeadShard,
    plane: str,
    source_of: Callable[[KvPool], PageSource],
    *,
    num_pages: int,
    digest: bytes = DIGEST,
    first_heads: tuple[int, ...] | None = None,
) -> AsyncIterator[Rank]:
    """A source that serves.

    Args:
        index: Names it.
        shard: What it has.
        plane: Name of its plane.
        source_of: Makes that.
        num_pages: Of its pool.
        digest: Identity.
        first_heads: What it says instead of what it has.
    """
    pool = poisoned_pool(shard.layout, num_pages)
    source, listener = source_of(pool), Listener()
    server = TransferServer(
        memory=pool,
        sources={plane: source},
        host_id=HOST_ID,
        layout=shard.layout,
        first_kv_heads=shard.first_heads if first_heads is None else first_heads,
        identity_digest=digest,
        incarnation=f"a{index}",
        listener=listener,
        clock=MonotonicClock(),
    )
    grpc_server = grpc.aio.server()
    server.register(grpc_server)
    port = grpc_server.add_insecure_port("127.0.0.1:0")
    await grpc_server.start()
    await server.start()
    peer = TransferPeer(f"prefill-{index}", f"127.0.0.1:{port}", f"a{index}")
    try:
        yield Rank(shard, pool, server, grpc_server, listener, peer)
    finally:
        await server.stop()
        await grpc_server.stop(None)
        source.close()
        assert server.num_leases == 0
        pool.close()
