"""A prefill side and a decode side on loopback, with real sockets and a real gRPC server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc.aio
import pytest
import xxhash

from pdserve.core.clock import Clock, MonotonicClock
from pdserve.core.errors import TransferError
from pdserve.core.grpc_server import ErrorInterceptor, open_channel
from pdserve.core.layout import KVLayout
from pdserve.core.tls import Tls
from pdserve.core.tls_refusal import refusal
from pdserve.kvtransfer.arrival import Stages
from pdserve.kvtransfer.control_client import TransferClient, TransferPeer
from pdserve.kvtransfer.control_server import TransferServer
from pdserve.kvtransfer.handoff import TransferState
from pdserve.kvtransfer.incoming import IncomingTransfer
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.shm import ShmPageSink, ShmPageSource
from pdserve.kvtransfer.tcp import TcpPageSink, TcpPageSource
from pdserve.kvtransfer.transport import PageSink, PageSource, SourcePageRef
from pdserve.v1 import kvtransfer_pb2 as pb

DIGEST = bytes(range(32))
PROMPT_DIGEST = bytes(32)
LAYOUT = KVLayout.uniform(num_layers=4, num_kv_heads=4, head_dim=32, page_size=16, dtype="float32")  # 64 KiB pages
SMALL = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=16, page_size=8, dtype="float32")  # 1 KiB pages
INCARNATION = "a1"
HOST_ID = "boot:1"


@dataclass(frozen=True)
class Ref:
    """A page as the engine names it."""

    page_id: int
    generation: int = 1


@dataclass
class Listener:
    """Records what the owner of the pages hears."""

    opened: list[str] = field(default_factory=list)
    ended: dict[str, tuple[TransferState, str]] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def on_opened(self, transfer_id: str) -> None:
        self.opened.append(transfer_id)
        self.changed.set()

    def on_ended(self, transfer_id: str, state: TransferState, reason: str) -> None:
        assert transfer_id not in self.ended, "ended twice"
        self.ended[transfer_id] = (state, reason)
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(15):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def end_of(self, transfer_id: str) -> tuple[TransferState, str]:
        await self.until(lambda: transfer_id in self.ended)
        return self.ended[transfer_id]


@dataclass
class World:
    """Both sides."""

    prefill: KvPool
    decode: KvPool
    source: PageSource  # the first of several
    sink: PageSink
    sources: Mapping[str, PageSource]
    sinks: Mapping[str, PageSink]
    server: TransferServer
    client: TransferClient
    listener: Listener
    peer: TransferPeer
    grpc_server: grpc.aio.Server

    def start(self, transfer_id: str, num_pages: int, *, num_cached: int = 0, first: int = 0) -> IncomingTransfer:
        return self.client.start(
            transfer_id,
            self.peer,
            num_cached_pages=num_cached,
            destinations=range(first, first + num_pages),
            expected_num_tokens=num_pages * 8,
            expected_digest=PROMPT_DIGEST,
        )

    def complete(
        self, transfer_id: str, num_pages: int, *, finished: bool = False, digest: bytes = PROMPT_DIGEST
    ) -> None:
        self.server.complete(
            transfer_id, num_tokens=num_pages * 8, token_id=42, index=0, prompt_digest=digest, finished=finished
        )


def hello() -> pb.TransferHello:
    """The hello of a decode worker that fits."""
    return pb.TransferHello(
        protocol_version=1,
        worker_id="raw",
        incarnation="c1",
        identity_digest=DIGEST,
        layout=SMALL.to_json(),
        expected_incarnation=INCARNATION,
    )


def fill(pool: KvPool) -> None:
    """Different bytes in each page."""
    for i in range(pool.num_pages):
        pool.page(i)[:] = bytes([(i * 7 + 1) % 251, i % 256]) * (pool.page_bytes // 2)


def source_over(plane: str, pool: KvPool, tls: Tls | None = None) -> PageSource:
    """The source of a plane by its name; another name is tcp under that name."""
    return ShmPageSource(pool, DIGEST) if plane == "shm" else TcpPageSource(pool, DIGEST, tls=tls)


def sink_over(plane: str, pool: KvPool, tls: Tls | None = None) -> PageSink:
    """The sink of a plane, see `source_over`."""
    return ShmPageSink(pool, DIGEST) if plane == "shm" else TcpPageSink(pool, DIGEST, tls=tls)


def refs(pool: KvPool, page_ids: Sequence[int], generation: int = 1, *, checksums: bool = True) -> list[SourcePageRef]:
    """Pages of a pool as a watermark names them."""
    return [SourcePageRef(i, generation, xxhash.xxh3_64_intdigest(pool.page(i)) if checksums else 0) for i in page_ids]


async def reason_of(work: Awaitable[object], limit_s: float = 20.0) -> str:
    """Waits until work fails; why."""
    with pytest.raises(TransferError) as e:
        await asyncio.wait_for(asyncio.shield(work), limit_s)
    return e.value.reason


@asynccontextmanager
async def world(
    *,
    layout: KVLayout = SMALL,
    num_pages: int = 16,
    decode_digest: bytes = DIGEST,
    decode_layout: KVLayout | None = None,
    expected_incarnation: str = INCARNATION,
    lease_s: float = 10.0,
    offered: Sequence[str] = ("tcp",),
    wanted: Sequence[str] = ("tcp",),
    decode_host_id: str = HOST_ID,
    sink_of: Callable[[KvPool], PageSink] | None = None,
    stages_of: Callable[[KvPool], Stages] | None = None,
    source_of: Callable[[KvPool], PageSource] | None = None,
    listener_of: Callable[[KvPool], Listener] | None = None,
    peer_timeout_s: float = 3.0,
    prefill_clock: Clock | None = None,
    expect: Callable[[Sequence[int]], None] | None = None,
    decode_integrity: str = "host",
    prefill_tls: Tls | None = None,
    decode_tls: Tls | None = None,
    **server_options: Any,
) -> AsyncIterator[World]:
    prefill, decode = KvPool(layout, num_pages), KvPool(decode_layout or layout, num_pages)
    fill(prefill)
    sources = {name: source_of(prefill) if source_of else source_over(name, prefill, prefill_tls) for name in offered}
    listener = listener_of(prefill) if listener_of else Listener()
    server = TransferServer(
        memory=prefill,
        sources=sources,
        host_id=HOST_ID,
        layout=layout,
        identity_digest=DIGEST,
        incarnation=INCARNATION,
        listener=listener,
        clock=prefill_clock or MonotonicClock(),
        lease_s=lease_s,
        **server_options,
    )
    grpc_server = grpc.aio.server(
        interceptors=[ErrorInterceptor(lambda: True, prefill_tls.peer_name)] if prefill_tls else []
    )
    server.register(grpc_server)
    if prefill_tls is None:
        port = grpc_server.add_insecure_port("127.0.0.1:0")
    else:
        port = grpc_server.add_secure_port("127.0.0.1:0", prefill_tls.server_credentials())
    await grpc_server.start()
    await server.start()
    sinks = {name: sink_of(decode) if sink_of else sink_over(name, decode, decode_tls) for name in wanted}
    client = TransferClient(
        worker_id="decode-0",
        incarnation="b1",
        identity_digest=decode_digest,
        layout=decode_layout or layout,
        sinks=sinks,
        host_id=decode_host_id,
        stages=stages_of(decode) if stages_of else None,
        clock=MonotonicClock(),
        integrity=decode_integrity,
        open_channel=partial(open_channel, max_message_bytes=16 << 20, tls=decode_tls),
        peer_timeout_s=peer_timeout_s,
        refusal=partial(refusal, tls=decode_tls),
        expect=expect,
    )
    peer = TransferPeer("prefill-0", f"127.0.0.1:{port}", expected_incarnation)
    try:
        source, sink = next(iter(sources.values())), next(iter(sinks.values()))
        yield World(prefill, decode, source, sink, sources, sinks, server, client, listener, peer, grpc_server)
    finally:
        await client.close()
        await server.stop()
        await grpc_server.stop(None)
        for source in sources.values():
            source.close()
        assert server.num_leases == 0
        assert client.num_open == 0
        prefill.close()
        decode.close()


async def eventually(condition: Callable[[], bool]) -> None:
    """Polls what signals nothing, with a deadline."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def run(coroutine: Coroutine[Any, Any, None], limit_s: float = 30.0) -> None:
    """Runs a test body with a deadline."""
    asyncio.run(asyncio.wait_for(coroutine, limit_s))
