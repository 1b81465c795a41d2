"""A process that stands still and goes on later: no wrong token, no leak, and a zombie's late words change nothing."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pdserve.client import Client
from pdserve.client.errors import Unavailable
from tests.support.deployment import Deployment, deploy, wait_until

from .planes import PARAMS, plane_flags
from .streams import BackgroundStream, wait_begun

FLAGS = ["--max-num-batched-tokens", "64", "--max-num-seqs", "16", "--num-pages", "1024", "--fake-step-ms", "20"]
TIMEOUTS = ["--router-timeout-s", "3"]
ROUTER_TIMEOUTS = ["--worker-timeout-s", "3", "--heartbeat-s", "0.3"]
SLOW_PREFILL = {"prefill-0": ["--fake-step-ms", "100"]}  # long enough to be stopped in it


@pytest.fixture(scope="module", params=PARAMS)
def deployment(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Deployment]:
    flags = [*FLAGS, *TIMEOUTS, *plane_flags(request.param)]
    directory = tmp_path_factory.mktemp("stop")
    with deploy(directory, "fake", flags=flags, router_flags=ROUTER_TIMEOUTS, worker_flags=SLOW_PREFILL) as d:
        yield d


@contextmanager
def stopped(deployment: Deployment, name: str) -> Iterator[None]:
    deployment.children[name].send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        deployment.children[name].send_signal(signal.SIGCONT)


def prefilling(client: Client, deployment: Deployment) -> list[BackgroundStream]:
    streams = [BackgroundStream(client, 2000, 4, seed) for seed in range(3)]
    running = "pdserve_engine_sequences_running"
    wait_until(lambda: deployment.metric("prefill-0", running) > 0, 20, "a prefill to run")
    return streams


def decoding(client: Client, deployment: Deployment, num_tokens: int = 2000) -> list[BackgroundStream]:
    streams = [BackgroundStream(client, 40, num_tokens, seed) for seed in range(3)]
    wait_begun(streams, 4)
    return streams


def assert_well(deployment: Deployment, client: Client) -> None:
    wait_until(lambda: any(m.ready for m in client.models()), 20, "the router to have a route")
    assert BackgroundStream(client, 100, 10).end() is None
    for worker in ("prefill-0", "decode-0"):
        wait_until(lambda worker=worker: deployment.all_pages_free(worker), 20, f"{worker} to free every page")


@pytest.mark.parametrize("phase", [prefilling, decoding])
def test_stopped_beyond_the_time_out(deployment: Deployment, phase: object) -> None:
    victim = "prefill-0" if phase is prefilling else "decode-0"
    with deployment.client() as client:
        streams = phase(client, deployment)  # type: ignore[operator]
        with stopped(deployment, victim):
            errors = [stream.end() for stream in streams]  # they end while it still stands
        for error in errors:
            assert isinstance(error, Unavailable) and victim in error.message, error
        assert_well(deployment, client)


def test_decode_stopped_while_it_pulls(deployment: Deployment) -> None:
    """The router gives the requests up; prefill frees and reuses the pages that decode was reading."""
    with deployment.client() as client:
        streams = prefilling(client, deployment)
        with stopped(deployment, "decode-0"):
            for stream in streams:
                stream.end()
        assert_well(deployment, client)


def test_prefill_stopped_during_decodes_harms_nobody(deployment: Deployment) -> None:
    with deployment.client() as client:
        streams = decoding(client, deployment, 250)
        with stopped(deployment, "prefill-0"):
            assert [stream.end() for stream in streams] == [None] * 3
        assert_well(deployment, client)


def test_stopped_router_loses_its_sequences(deployment: Deployment) -> None:
    with deployment.client() as client:
        streams = decoding(client, deployment)
        with stopped(deployment, "router"):
            for worker in ("prefill-0", "decode-0"):
                wait_until(lambda worker=worker: deployment.all_pages_free(worker), 20, f"{worker} to free its pages")
        for stream in streams:
            assert isinstance(stream.end(), Unavailable)
        assert_well(deployment, client)


def test_killed_router(deployment: Deployment) -> None:
    with deployment.client() as client:
        streams = [BackgroundStream(client, 40 if i % 2 else 800, 400, i) for i in range(30)]
        wait_until(lambda: any(stream.tokens for stream in streams), 20, "a first token")
        deployment.kill("router")
        for stream in streams:
            assert isinstance(stream.end(), Unavailable)
        for worker in ("prefill-0", "decode-0"):
            wait_until(lambda worker=worker: deployment.all_pages_free(worker), 20, f"{worker} to free its pages")
    deployment.start_router()
    deployment.wait_ready()
    with deployment.client() as client:
        assert_well(deployment, client)
