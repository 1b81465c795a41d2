"""Mutual TLS of the gRPC server: who gets in, who gets nothing, and certificates that change."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.cli.authority import Authority
from pdserve.core import grpc_server
from pdserve.core.errors import PdserveError
from pdserve.core.grpc_server import GrpcServer, error_from_rpc, open_channel
from pdserve.core.tls import Tls, TlsConfig
from tests.kvtransfer.blackhole import blackhole
from tests.support.certificates import EXPIRED, client_hello, member, unproven
from tests.support.waiting import eventually

AUTHORITY, OTHER = Authority.new(), Authority.new("another authority")
LIMIT = 1 << 20


@asynccontextmanager
async def serving(tls: Tls | None) -> AsyncIterator[str]:
    server = GrpcServer([], max_message_bytes=LIMIT, tls=tls)
    port = server.bind("127.0.0.1", 0)
    await server.start()
    server.open()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def ask(channel: grpc.aio.Channel) -> str | PdserveError:
    """SERVING, or why not."""
    try:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    except grpc.aio.AioRpcError as e:
        return error_from_rpc(e)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


async def call(address: str, tls: Tls | None) -> str | PdserveError:
    async with open_channel(address, max_message_bytes=LIMIT, tls=tls) as channel:
        return await ask(channel)


def serial(address: str, files: TlsConfig) -> int:
    """Serial number of the certificate that a new connection is shown."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(files.tls_ca_file)
    context.load_cert_chain(str(files.tls_cert_file), files.tls_key_file)
    context.set_alpn_protocols(["h2"])
    host, port = address.split(":")
    with (
        socket.create_connection((host, int(port)), timeout=10) as sock,
        context.wrap_socket(sock, server_hostname="pdserve") as end,
    ):
        shown = end.getpeercert()
    assert shown is not None
    return int(str(shown["serialNumber"]), 16)


def test_members_get_in_and_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        good = Tls(member(tmp_path / "good", AUTHORITY))
        files = {
            "plain": None,
            "of another authority": Tls(member(tmp_path / "a", OTHER)),
            "another authority's, trusting ours": unproven(
                monkeypatch, member(tmp_path / "b", OTHER, trusts=AUTHORITY)
            ),
            "expired": unproven(monkeypatch, member(tmp_path / "c", AUTHORITY, **EXPIRED)),
        }
        async with serving(good) as address:
            assert await call(address, good) == "SERVING"
            for who, tls in files.items():
                error = await call(address, tls)
                assert isinstance(error, PdserveError) and error.status == "UNAVAILABLE", f"{who}: {error}"
            nameless = unproven(monkeypatch, member(tmp_path / "d", AUTHORITY, name="web"))
            error = await call(address, nameless)
            assert isinstance(error, PdserveError)
            assert (error.status, error.reason) == ("UNAUTHENTICATED", "NOT_A_MEMBER")
            assert await call(address, good) == "SERVING"

    asyncio.run(main())


def test_servers_that_are_no_members_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        good = Tls(member(tmp_path / "good", AUTHORITY))
        servers = {
            "plain": None,
            "other authority": unproven(monkeypatch, member(tmp_path / "b", OTHER, trusts=AUTHORITY)),
            "expired": unproven(monkeypatch, member(tmp_path / "c", AUTHORITY, **EXPIRED)),
            "nameless": unproven(monkeypatch, member(tmp_path / "d", AUTHORITY, name="web")),
        }
        for who, tls in servers.items():
            async with serving(tls) as address:
                error = await call(address, good)
                assert isinstance(error, PdserveError) and error.status == "UNAVAILABLE", f"{who}: {error}"
                assert "andshake" in error.message or "erif" in error.message, f"{who}: {error.message}"

    asyncio.run(main())


def test_no_wildcard_stands_for_a_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither to gRPC nor on the data plane; for names with a dot it would, so those are refused (test_tls.py)."""

    def of(directory: str, shown: str) -> Tls:
        return unproven(monkeypatch, member(tmp_path / directory, AUTHORITY, name=shown))

    def says(client: Tls, server: Tls) -> str:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.settimeout(10)
        serving = server.accept(theirs)

        def shake() -> None:
            with suppress(OSError):
                serving.do_handshake()

        thread = threading.Thread(target=shake)
        thread.start()
        try:
            with client.connect(ours) as end:
                end.do_handshake()
            return "SERVING"
        except ssl.SSLCertVerificationError as e:
            return e.verify_message
        finally:
            thread.join(10)
            serving.close()

    async def main() -> None:
        good = of("good", "pdserve")
        async with serving(good) as address:
            assert await call(address, good) == "SERVING" == says(good, good)
        for i, wild in enumerate(("*", "*serve", "p*", "*.*", "*.", "*.pdserve")):
            liar = of(f"liar-{i}", wild)
            assert "ismatch" in says(good, liar), wild
            async with serving(liar) as address:
                error = await call(address, good)
                assert isinstance(error, PdserveError) and error.reason == "TLS_FAILED", f"{wild}: {error}"
            async with serving(good) as address:
                error = await call(address, liar)
                assert isinstance(error, PdserveError) and error.reason == "NOT_A_MEMBER", f"{wild}: {error}"

    asyncio.run(main())


def test_members_change_their_name_one_after_the_other(tmp_path: Path) -> None:
    """With certificates that have both names, whoever asks for the new one and whoever asks for the old one get on."""

    async def main() -> None:
        files = member(tmp_path, AUTHORITY, name="old.corp.example", also=["old", "pdserve"])
        ends = [Tls(files), Tls(replace(files, tls_peer_name="old"))]
        for server in ends:
            async with serving(server) as address:
                assert [await call(address, client) for client in ends] == ["SERVING", "SERVING"]

    asyncio.run(main())


def test_a_rotation_goes_without_a_restart_and_without_a_cut(tmp_path: Path) -> None:
    """From one authority to another, over a set that trusts both; the channel that is open goes on throughout."""

    async def main() -> None:
        files, peer = member(tmp_path / "server", AUTHORITY), member(tmp_path / "peer", AUTHORITY)
        server, client = Tls(files), Tls(peer)
        async with serving(server) as address, open_channel(address, max_message_bytes=LIMIT, tls=client) as old:
            assert await ask(old) == "SERVING"
            serials = [await asyncio.to_thread(serial, address, peer)]
            for directory in ("server", "peer"):
                (tmp_path / directory / "ca.crt").write_bytes(AUTHORITY.pem + OTHER.pem)
            assert await call(address, client) == "SERVING"
            for directory in ("server", "peer"):
                OTHER.issue(tmp_path / directory)
                assert await call(address, client) == "SERVING"
            serials.append(await asyncio.to_thread(serial, address, peer))
            for directory in ("server", "peer"):
                (tmp_path / directory / "ca.crt").write_bytes(OTHER.pem)
                assert await call(address, client) == "SERVING"
            assert serials[0] != serials[1]
            late = Tls(member(tmp_path / "late", AUTHORITY))
            assert isinstance(await call(address, late), PdserveError)
            assert await ask(old) == "SERVING"

    asyncio.run(main())


def test_a_handshake_has_more_time_than_the_first_pause_between_tries(tmp_path: Path) -> None:
    async def main() -> None:
        good = Tls(member(tmp_path, AUTHORITY))
        async with serving(good) as address, blackhole(address) as link:
            link.hold()
            asking = asyncio.create_task(call(link.address, good))
            await asyncio.wait([asking], timeout=0.5)
            link.let_go()
            assert await asking == "SERVING"

    asyncio.run(main())


def test_a_thousand_strangers_get_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "HANDSHAKE_TIMEOUT_S", 1.0)

    async def main() -> None:
        good = Tls(member(tmp_path / "good", AUTHORITY))
        async with serving(good) as address, open_channel(address, max_message_bytes=LIMIT, tls=good) as channel:
            assert await ask(channel) == "SERVING"
            host, port = address.split(":")
            hello, threads = client_hello(), threading.active_count()
            process = psutil.Process()
            before, opened = process.memory_info().rss, list[socket.socket]()
            speech = [b"", b"GET / HTTP/1.1\r\n\r\n" * 50, hello, hello[:40], b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]
            for i in range(1000):
                sock = socket.create_connection((host, int(port)), timeout=10)
                with suppress(ConnectionError):
                    sock.sendall(speech[i % len(speech)])
                opened.append(sock)
                if len(opened) > 300:
                    opened.pop(0).close()
                if i % 100 == 0:
                    assert await ask(channel) == "SERVING"
            assert await call(address, good) == "SERVING"
            assert threading.active_count() <= threads + 1
            assert process.memory_info().rss - before < 100 << 20
            for sock in opened[:5]:
                sock.close()

            def ended() -> bool:
                """The server has closed all: within its time for a handshake."""
                for sock in opened[5:]:
                    sock.setblocking(False)
                    try:
                        while sock.recv(4096):
                            pass
                    except BlockingIOError:
                        return False
                    except ConnectionError:
                        pass
                return True

            await eventually(ended, timeout_s=20)
            for sock in opened:
                sock.close()

    asyncio.run(main())
