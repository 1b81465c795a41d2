"""The tcp data plane under mutual TLS: the same promises, and strangers get nothing."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from pdserve.cli.authority import Authority
from pdserve.core.errors import ConfigError, TransferError
from pdserve.core.tls import Tls, TlsConfig
from pdserve.kvtransfer import acceptor, planes, wire
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.sockets import shut_down
from pdserve.kvtransfer.tcp import TcpPageSink, TcpPageSource
from pdserve.kvtransfer.transport import SourcePageRef
from tests.support.certificates import EXPIRED, client_hello, member, num_descriptors, unproven

from .test_tcp import NUM_PAGES, Pair, said_half
from .world import DIGEST, LAYOUT, eventually, fill, reason_of, refs, run

AUTHORITY, OTHER = Authority.new(), Authority.new("another authority")


@pytest.fixture
def files(tmp_path: Path) -> TlsConfig:
    return member(tmp_path / "member", AUTHORITY)


@asynccontextmanager
async def tls_pair(of_source: Tls | None, of_sink: Tls | None, idle_s: float = 5.0) -> AsyncIterator[Pair]:
    there, here = KvPool(LAYOUT, NUM_PAGES), KvPool(LAYOUT, NUM_PAGES)
    fill(there)
    source = TcpPageSource(there, DIGEST, tls=of_source)
    sink = TcpPageSink(here, DIGEST, idle_s=idle_s, tls=of_sink)
    try:
        yield Pair(source, sink, there, here, source.new_reader())
    finally:
        await sink.close()
        source.close()
        there.close()
        here.close()


def context_of(files: TlsConfig) -> ssl.SSLContext:
    """A client with a member's files, by hand."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(files.tls_ca_file)
    context.load_cert_chain(str(files.tls_cert_file), files.tls_key_file)
    return context


def reader(address: str, files: TlsConfig) -> ssl.SSLSocket:
    """A connection with its handshake done."""
    host, port = address.split(":")
    sock = socket.create_connection((host, int(port)), timeout=10)
    return context_of(files).wrap_socket(sock, server_hostname="pdserve")


def test_pages_arrive_whole_over_one_kept_connection(files: TlsConfig) -> None:
    async def body() -> None:
        tls = Tls(files)
        async with tls_pair(tls, tls) as p:
            assert not p.sink.capabilities.zero_copy and p.sink.capabilities.quiescent_cancel
            pages = p.refs(range(40))
            p.source.publish("t", p.token, pages)
            for at in range(0, 40, 10):
                await p.sink.pull(p.source.address, p.token, "t", pages[at : at + 10], range(at + 3, at + 13))
            assert all(p.here.page(i + 3) == p.there.page(i) for i in range(40))
            assert p.source.num_connections == 1
            await p.source.withdraw("t")
            assert await reason_of(p.sink.pull(p.source.address, p.token, "t", pages[:1], [0])) == "ERR_STALE"
            assert await reason_of(p.sink.pull(p.source.address, b"x" * 16, "t", pages[:1], [0])) == "PEER_GONE"
            p.source.drop_reader(p.token)
            assert await reason_of(p.sink.pull(p.source.address, p.token, "t", pages[:1], [0])) == "PEER_GONE"

    run(body())


def test_who_is_no_member_is_refused_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(directory: str, authority: Authority, **issue: object) -> Tls:
        return unproven(monkeypatch, member(tmp_path / directory, authority, **issue))  # type: ignore[arg-type]

    good, expired, nameless = of("good", AUTHORITY), of("old", AUTHORITY, **EXPIRED), of("web", AUTHORITY, name="web")
    foreign, liar = of("foreign", OTHER), of("liar", OTHER, trusts=AUTHORITY)
    cases: list[tuple[str, Tls | None, Tls | None, str]] = [
        ("plain sink", good, None, "ERR_TLS"),
        ("plain source", None, good, "TLS_FAILED"),
        ("sink of another authority", good, foreign, "TLS_UNTRUSTED"),
        ("source of another authority", foreign, good, "TLS_UNTRUSTED"),
        ("sink with a certificate of another authority", good, liar, "TLS_REFUSED"),
        ("source with a certificate of another authority", liar, good, "TLS_UNTRUSTED"),
        ("expired sink", good, expired, "TLS_REFUSED"),
        ("expired source", expired, good, "TLS_UNTRUSTED"),
        ("sink without the name", good, nameless, "ERR_TLS"),
        ("source without the name", nameless, good, "TLS_UNTRUSTED"),
    ]

    async def body() -> None:
        for who, of_source, of_sink, reason in cases:
            async with tls_pair(of_source, of_sink) as p:
                pages = p.refs(range(2))
                p.source.publish("t", p.token, pages)
                got = await reason_of(p.sink.pull(p.source.address, p.token, "t", pages, [0, 1]))
                assert got == reason, f"{who}: {got}"
                assert not any(p.here.buffer), who
                assert p.source.num_connections == 0, who
                await eventually(lambda p=p: p.source._acceptor.num_strangers == 0)  # type: ignore[misc]
                assert p.source.num_refused == 1, who

    run(body())


def test_a_rotation_changes_new_connections_only(tmp_path: Path) -> None:
    async def body() -> None:
        files, peer = member(tmp_path / "source", AUTHORITY), member(tmp_path / "sink", AUTHORITY)
        async with tls_pair(Tls(files), Tls(peer)) as p:
            pages = p.refs(range(2))
            p.source.publish("t", p.token, pages)
            await p.sink.pull(p.source.address, p.token, "t", pages, [0, 1])
            old = reader(p.source.address, peer)
            member(tmp_path / "source", OTHER)
            await p.sink.pull(p.source.address, p.token, "t", pages, [2, 3])  # over the kept connection
            assert p.source.num_connections == 1
            p.sink._take(p.source.address, p.token).close()  # type: ignore[union-attr]
            assert await reason_of(p.sink.pull(p.source.address, p.token, "t", pages, [4, 5])) == "TLS_UNTRUSTED"
            member(tmp_path / "sink", OTHER)
            await p.sink.pull(p.source.address, p.token, "t", pages, [4, 5])
            assert all(p.here.page(i) == p.there.page(i % 2) for i in range(6))
            old.sendall(wire.encode_hello(p.token, DIGEST) + wire.encode_get("t", pages[:1]))
            assert wire.decode_header(old.recv(64)) == wire.PageHeader(0, 1, pages[0].checksum, LAYOUT.page_bytes)
            old.close()

    run(body())


def speeches(files: TlsConfig, token: bytes) -> list[Callable[[str], socket.socket]]:
    """What strangers do first."""
    hello = client_hello()

    def says(words: bytes) -> Callable[[str], socket.socket]:
        def connect(address: str) -> socket.socket:
            host, port = address.split(":")
            sock = socket.create_connection((host, int(port)), timeout=10)
            with suppress(ConnectionError):
                sock.sendall(words)
            return sock

        return connect

    def shakes_hands(address: str) -> socket.socket:
        """The whole handshake with a certificate of another authority, and then asks at once."""
        host, port = address.split(":")
        context = context_of(files)
        sock = socket.create_connection((host, int(port)), timeout=10)
        try:
            end = context.wrap_socket(sock, server_hostname="pdserve")
            end.sendall(wire.encode_hello(token, DIGEST) + wire.encode_get("t", [SourcePageRef(0, 1, 0)]))
        except OSError:
            return sock
        return end

    return [
        says(b""),
        says(b"GET / HTTP/1.1\r\n\r\n" * 10),
        says(hello),
        says(hello[:50]),
        says(b"\x16\x03\x01" + bytes(600)),
        says(wire.encode_hello(token, DIGEST)),
        shakes_hands,
    ]


def test_a_thousand_strangers_get_no_thread_no_memory_and_no_page(
    tmp_path: Path, files: TlsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "HELLO_TIMEOUT_S", 0.5)
    liar = member(tmp_path / "liar", OTHER, trusts=AUTHORITY)
    wrapped: list[weakref.ref[ssl.SSLSocket]] = []

    class CountingTls(Tls):
        def accept(self, sock: socket.socket) -> ssl.SSLSocket:
            made = super().accept(sock)
            wrapped.append(weakref.ref(made))
            return made

    async def body() -> None:
        tls = CountingTls(files)
        async with tls_pair(tls, tls) as p:
            pages = p.refs(range(2))
            p.source.publish("t", p.token, pages)
            await p.sink.pull(p.source.address, p.token, "t", pages, [0, 1])
            threads, descriptors = threading.active_count(), num_descriptors()
            kinds, opened = speeches(liar, p.token), list[socket.socket]()
            for i in range(1000):
                opened.append(await asyncio.to_thread(kinds[i % len(kinds)], p.source.address))
                if len(opened) > 200:
                    opened.pop(0).close()
                if i % 200 == 0:
                    assert threading.active_count() <= threads + 5  # those of `to_thread`
                    assert p.source._acceptor.num_strangers <= acceptor.MAX_STRANGERS
                    open_ones = [s for made in [*wrapped] if (s := made()) is not None and s.fileno() >= 0]
                    assert len(open_ones) <= acceptor.MAX_STRANGERS + 5
                    monkeypatch.setattr(acceptor, "HELLO_TIMEOUT_S", 20.0)  # a member has its time
                    fresh = TcpPageSink(p.here, DIGEST, tls=tls)
                    await fresh.pull(p.source.address, p.token, "t", pages, [2, 3])
                    await fresh.close()
                    monkeypatch.setattr(acceptor, "HELLO_TIMEOUT_S", 0.5)
            for sock in opened:
                got = b""
                with suppress(OSError):
                    sock.settimeout(5)
                    while part := sock.recv(4096):
                        got += part
                assert bytes(p.there.page(0))[:64] not in got
                sock.close()
            await eventually(lambda: p.source._acceptor.num_strangers == 0)
            await eventually(lambda: p.source.num_connections == 1)
            assert num_descriptors() <= descriptors + 5
            assert p.source.num_refused >= 900

    run(body(), 60)


def test_members_are_not_pushed_out_by_strangers(files: TlsConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "HELLO_TIMEOUT_S", 20.0)

    async def body() -> None:
        tls = Tls(files)
        async with tls_pair(tls, tls) as p:
            pages = p.refs(range(1))
            p.source.publish("t", p.token, pages)
            with reader(p.source.address, files) as slow:  # a member that is slow to say hello
                await eventually(lambda: p.source._acceptor.num_strangers == 1)
                host, port = p.source.address.split(":")
                crowd = [
                    socket.create_connection((host, int(port)), timeout=10) for _ in range(2 * acceptor.MAX_STRANGERS)
                ]
                slow.sendall(wire.encode_hello(p.token, DIGEST) + wire.encode_get("t", pages))
                assert await asyncio.to_thread(slow.recv, 64) != b""
                for sock in crowd:
                    sock.close()

    run(body())


# As HALF_SOURCE of test_tcp, under TLS: one whole page and half of the next, then waits for a line, and sends the rest.
HALF_TLS_SOURCE = """
import socket, ssl, sys
from pdserve.kvtransfer import wire
page_bytes, cert, key, ca = int(sys.argv[1]), *sys.argv[2:]
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(cert, key)
context.load_verify_locations(ca)
context.verify_mode = ssl.CERT_REQUIRED
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
sock = context.wrap_socket(listener.accept()[0], server_side=True)
def read(n):
    data = b""
    while len(data) < n:
        data += sock.recv(n - len(data))
    return data
read(64)
get = wire.decode_header(read(64))
_, asks = wire.decode_get_body(get, read(get.body_bytes))
body = bytes([0xAA]) * page_bytes
headers = [wire.encode_page(wire.PageHeader(page_id, generation, 0, page_bytes)) for page_id, generation in asks]
sock.sendall(headers[0] + body + headers[1] + body[: page_bytes // 2])
print("half", flush=True)
sys.stdin.readline()
try:
    sock.sendall(body[page_bytes // 2 :])
    for header in headers[2:]:
        sock.sendall(header + body)
except OSError:
    pass
"""


@contextmanager
def half_tls_source(files: TlsConfig) -> Iterator[tuple[subprocess.Popen[str], str]]:
    words = [str(LAYOUT.page_bytes), str(files.tls_cert_file), str(files.tls_key_file), str(files.tls_ca_file)]
    command = [sys.executable, "-c", HALF_TLS_SOURCE, *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, f"127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


def test_a_cancelled_pull_never_writes_again_though_the_peer_goes_on(files: TlsConfig) -> None:
    async def body() -> None:
        tls = Tls(files)
        async with tls_pair(tls, tls, idle_s=20) as p:
            with half_tls_source(files) as (process, address):
                ask = [SourcePageRef(i, 1, 0) for i in range(32)]
                pull = asyncio.create_task(p.sink.pull(address, p.token, "t", ask, range(32)))
                await said_half(process)
                await eventually(lambda: p.here.page(1)[0] == 0xAA)  # the thread waits within the second page
                pull.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await pull
                p.here.buffer[:] = b"\x55" * len(p.here.buffer)  # freed: somebody else's now
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
                await asyncio.to_thread(process.wait, 10)
                assert p.here.buffer == b"\x55" * len(p.here.buffer)

    run(body())


def test_what_came_encrypted_is_never_read_as_it_came(files: TlsConfig) -> None:
    """The trap of `SSLSocket.shutdown`: the thread of a socket that it ended would read on, without decrypting."""

    async def body() -> None:
        tls = Tls(files)
        async with tls_pair(tls, tls, idle_s=20):
            ours, theirs = socket.socketpair()
            ours.settimeout(10)
            serving = tls.accept(theirs)
            thread = threading.Thread(target=lambda: (serving.do_handshake(), serving.sendall(b"secret" * 100)))
            thread.start()
            with tls.connect(ours) as end:
                end.do_handshake()
                thread.join(10)
                shut_down(end)
                into = bytearray(4096)
                with suppress(OSError):
                    n = end.recv_into(into)
                    assert bytes(into[:n]) in b"secret" * 100
            serving.close()

    run(body())


def test_a_pull_is_cancelled_within_its_handshake(files: TlsConfig) -> None:
    async def body() -> None:
        tls = Tls(files)
        async with tls_pair(tls, tls, idle_s=3600) as p:
            with socket.create_server(("127.0.0.1", 0)) as mute:
                address = f"127.0.0.1:{mute.getsockname()[1]}"
                pull = asyncio.create_task(p.sink.pull(address, p.token, "t", [SourcePageRef(0, 1, 0)], [0]))
                sock, _ = await asyncio.to_thread(mute.accept)
                assert await asyncio.to_thread(sock.recv, 1) == b"\x16"
                pull.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asyncio.wait_for(pull, 10)
                sock.close()

    run(body())


def test_withdraw_ends_a_read_whose_reader_stalls(files: TlsConfig) -> None:
    async def body() -> None:
        pool = KvPool(LAYOUT, NUM_PAGES)
        source = TcpPageSource(pool, DIGEST, send_idle_s=3600, tls=Tls(files))
        token, ask = source.new_reader(), refs(pool, range(NUM_PAGES)) * 8  # more than any buffer holds
        source.publish("t", token, ask)
        with reader(source.address, files) as slow:
            slow.sendall(wire.encode_hello(token, DIGEST) + wire.encode_get("t", ask))
            assert len(await asyncio.to_thread(slow.recv, 64)) > 0  # the read is in flight, and we take no more of it
            await asyncio.wait_for(source.withdraw("t"), 10)
        await asyncio.to_thread(source.close)
        pool.close()

    run(body())


def test_a_corrupt_record_is_no_page(files: TlsConfig) -> None:
    """What a man in the middle changed is an error of TLS, before any checksum."""

    async def body() -> None:
        tls = Tls(files)
        async with tls_pair(tls, tls) as p:
            pages = p.refs(range(4))
            p.source.publish("t", p.token, pages)
            with flipping_proxy(p.source.address, at=100_000) as address, pytest.raises(TransferError) as e:
                await p.sink.pull(address, p.token, "t", pages, range(4))
            assert e.value.reason == "TLS_REFUSED", e.value
            assert not any(p.here.page(3))

    run(body())


@contextmanager
def flipping_proxy(address: str, at: int) -> Iterator[str]:
    """Passes one connection on; of what the server says, bit 0 of one byte is turned."""
    host, port = address.split(":")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def copy(source: socket.socket, target: socket.socket, flip: int) -> None:
            seen = 0
            with suppress(OSError):
                while data := bytearray(source.recv(65536)):
                    if seen <= flip < seen + len(data):
                        data[flip - seen] ^= 1
                    seen += len(data)
                    target.sendall(data)
            with suppress(OSError):
                target.shutdown(socket.SHUT_WR)

        def serve() -> None:
            here, _ = listener.accept()
            with here, socket.create_connection((host, int(port)), timeout=10) as there:
                up = threading.Thread(target=copy, args=(here, there, -1))
                up.start()
                copy(there, here, at)
                here.close()
                up.join(10)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join(10)


def test_where_tls_is_required_no_plane_may_leave_the_host_in_the_clear(files: TlsConfig) -> None:
    required = Tls(replace(files, require_tls=True))
    for tls in (None, Tls(files)):
        planes.check_encryption(("shm", "tcp", "nixl"), tls)
    planes.check_encryption(("shm", "tcp"), required)
    with pytest.raises(ConfigError, match=r"--require-tls: nixl, mooncake .* --kv-transfer-config"):
        planes.check_encryption(("nixl", "tcp", "mooncake"), required)


def test_handshakes_that_are_broken_anywhere_break_nothing_else(
    files: TlsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits of a client's first flight are turned, it comes in two parts, or ends early."""
    monkeypatch.setattr(acceptor, "HELLO_TIMEOUT_S", 0.2)
    rng, hello = random.Random(5), client_hello()

    async def body() -> None:
        tls = Tls(files)
        async with tls_pair(tls, tls) as p:
            host, port = p.source.address.split(":")
            for _ in range(300):
                words = bytearray(hello)
                for _ in range(rng.randint(0, 4)):
                    words[rng.randrange(1, len(words))] ^= 1 << rng.randrange(8)
                cut = rng.randrange(len(words) + 1)
                with socket.create_connection((host, int(port)), timeout=10) as sock, suppress(ConnectionError):
                    sock.sendall(words[:cut])
                    if rng.random() < 0.7:
                        sock.sendall(words[cut:])
            await eventually(lambda: p.source._acceptor.num_strangers == 0)
            monkeypatch.setattr(acceptor, "HELLO_TIMEOUT_S", 20.0)
            pages = p.refs(range(2))
            p.source.publish("t", p.token, pages)
            await p.sink.pull(p.source.address, p.token, "t", pages, [0, 1])
            assert p.here.page(1) == p.there.page(1)

    run(body())


def test_who_speaks_a_byte_at_a_time_is_gone_in_time(files: TlsConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "HELLO_TIMEOUT_S", 0.1)

    async def body() -> None:
        async with tls_pair(Tls(files), None) as p:
            host, port = p.source.address.split(":")
            for num_refused, words in enumerate((client_hello(), wire.encode_hello(p.token, DIGEST))):
                with socket.create_connection((host, int(port)), timeout=10) as sock:
                    left = iter(words[:-1])  # never the last one

                    def gone(num: int = num_refused, sock: socket.socket = sock, left: Iterator[int] = left) -> bool:
                        with suppress(ConnectionError):
                            sock.sendall(bytes([*islice(left, 1)]))
                        return p.source.num_refused > num

                    await eventually(gone)

    run(body())
