"""The life of a worker process, seen from outside: real processes, signals, health, Redis."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.cli.authority import Authority
from pdserve.core.clock import MonotonicClock
from pdserve.core.errors import PdserveError
from pdserve.core.grpc_server import open_channel
from pdserve.core.redis_client import open_redis
from pdserve.core.registry import DRAINING, READY, Registry
from pdserve.core.session import SERVICE_NAME
from pdserve.core.tls import load_tls
from pdserve.v1 import worker_pb2
from tests.support.certificates import flags as tls_flags
from tests.support.certificates import member
from tests.support.redis_server import free_port, redis_server
from tests.support.waiting import eventually
from tests.support.worker_client import fence, router_session

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60
PATIENT = ("--router-timeout-s", "60")  # the routers of these tests say nothing for a while
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with redis_server() as url:
        yield url


@contextmanager
def process(redis_url: str, *flags: str, loads: str = "loads") -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.support.obedient_worker", loads, redis_url, *PATIENT, *flags]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PDSERVE_")}
    child = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.communicate(timeout=DEADLINE_S)


@contextmanager
def ready_process(redis_url: str, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with process(redis_url, *flags) as child:
        line = child.stdout.readline()
        found = re.fullmatch(r"READY prefill grpc=(\S+) metrics=(\S+) data=127\.0\.0\.1:9\n", line)
        assert found, f"{line!r} {child.stderr.read() if not line else ''}"
        yield child, found[1]


async def ended(child: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = await asyncio.to_thread(child.communicate, timeout=DEADLINE_S)
    return child.returncode, errors


@asynccontextmanager
async def health_of(address: str):
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def ask(service: str):
            request = health_pb2.HealthCheckRequest(service=service)
            return (await stub.Check(request, timeout=DEADLINE_S, wait_for_ready=True)).status

        yield ask


async def records(redis_url: str, cluster: str):
    client = open_redis(redis_url)
    try:
        return await Registry(client, cluster, MonotonicClock()).workers()
    finally:
        await client.aclose()


async def order(router, word: str, attempt: int = 1) -> worker_pb2.SequenceOutput:
    await router.send(submit=worker_pb2.Submit(fence=fence(word, attempt)))
    return (await router.receive("step_outputs")).outputs[0]


def test_a_whole_life(redis_url):
    async def main():
        flags = ("--cluster", "life", "--worker-id", "w1", "--metrics-port", "0")
        with ready_process(redis_url, *flags) as (child, address):
            async with health_of(address) as health, router_session(address) as router:
                assert (await health(""), await health(SERVICE_NAME)) == (SERVING, SERVING)
                (record,) = await records(redis_url, "life")
                assert (record.worker_id, record.address, record.state) == ("w1", address, READY)
                assert (record.identity_digest, record.data_address) == ("01", "127.0.0.1:9")
                await order(router, "busy")
                child.send_signal(signal.SIGTERM)
                while not (await router.receive("heartbeat")).draining:
                    pass
                assert (await health(""), await health(SERVICE_NAME)) == (SERVING, NOT_SERVING)
                assert (await order(router, "late")).failed.reason == "DRAINING"

                async def draining() -> bool:
                    return (await records(redis_url, "life"))[0].state == DRAINING

                await eventually(draining)
                await router.send(abort=worker_pb2.Abort(fence=fence("busy")))
                assert await router.receive("aborted")  # a running sequence goes on while draining
                while not (await router.receive("heartbeat")).leaving:
                    pass
                await router.close()
                with pytest.raises(PdserveError) as raised:
                    await router.receive("step_outputs")
                assert raised.value.reason == "WORKER_STOPPED"
            assert (await ended(child))[0] == 0
            assert await records(redis_url, "life") == ()

    asyncio.run(main())


def test_the_metrics_endpoint_is_on_the_ready_line(redis_url):
    with process(redis_url, "--cluster", "metrics", "--metrics-port", "0") as child:
        address = re.search(r"metrics=(\S+)", child.stdout.readline())[1]
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
            assert "pdserve_worker_info{" in response.read().decode()


def test_a_second_signal_ends_a_drain_and_a_short_grace_too(redis_url):
    async def main(grace_s: str, signals: int, status: int):
        with ready_process(redis_url, "--cluster", "second", "--drain-grace-s", grace_s) as (child, address):
            async with router_session(address) as router:
                await order(router, "busy")
                child.send_signal(signal.SIGINT)
                if signals == 2:
                    while not (await router.receive("heartbeat")).draining:
                        pass
                    child.send_signal(signal.SIGINT)
                code, errors = await ended(child)
                assert (code, "drain cut short" in errors) == (status, True)
            assert await records(redis_url, "second") == ()

    asyncio.run(main("3600", 2, 1))
    asyncio.run(main("0.1", 1, 0))


def test_liveness_follows_the_engine(redis_url):
    async def main():
        with ready_process(redis_url, "--cluster", "sick") as (_, address):
            async with health_of(address) as health, router_session(address) as router:
                for word, status in (("sick", NOT_SERVING), ("well", SERVING)):
                    await order(router, word)

                    async def live(wanted: int = status) -> bool:
                        return await health("") == wanted

                    await eventually(live)

    asyncio.run(main())


def test_a_worker_that_is_not_ready_takes_nothing_new_until_it_is(redis_url):
    async def main():
        with ready_process(redis_url, "--cluster", "full") as (_, address):
            async with health_of(address) as health, router_session(address) as router:
                await order(router, "full")
                while not (await router.receive("heartbeat")).draining:
                    pass
                assert (await order(router, "late")).failed.reason == "DRAINING"
                assert await health("") == SERVING
                await eventually(lambda: _is(health, NOT_SERVING))
                await router.send(abort=worker_pb2.Abort(fence=fence("full")))
                while (await router.receive("heartbeat")).draining:
                    pass
                assert not (await order(router, "next")).HasField("failed")
                await eventually(lambda: _is(health, SERVING))

    asyncio.run(main())


async def _is(health, status: int) -> bool:
    return await health(SERVICE_NAME) == status


def test_a_dead_engine_ends_the_process(redis_url):
    async def main():
        with ready_process(redis_url, "--cluster", "dead") as (child, address):
            async with router_session(address) as router:
                await order(router, "die")
                with pytest.raises(PdserveError):
                    await router.receive("step_outputs")
            code, errors = await ended(child)
            assert (code, "the engine died" in errors) == (1, True)
            assert await records(redis_url, "dead") == ()

    asyncio.run(main())


@pytest.mark.slow
def test_a_thread_that_never_ends_does_not_keep_the_process(redis_url):
    async def main():
        with ready_process(redis_url, "--cluster", "stuck") as (child, address):
            async with router_session(address) as router:
                await order(router, "stuck")
                child.send_signal(signal.SIGTERM)
                assert (await ended(child))[0] == 1

    asyncio.run(main())


@pytest.mark.parametrize("loads", ["hangs", "blocks"])
def test_while_loading_it_lives_but_is_not_ready(redis_url, loads):
    async def main():
        port = free_port()
        with process(redis_url, "--cluster", "loading", "--port", str(port), loads=loads) as child:
            async with health_of(f"127.0.0.1:{port}") as health:
                assert (await health(""), await health(SERVICE_NAME)) == (SERVING, NOT_SERVING)
            async with router_session(f"127.0.0.1:{port}") as router:
                with pytest.raises(PdserveError) as raised:
                    await router.receive()
                assert raised.value.reason == "LOADING"
            assert await records(redis_url, "loading") == ()
            child.send_signal(signal.SIGTERM)
            assert (await ended(child))[0] == 0

    asyncio.run(main())


def test_what_cannot_start_says_why_in_one_line(redis_url):
    with ready_process(redis_url, "--cluster", "first") as (_, address):
        port = address.rpartition(":")[2]
        cases = [
            ((redis_url, "--port", port), "loads", rf"pdserve prefill: port {port} is in use; .*--port"),
            ((redis_url, "--metrics-port", port), "loads", rf"port {port} is in use; .*--metrics-port"),
            ((f"redis://127.0.0.1:{free_port()}/0",), "loads", "no Redis at .*--redis-url"),
            ((redis_url,), "fails", "--model is wrong"),
        ]
        with ExitStack() as stack:
            children = [stack.enter_context(process(*flags, loads=loads)) for flags, loads, _ in cases]
            for child, (_, _, message) in zip(children, cases, strict=True):
                out, errors = child.communicate(timeout=DEADLINE_S)
                assert (child.returncode, out) == (2, "")
                assert re.search(message, errors)
                assert errors.count("\n") == 1


def test_under_tls_a_port_of_its_own_answers_health_and_nothing_else(redis_url, tmp_path):
    async def main():
        files, port = member(tmp_path, Authority.new()), free_port()
        words = ("--cluster", "tls", "--health-port", str(port), "--require-tls", *tls_flags(files))
        with ready_process(redis_url, *words) as (child, address):
            async with health_of(f"127.0.0.1:{port}") as health:
                assert (await health(""), await health(SERVICE_NAME)) == (SERVING, SERVING)
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    async with router_session(f"127.0.0.1:{port}", hello=False) as router:
                        await router._call.read()
                assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
                request = health_pb2.HealthCheckRequest()
                async with grpc.aio.insecure_channel(address) as channel:
                    with pytest.raises(grpc.aio.AioRpcError):
                        await health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
                async with open_channel(address, max_message_bytes=1 << 20, tls=load_tls(files)) as channel:
                    assert (await health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)).status == SERVING
            child.send_signal(signal.SIGTERM)
            assert (await ended(child))[0] == 0
        with process(redis_url, "--health-port", str(port), "--port", str(port)) as child:
            code, errors = await ended(child)
            assert code == 2 and "--health-port" in errors

    asyncio.run(main())
