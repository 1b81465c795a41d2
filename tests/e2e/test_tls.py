"""Mutual TLS on every connection between router and workers, over real processes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.cli.authority import Authority
from pdserve.cli.processes import service_command
from pdserve.client import Client
from pdserve.core.tls import TlsConfig
from pdserve.engine.fake import expected_tokens
from tests.e2e.test_fake_path import ENGINE_FLAGS, assert_all_free, prompt_of
from tests.support.certificates import client_hello, flags, member
from tests.support.deployment import Deployment, deploy, wait_until

TCP_ONLY = ["--kv-transfer-config", '{"transports": ["tcp"]}']


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TlsConfig:
    return member(tmp_path_factory.mktemp("tls"), Authority.new())


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, files: TlsConfig) -> Iterator[Deployment]:
    common = [*flags(files), "--require-tls"]
    engine = [*ENGINE_FLAGS, *TCP_ONLY]  # on one host pages would not travel otherwise
    with deploy(
        tmp_path_factory.mktemp("pd"), "fake", ("prefill-0", "decode-0"), engine, common_flags=common
    ) as running:
        yield running


def answers(client: Client, length: int, seed: int = 0) -> None:
    prompt = prompt_of(length, seed)
    result = client.generate(prompt_token_ids=prompt, max_tokens=20, temperature=0, timeout_s=60)
    assert list(result.token_ids) == expected_tokens(prompt, 20)
    assert result.timings.transfer_bytes > 0


def test_requests_are_served(secured: Deployment) -> None:
    with secured.client() as client:
        for length in (1, 17, 500, 5000):
            answers(client, length)
    assert_all_free(secured)


def test_strangers_get_nothing_and_disturb_nobody(secured: Deployment, files: TlsConfig) -> None:
    child = secured.children["prefill-0"]
    process, endpoints = psutil.Process(child.pid), [child.endpoints["grpc"], child.endpoints["data"]]
    with grpc.insecure_channel(endpoints[0]) as channel, pytest.raises(grpc.RpcError) as refused:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    threads, memory, opened = process.num_threads(), process.memory_info().rss, list[socket.socket]()
    speech = [b"", client_hello(), b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(200)]
    with secured.client() as client:
        for i in range(1000):
            host, port = endpoints[i % 2].split(":")
            sock = socket.create_connection((host, int(port)), timeout=10)
            with suppress(ConnectionError):
                sock.sendall(speech[i // 2 % len(speech)])
            opened.append(sock)
            if len(opened) > 300:
                opened.pop(0).close()
            if i % 100 == 0:
                answers(client, 100, seed=i)
    assert process.num_threads() <= threads + 8
    assert process.memory_info().rss - memory < 100 << 20
    for sock in opened:
        sock.close()
    assert_all_free(secured)


def test_a_worker_without_a_common_data_plane_is_told_so_and_gets_no_requests(secured: Deployment) -> None:
    secured.start_worker("decode-shm", "--kv-transfer-config", '{"transports": ["shm"]}').wait_ready(60)
    with secured.client() as client:

        def states() -> dict[str, str]:
            return {w.worker_id: w.state for m in client.models() for w in m.workers}

        wait_until(lambda: states().get("decode-shm", "connecting") != "connecting", 20, "the router to know it")
        told = "no common data plane: this worker has shm, prefill-0 has tcp (--kv-transfer-config)"
        assert states() == {"prefill-0": "ready", "decode-0": "ready", "decode-shm": f"incompatible: {told}"}
        for seed in range(4):
            answers(client, 50, seed)
    child = secured.children["decode-shm"]
    child.terminate()
    assert child.wait(20)


def test_certificates_change_while_it_runs(secured: Deployment, files: TlsConfig) -> None:
    """New authority, new certificates: sessions go on; what starts later finds the others, over new connections."""
    directory, other = Path(str(files.tls_ca_file)).parent, Authority.new("the next authority")
    both = (directory / "ca.crt").read_bytes() + other.pem
    with secured.client() as client:
        answers(client, 50, seed=1)
        (directory / "ca.crt").write_bytes(both)
        other.issue(directory)
        answers(client, 50, seed=2)
        (directory / "ca.crt").write_bytes(other.pem)
        answers(client, 50, seed=3)
        secured.start_worker("decode-1").wait_ready(60)

        def ready() -> set[str]:
            return {w.worker_id for m in client.models() for w in m.workers if w.state == "ready"}

        wait_until(lambda: "decode-1" in ready(), 20, "the new worker")
        secured.kill("decode-0")
        wait_until(lambda: ready() == {"prefill-0", "decode-1"}, 20, "the old worker to be gone")
        answers(client, 50, seed=4)


def test_a_plain_worker_is_not_used(secured: Deployment, tmp_path: Path) -> None:
    common = [word for word in secured._common if word not in ("--require-tls",)]
    plain = common[: common.index("--tls-cert-file")]
    argv = service_command("decode", *plain, "--worker-id", "decode-plain", "--runner", "fake", *ENGINE_FLAGS)
    child = secured._start("decode-plain", argv)
    child.wait_ready(60)
    with secured.client() as client:

        def state() -> str:
            return next((w.state for m in client.models() for w in m.workers if w.worker_id == "decode-plain"), "")

        wait_until(lambda: state().startswith("connecting: TLS_FAILED: "), 20, "the reason to be shown")
        assert any("cannot connect to decode worker decode-plain" in w for w in secured.children["router"].warnings())
    child.terminate()
    assert child.wait(20)
