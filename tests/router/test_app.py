"""The router's process: how it starts, what it refuses to start with, how it ends."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.core.errors import ConfigError
from pdserve.router.__main__ import main
from pdserve.router.app import RouterApp, load_tokenizer
from pdserve.router.config import DEFAULT_PORT, RouterConfig, RouterServiceConfig
from pdserve.router.service import SERVICE_NAME
from pdserve.v1 import inference_pb2, inference_pb2_grpc
from tests.support.redis_server import redis_server

DEADLINE_S = 20.0


def test_ready_line_health_and_drain() -> None:
    async def life(url: str) -> None:
        lines: asyncio.Queue[str] = asyncio.Queue()
        app = RouterApp(
            RouterServiceConfig(port=0, redis_url=url, metrics_port=0),
            RouterConfig(model="fake", served_model_name="m", no_worker_timeout_s=0.05),
            announce=lines.put_nowait,
        )
        running = asyncio.create_task(app.run())
        line = await lines.get()
        assert line.startswith("READY router grpc=127.0.0.1:")
        async with grpc.aio.insecure_channel(line.split("grpc=")[1].split()[0]) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            live = await health.Check(health_pb2.HealthCheckRequest())
            ready = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
            assert live.status == health_pb2.HealthCheckResponse.SERVING
            assert ready.status == health_pb2.HealthCheckResponse.NOT_SERVING, "no worker yet"
            stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
            (model,) = (await stub.ListModels(inference_pb2.ListModelsRequest())).models
            assert (model.name, model.ready) == ("m", False)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await running == 0

    async def bounded(url: str) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await life(url)

    with redis_server() as url:
        asyncio.run(bounded(url))


def test_default_port_is_the_known_one() -> None:
    assert RouterServiceConfig().port == DEFAULT_PORT


def test_a_worker_is_given_time_for_two_signs_of_life(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "fake", "--heartbeat-s", "3"]) == 2
    assert "--worker-timeout-s" in capsys.readouterr().err


def test_starts_not_without_a_store(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "fake", "--port", "0", "--redis-url", "redis://127.0.0.1:1/0"]) == 2
    err = capsys.readouterr().err.strip().splitlines()[-1]
    assert err.startswith("pdserve router: ")
    assert "127.0.0.1:1" in err


def test_missing_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="pdserve fetch-model --model org/some-model"):
        load_tokenizer("org/some-model")
    (tmp_path / "models" / "some-model").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer("org/some-model")
