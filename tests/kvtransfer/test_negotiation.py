"""The pair's data plane: what decode wants, what prefill has, and what an older peer means."""

from __future__ import annotations

import os
from collections.abc import Sequence

import grpc.aio
import pytest

from pdserve.core.data_planes import same_host
from pdserve.core.errors import TransferError
from pdserve.kvtransfer.control_client import TransferPeer
from pdserve.kvtransfer.handoff import TransferState
from pdserve.kvtransfer.negotiation import choose, host_id
from pdserve.kvtransfer.shm import ShmPageSource
from pdserve.kvtransfer.tcp import TcpPageSource
from pdserve.kvtransfer.transport import SourcePageRef
from pdserve.v1 import kvtransfer_pb2 as pb
from pdserve.v1 import kvtransfer_pb2_grpc as rpc

from .world import PROMPT_DIGEST, SMALL, Ref, hello, run, world


@pytest.mark.parametrize(
    ("wanted", "offered", "near", "chosen"),
    [
        (["shm", "tcp"], ["tcp", "shm"], True, "shm"),
        (["tcp", "shm"], ["shm", "tcp"], True, "tcp"),
        (["shm", "tcp"], ["shm", "tcp"], False, "tcp"),
        (["shm", "nixl", "tcp"], ["tcp", "nixl"], True, "nixl"),
        ([], ["shm", "tcp"], True, "tcp"),
        (["unheard-of", "tcp"], ["tcp"], True, "tcp"),
    ],
)
def test_the_first_wanted_plane_that_can_work_is_chosen(
    wanted: list[str], offered: list[str], near: bool, chosen: str
) -> None:
    assert choose(wanted, offered, same_host=near) == chosen


@pytest.mark.parametrize(
    ("wanted", "offered", "near"), [(["nixl"], ["shm", "tcp"], True), ([], ["shm"], True), (["shm"], ["shm"], False)]
)
def test_no_common_plane_is_refused_with_both_lists(wanted: list[str], offered: list[str], near: bool) -> None:
    with pytest.raises(TransferError, match="--kv-transfer-config") as e:
        choose(wanted, offered, same_host=near)
    assert e.value.reason == "TRANSPORT"
    assert f"decode worker has {', '.join(wanted or ['tcp'])}," in e.value.message
    assert f"prefill worker has {', '.join(offered)}" in e.value.message
    assert ("network namespace" in e.value.message) == (not near)


def test_a_long_list_of_a_peer_is_cut() -> None:
    with pytest.raises(TransferError) as e:
        choose(["x" * 10_000] * 10_000, ["tcp"], same_host=True)
    assert len(e.value.message) < 1000


def test_a_host_that_is_not_known_is_no_other_one() -> None:
    assert same_host("a", "a") and not same_host("a", "b") and not same_host("", "")
    assert host_id() and host_id() == host_id()


def test_two_users_of_one_host_are_as_far_apart_as_two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """shm shows pages to processes of the same user only: a pair that chose it would fail every transfer."""
    mine = host_id()
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    assert not same_host(mine, host_id())
    offered, wanted = ["shm", "tcp"], ["shm", "tcp"]
    assert choose(wanted, offered, same_host=same_host(mine, host_id())) == "tcp"


@pytest.mark.parametrize(
    ("wanted", "offered", "decode_host_id", "used"),
    [
        (("other", "tcp"), ("tcp", "other"), "boot:1", "other"),
        (("tcp", "other"), ("other", "tcp"), "boot:1", "tcp"),
        (("shm", "tcp"), ("shm", "tcp"), "boot:1", "shm"),
        (("shm", "tcp"), ("shm", "tcp"), "boot:2", "tcp"),
        (("shm", "tcp"), ("shm", "tcp"), "", "tcp"),
    ],
)
def test_a_pair_uses_one_plane_for_everything(
    wanted: Sequence[str], offered: Sequence[str], decode_host_id: str, used: str
) -> None:
    async def body() -> None:
        async with world(wanted=wanted, offered=offered, decode_host_id=decode_host_id) as w:
            for i in range(2):
                w.server.offer(f"t{i}", 1)
                incoming = w.start(f"t{i}", 1, first=i)
                w.server.pages_ready(f"t{i}", 0, [Ref(5 + i)])
                w.complete(f"t{i}", 1)
                await incoming.result()
                assert w.decode.page(i) == w.prefill.page(5 + i)
                assert (await w.listener.end_of(f"t{i}"))[0] is TransferState.COMPLETE
            for name, source in w.sources.items():
                assert isinstance(source, TcpPageSource | ShmPageSource)
                assert source.num_connections == (1 if name == used else 0), name

    run(body())


def test_a_pair_without_a_common_plane_is_refused() -> None:
    async def body() -> None:
        async with world(wanted=("one", "two"), offered=("three",)) as w:
            with pytest.raises(TransferError, match=r"one, two.*three") as e:
                await w.start("t", 1).result()
            assert e.value.reason == "TRANSPORT"

    run(body())


def test_a_decode_worker_of_the_version_before_gets_tcp() -> None:
    async def body() -> None:
        async with (
            world(offered=("shm", "tcp")) as w,
            grpc.aio.insecure_channel(w.peer.address) as channel,
        ):
            call = rpc.KvTransferStub(channel).Control()  # type: ignore[no-untyped-call]
            await call.write(pb.ControlRequest(hello=hello()))  # names no planes
            welcome = (await call.read()).welcome
            assert welcome.data_address == w.sources["tcp"].address
            assert welcome.transport == "tcp"

    run(body())


class ScriptedPrefill(rpc.KvTransferServicer):
    """Says the same to every hello."""

    def __init__(self, messages: list[pb.ControlResponse]) -> None:
        self._messages = messages

    async def Control(  # noqa: N802, RUF100 (name given by the proto)
        self, request_iterator: object, context: grpc.aio.ServicerContext[pb.ControlRequest, pb.ControlResponse]
    ) -> None:
        await context.read()
        for message in self._messages:
            await context.write(message)
        while isinstance(await context.read(), pb.ControlRequest):
            pass


@pytest.mark.parametrize(("transport", "reason"), [("", None), ("tcp", None), ("nixl", "TRANSPORT")])
def test_what_a_prefill_worker_chose_must_be_here(transport: str, reason: str | None) -> None:
    """One of the version before chooses nothing and means tcp."""

    async def body() -> None:
        async with world(wanted=("shm", "tcp"), decode_integrity="none") as w:
            token = w.source.new_reader()
            w.source.publish("t", token, [SourcePageRef(3, 1, 0)])
            welcome = pb.TransferWelcome(
                protocol_version=1,
                data_address=w.source.address,
                data_token=token,
                lease_ms=1000,
                integrity="none",
                layout=SMALL.to_json(),
                transport=transport,
            )
            pages = [pb.SourcePage(page_id=3, generation=1)]
            manifest = pb.Manifest(transfer_id="t", num_pages=1, num_tokens=8, prompt_digest=PROMPT_DIGEST)
            script = [
                pb.ControlResponse(welcome=welcome),
                pb.ControlResponse(watermark=pb.Watermark(transfer_id="t", pages=pages)),
                pb.ControlResponse(manifest=manifest),
            ]
            server = grpc.aio.server()
            rpc.add_KvTransferServicer_to_server(ScriptedPrefill(script), server)  # type: ignore[no-untyped-call]
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            incoming = w.client.start(
                "t",
                TransferPeer("older", f"127.0.0.1:{port}", "a0"),
                num_cached_pages=0,
                destinations=[0],
                expected_num_tokens=8,
                expected_digest=PROMPT_DIGEST,
            )
            if reason is None:
                await incoming.result()
                assert w.decode.page(0) == w.prefill.page(3)
            else:
                with pytest.raises(TransferError, match="nixl") as e:
                    await incoming.result()
                assert e.value.reason == reason
            await server.stop(None)

    run(body())
