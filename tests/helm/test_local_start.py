"""The command lines of the rendered chart, started as local processes: they become ready, and they serve."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.cli.processes import Child, service_command, stop_all
from pdserve.client import Client
from tests.helm.chart import SERVICES, VALUES, Document, environment, pod_specs, render
from tests.support.deployment import wait_until
from tests.support.redis_server import free_port, redis_server

READY_TIMEOUT_S = 60.0
HOST = "127.0.0.1"
FAKE_MODEL = ("--set", "model.name=fake,model.servedName=test-model")


@contextmanager
def _started(directory: Path, values: Path | None, redis_url: str) -> Iterator[dict[str, tuple[Child, Document]]]:
    """One process per service of the chart: its own words, with loopback addresses and the fake model behind them."""
    started: dict[str, tuple[Child, Document]] = {}
    try:
        for component, spec in pod_specs(render(values, *FAKE_MODEL)):
            if component in SERVICES:
                container = spec["containers"][0]
                started[component] = _start(directory, component, container, redis_url), container
        for child, _ in started.values():
            child.wait_ready(READY_TIMEOUT_S)
        yield started
    finally:
        stop_all([[child for child, _ in started.values()]], 20.0)


def _start(directory: Path, component: str, container: Document, redis_url: str) -> Child:
    fields = {"status.podIP": HOST, "metadata.name": f"{component}-0"}
    environ = environment(container, fields)
    ports = {port["name"]: (port["containerPort"], free_port()) for port in container["ports"]}
    for fixed, free in ports.values():  # pods have an address each; here they share one, so ports must differ
        environ = {name: value.replace(f"{HOST}:{fixed}", f"{HOST}:{free}") for name, value in environ.items()}
    environ |= {"PDSERVE_REDIS_URL": redis_url, "PDSERVE_CACHE": str(directory), "HOME": str(directory)}
    environ.pop("PDSERVE_OTLP_TRACES_ENDPOINT", None)
    words = [word for word in container["args"] if not word.startswith("--otlp-traces-endpoint=")]
    words += [f"--host={HOST}", f"--port={ports['grpc'][1]}", f"--metrics-port={ports['metrics'][1]}"]
    if "data" in ports:
        words += [f"--data-port={ports['data'][1]}"]
    if component != "router":
        words += ["--runner=fake", "--device=cpu"]
    return Child(component, service_command(*words), directory / f"{component}.log", env=environ)


@pytest.mark.parametrize("name", ["cpu", "gpu", "minimal"])
def test_rendered_command_lines_serve(name: str, tmp_path: Path) -> None:
    with redis_server() as redis_url, _started(tmp_path, VALUES[name], redis_url) as started:
        assert set(started) == ({"router", "decode"} if name == "minimal" else set(SERVICES))
        for child, container in started.values():
            for kind in ("startup", "liveness", "readiness"):
                service = container[f"{kind}Probe"]["grpc"]["service"]
                wait_until(lambda c=child, s=service: _serving(c, s), 30.0, f"{child.name}: {kind} probe")  # type: ignore[misc]
        router, _ = started["router"]
        with Client(router.endpoints["grpc"]) as client:
            result = client.generate(prompt_token_ids=[5, 6, 7, 8], max_tokens=5, temperature=0, timeout_s=60)
        assert len(result.token_ids) == 5
        assert (result.timings.transfer_bytes > 0) == (name != "minimal")


def _serving(child: Child, service: str) -> bool:
    with grpc.insecure_channel(child.endpoints["grpc"]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
