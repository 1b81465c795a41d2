"""Redis away: running streams go on, new requests are refused with a reason, recovery needs no restart."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import redis

from pdserve.client import Client
from pdserve.client.errors import Unavailable
from tests.support.deployment import Deployment, wait_until
from tests.support.redis_server import RedisServer, redis_process

from .streams import BackgroundStream, wait_begun

FLAGS = ["--max-num-batched-tokens", "64", "--max-num-seqs", "16", "--num-pages", "512", "--fake-step-ms", "10"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployment, RedisServer]]:
    with redis_process() as store:
        deployment = Deployment(tmp_path_factory.mktemp("store"), store.url, "fake", FLAGS)
        try:
            for worker in ("prefill-0", "decode-0"):
                deployment.start_worker(worker)
            deployment.start_router()
            deployment.wait_ready()
            yield deployment, store
        finally:
            deployment.stop()


def running(client: Client) -> list[BackgroundStream]:
    streams = [BackgroundStream(client, 100, 400, seed) for seed in range(4)]
    wait_begun(streams)
    return streams


def is_refused(client: Client) -> bool:
    error = BackgroundStream(client, 10, 2).end()
    assert error is None or (isinstance(error, Unavailable) and error.reason == "STORE_UNAVAILABLE"), error
    return error is not None


@pytest.mark.parametrize("how", ["killed", "stopped", "full"])
def test_store_away_under_load(world: tuple[Deployment, RedisServer], how: str) -> None:
    deployment, store = world
    with deployment.client() as client, redis.Redis.from_url(store.url) as admin:
        streams = running(client)
        if how == "killed":
            store.stop()
        elif how == "stopped":
            store.process.send_signal(signal.SIGSTOP)
        else:
            admin.config_set("maxmemory", "1")
        assert is_refused(client)
        assert [stream.end() for stream in streams] == [None] * 4
        if how == "killed":
            store.start()
        elif how == "stopped":
            store.process.send_signal(signal.SIGCONT)
        else:
            admin.config_set("maxmemory", "0")
        wait_until(lambda: not is_refused(client), 20, "new requests to be taken again")


def test_flushed_store(world: tuple[Deployment, RedisServer]) -> None:
    """Records and registry are gone: what runs goes on, the workers come back into the registry by themselves."""
    deployment, store = world
    with deployment.client() as client, redis.Redis.from_url(store.url) as admin:
        streams = running(client)
        admin.flushall()
        assert not is_refused(client)
        assert [stream.end() for stream in streams] == [None] * 4
        wait_until(lambda: admin.hlen("{pdserve:default}:workers") == 2, 20, "both workers to register again")
        for worker in ("prefill-0", "decode-0"):
            wait_until(lambda worker=worker: deployment.all_pages_free(worker), 20, f"{worker} to free every page")
