"""Transfers between workers whose pages are not alike: counted, converted, or refused with what differs."""

from __future__ import annotations

from dataclasses import replace

import grpc.aio
import pytest

from pdserve.core.clock import MonotonicClock
from pdserve.core.errors import TransferError
from pdserve.core.layout import CONVERSIONS, PAGE_SIZE, KVLayout, LayerGroup
from pdserve.kvtransfer import hello as hellos
from pdserve.kvtransfer.arrival import Stages
from pdserve.kvtransfer.handoff import TransferState
from pdserve.kvtransfer.pool import KvPool
from pdserve.v1 import kvtransfer_pb2 as pb
from pdserve.v1.kvtransfer_pb2_grpc import KvTransferStub

from .layouts import POISON, in_dtype, make_kv, make_pages, put
from .world import PROMPT_DIGEST, SMALL, Ref, World, hello, run, sink_over, world

GROUPS = (LayerGroup((0, 1), 2, 8, 4),)


def layout(page_size: int, dtype: str = "float32") -> KVLayout:
    return KVLayout(page_size, dtype, GROUPS)


def stages_of(converts: frozenset[str] = CONVERSIONS, max_bytes: int = 1 << 16):  # type: ignore[no-untyped-def]
    def make(pool: KvPool) -> Stages:
        return Stages(
            pool,
            pool.layout,
            sink_over,
            MonotonicClock(),
            converts=converts,
            max_bytes=max_bytes,
        )

    return make


async def transfer(w: World, use: int, num_tokens: int, num_cached: int, chunk: int) -> int:
    """Hands one prompt over, in watermarks of so many pages, checks every byte, and returns the pages pulled.

    Every one takes the same pages: `use` is their generation.
    """
    transfer_id = f"t{use}"
    theirs, ours = w.prefill.layout, w.decode.layout
    num_pages, num_here = theirs.num_pages(num_tokens), ours.num_pages(num_tokens)
    kv = make_kv(GROUPS, num_tokens, seed=num_tokens)
    put(w.prefill, list(range(num_pages)), make_pages(kv, theirs, num_tokens))
    put(w.decode, list(range(2, 2 + num_here)), [bytes([POISON]) * ours.page_bytes] * num_here)
    marks = [bytes([200 + i]) * ours.page_bytes for i in range(num_cached)]
    put(w.decode, list(range(2, 2 + num_cached)), marks)
    w.server.offer(transfer_id, num_pages)
    incoming = w.client.start(
        transfer_id,
        w.peer,
        num_cached_pages=num_cached,
        destinations=range(2, 2 + num_here),
        expected_num_tokens=num_tokens,
        expected_digest=PROMPT_DIGEST,
    )
    for at in range(0, num_pages, chunk):
        w.server.pages_ready(transfer_id, at, [Ref(i, use) for i in range(at, min(at + chunk, num_pages))])
    w.server.complete(transfer_id, num_tokens=num_tokens, token_id=7, index=0, prompt_digest=PROMPT_DIGEST)
    result = await incoming.result()
    assert await w.listener.end_of(transfer_id) == (TransferState.COMPLETE, "COMPLETE")
    assert [bytes(w.decode.page(2 + i)) for i in range(num_cached)] == marks, "a cached page was written"
    rounded = {k: _float(in_dtype(v, theirs.dtype), theirs.dtype, v.shape) for k, v in kv.items()}
    right = make_pages(rounded, ours, num_tokens)
    arrived = [bytes(w.decode.page(2 + i)) for i in range(num_here)]
    assert arrived[num_cached:] == right[num_cached:]
    return result.num_pages


def _float(data: bytes, dtype: str, shape: tuple[int, ...]):  # type: ignore[no-untyped-def]
    import torch

    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).float().view(shape).numpy()


@pytest.mark.parametrize(("theirs", "ours"), [(16, 32), (32, 16), (24, 16), (16, 40), (16, 16)])
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float32", "bfloat16"), ("float16", "float32")])
def test_a_prompt_arrives_in_pages_of_our_kind(theirs: int, ours: int, dtypes: tuple[str, str]) -> None:
    async def body() -> None:
        options = {"layout": layout(theirs, dtypes[0]), "decode_layout": layout(ours, dtypes[1])}
        async with world(**options, stages_of=stages_of(), num_pages=24) as w:  # type: ignore[arg-type]
            for i, (num_tokens, num_cached, chunk) in enumerate(
                [(1, 0, 1), (160, 0, 3), (161, 2, 1), (200, 3, 20), (240, 240 // ours, 2), (159, 1, 2)]
            ):
                num_pulled = await transfer(w, i, num_tokens, num_cached, chunk)
                num_pages, cached = layout(theirs).num_pages(num_tokens), num_cached * ours
                skipped = num_pages if cached >= num_tokens else cached // theirs
                assert num_pulled == num_pages - skipped, (num_tokens, num_cached)

    run(body())


@pytest.mark.parametrize("plane", ["tcp", "shm"])
def test_large_transfers_pass_a_small_stage_in_pieces(plane: str) -> None:
    async def body() -> None:
        options = {"layout": layout(16), "decode_layout": layout(32), "offered": [plane], "wanted": [plane]}
        one_page = stages_of(max_bytes=layout(16).page_bytes)
        async with world(**options, stages_of=one_page, num_pages=40) as w:  # type: ignore[arg-type]
            num_pulled = await transfer(w, 0, 600, 0, 38)
            assert num_pulled == 38

    run(body())


OTHER_HEADS = KVLayout(16, "float32", (replace(GROUPS[0], num_kv_heads=3),))


@pytest.mark.parametrize(
    ("theirs", "ours", "converts", "reason", "says"),
    [
        (layout(16), layout(16, "bfloat16"), {PAGE_SIZE}, "LAYOUT", "dtype differs: float32 .*--kv-convert-dtype"),
        (layout(16), layout(32), set(), "LAYOUT", "page_size differs: 16 here, 32 there"),
        (OTHER_HEADS, layout(16), CONVERSIONS, "LAYOUT", "num_kv_heads of layer 0 differs: 3 here, 2 there"),
        (
            layout(16),
            KVLayout.uniform(num_layers=3, num_kv_heads=2, head_dim=8, page_size=16, dtype="float32"),
            CONVERSIONS,
            "LAYOUT",
            "number of layers differs: 2 here, 3 there",
        ),
        (
            layout(16),
            KVLayout.uniform(num_layers=2, num_kv_heads=2, head_dim=8, page_size=16, dtype="float32"),
            CONVERSIONS,
            "LAYOUT",
            "v_dim of layer 0 differs: 4 here, 8 there",
        ),
        (layout(512), layout(16), CONVERSIONS, "STAGING", "--kv-staging-bytes is 65536; one page .* takes 98304"),
    ],
)
def test_what_cannot_be_converted_is_refused_with_both_numbers(
    theirs: KVLayout, ours: KVLayout, converts: set[str], reason: str, says: str
) -> None:
    async def body() -> None:
        options = {"layout": theirs, "decode_layout": ours, "num_pages": 4}
        async with world(**options, stages_of=stages_of(frozenset(converts))) as w:  # type: ignore[arg-type]
            w.server.offer("t", 1)
            incoming = w.start("t", 1)
            with pytest.raises(TransferError, match=says) as e:
                await incoming.result()
            assert e.value.reason == reason
            w.server.close("t", "ABORTED")

    run(body())


def test_decode_converts_nothing_that_prefill_let_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill worker that does not compare: its welcome names its layout, and decode does."""
    monkeypatch.setattr(hellos, "check", lambda *_: None)

    async def body() -> None:
        options = {"layout": layout(16), "decode_layout": layout(32), "num_pages": 4}
        async with world(**options, stages_of=stages_of(frozenset())) as w:  # type: ignore[arg-type]
            with pytest.raises(TransferError, match="page_size differs: 32 here, 16 there") as e:
                await w.start("t", 1).result()
            assert e.value.reason == "LAYOUT"

    run(body())


def test_a_decode_worker_of_the_version_before_is_refused_unless_its_layout_is_equal() -> None:
    async def body() -> None:
        async with world() as w, grpc.aio.insecure_channel(w.peer.address) as channel:
            before = hello()
            assert not before.kv_converts
            before.layout = replace(SMALL, page_size=16).to_json()
            call = KvTransferStub(channel).Control()  # type: ignore[no-untyped-call]
            await call.write(pb.ControlRequest(hello=before))
            with pytest.raises(grpc.aio.AioRpcError) as e:
                await call.read()
            assert e.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert str(e.value.details()).startswith("LAYOUT: page_size differs: 8 here, 16 there")

    run(body())


def test_an_element_that_our_dtype_cannot_hold_fails_the_transfer() -> None:
    async def body() -> None:
        options = {"layout": layout(16), "decode_layout": layout(16, "float16"), "num_pages": 4}
        async with world(**options, stages_of=stages_of()) as w:  # type: ignore[arg-type]
            put(w.prefill, [0], [in_dtype(make_array(1e6, w.prefill.layout.page_elements), "float32")])
            w.server.offer("t", 1)
            incoming = w.client.start(
                "t",
                w.peer,
                num_cached_pages=0,
                destinations=[3],
                expected_num_tokens=9,
                expected_digest=PROMPT_DIGEST,
            )
            w.server.pages_ready("t", 0, [Ref(0)])
            with pytest.raises(TransferError, match="magnitude 1e\\+06, too large for float16"):
                await incoming.result()
            assert await w.listener.end_of("t") == (TransferState.FAILED, "DTYPE_OVERFLOW")

    run(body())


def make_array(value: float, num: int):  # type: ignore[no-untyped-def]
    import numpy as np

    return np.full(num, value, np.float32)
