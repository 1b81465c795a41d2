"""Version N with N−1: a frozen peer in both roles, and what is older or newer."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.kvtransfer.control_client import TransferPeer
from pdserve.kvtransfer.handoff import TransferState
from pdserve.kvtransfer.negotiation import OLDEST_VERSION, PROTOCOL_VERSION
from pdserve.kvtransfer.timeline import TransferResult
from pdserve.v1 import kvtransfer_pb2 as pb
from tests.support.peer_v0.decode import fetch
from tests.support.peer_v0.prefill import frozen_prefill

from .accounts import Borrower
from .scripted import Refused, ScriptedDecode
from .world import DIGEST, INCARNATION, PROMPT_DIGEST, SMALL, Ref, hello, run, world

HELLO: dict[str, Any] = {
    "protocol_version": 1,
    "worker_id": "frozen",
    "incarnation": "f1",
    "identity_digest": DIGEST,
    "layout": SMALL.to_json(),
    "expected_incarnation": INCARNATION,
}


def test_todays_prefill_serves_the_frozen_decode() -> None:
    async def body() -> None:
        async with world() as w:
            w.server.offer("t", 4)
            w.server.pages_ready("t", 0, [Ref(3), Ref(1)])
            w.server.pages_ready("t", 2, [Ref(9), Ref(0)])
            w.complete("t", 4)
            pages, manifest = await fetch(w.peer.address, "t", hello=HELLO, page_bytes=SMALL.page_bytes)
            assert pages == [bytes(w.prefill.page(i)) for i in (3, 1, 9, 0)]
            assert (manifest.token_id, manifest.index, manifest.num_tokens) == (42, 0, 32)
            assert await w.listener.end_of("t") == (TransferState.COMPLETE, "COMPLETE")

    run(body())


def test_todays_decode_pulls_from_the_frozen_prefill() -> None:
    async def body() -> None:
        pages = [bytes([i + 1]) * SMALL.page_bytes for i in range(5)]
        facts = {"num_pages": 5, "num_tokens": 40, "token_id": 7, "index": 0, "prompt_digest": PROMPT_DIGEST}
        async with world() as w, frozen_prefill(pages, DIGEST, facts, SMALL.to_json()) as (frozen, address):
            peer = TransferPeer("frozen", address, "frozen")
            borrower = Borrower(w.client, w.sink, w.decode, peer)
            loan = borrower.borrow("t", 5)
            end = await loan.end()
            assert isinstance(end, TransferResult) and end.token_id == 7
            assert loan.received == pages and borrower.even
            await frozen.closed.wait()
            assert frozen.outcome == 1
            assert frozen.hello.protocol_version == 1

    run(body())


@pytest.mark.parametrize("version", [0, OLDEST_VERSION - 1])
def test_what_is_too_old_is_refused_by_number(version: int) -> None:
    async def body() -> None:
        async with world() as w:
            old = hello()
            old.protocol_version = version
            with pytest.raises(Refused, match=f"PROTOCOL_VERSION: .*{PROTOCOL_VERSION}.*{version}"):
                await ScriptedDecode([pb.ControlRequest(hello=old)]).run(w.server)

    run(body())


def test_a_newer_peer_is_answered_in_our_version() -> None:
    async def body() -> None:
        async with world() as w:
            newer = hello()
            newer.protocol_version = PROTOCOL_VERSION + 1
            decode = ScriptedDecode([pb.ControlRequest(hello=newer)])
            await decode.run(w.server)
            assert decode.heard[0].welcome.protocol_version == PROTOCOL_VERSION

    run(body())
