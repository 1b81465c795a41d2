"""The Grafana dashboard: current, and each of its queries finds data in a real Prometheus that scrapes our metrics."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pdserve.core.telemetry import MetricsServer, RouterMetrics, WorkerMetrics
from tests.support.redis_server import free_port
from tests.support.tools import program

DASHBOARDS = Path(__file__).resolve().parents[2] / "helm" / "dashboards"
SCRAPE_INTERVAL = "200ms"
WINDOW = "20s"
START_DEADLINE_S = 20.0
DATA_DEADLINE_S = 40.0
_METRIC = re.compile(r"\bpdserve_\w+")


def _queries() -> list[tuple[str, str]]:
    """(panel title, expression) of every query."""
    dashboard = json.loads((DASHBOARDS / "pdserve.json").read_text())
    return [(p["title"], t["expr"]) for p in dashboard["panels"] for t in p.get("targets", [])]


class Samples:
    """The real metric classes of a router, a prefill and a decode worker, with values that grow."""

    def __init__(self) -> None:
        self.registries = [CollectorRegistry() for _ in range(3)]
        router_registry, prefill_registry, decode_registry = self.registries
        self._router = RouterMetrics(router_registry)
        self._workers = [WorkerMetrics(prefill_registry, "prefill"), WorkerMetrics(decode_registry, "decode")]
        self._router.set_info(router_id="router-0", model="test-model")
        for worker in self._workers:
            worker.set_info(worker_id="worker-0", incarnation="00", model="test-model")
        self._times = 0

    def grow(self) -> None:
        """What a little traffic would do to every metric."""
        self._times += 1
        for owner in (self._router, *self._workers):
            for metric in vars(owner).values():
                if isinstance(metric, Counter | Gauge | Histogram) and not metric._labelnames:
                    _grow(metric)
        for reason in ("stop", "cancelled", "refused", "failed"):
            self._router.requests.labels(reason, "SOME_REASON").inc()
        self._router.workers.labels("decode", "ready").set(1)
        self._router.store_errors.labels("create").inc()
        for worker in self._workers:
            worker.observe_load(num_running=3, num_waiting=2, num_free_pages=60, num_pages=100, num_pending_tokens=128)
            worker.observe_step(duration_s=0.02, num_tokens=64)
            worker.observe_preemptions(
                num_recomputes=2 * self._times,
                num_swaps=3 * self._times,
                swapped_out_bytes=4096 * self._times,
                swapped_in_bytes=2048 * self._times,
                num_host_pages=8,
                num_free_host_pages=7,
            )
            worker.kv_seconds.observe(0.333)  # beside the same again from _grow: half of the time is hidden
            worker.kv_bytes.labels("shm").inc(4096)
            worker.kv_transfers.labels("complete", "").inc()
            worker.kv_transfers.labels("failed", "PEER_GONE").inc()
            worker.session_messages.labels("sent", "step_outputs").inc()
            worker.sessions_cut.labels("SLOW_READER").inc()


def _grow(metric: Counter | Gauge | Histogram) -> None:
    if isinstance(metric, Histogram):
        for value in (0.003, 0.03, 0.3):
            metric.observe(value)
    else:
        metric.inc()


@contextmanager
def _prometheus(directory: Path, targets: list[str]) -> Iterator[str]:
    """A Prometheus that scrapes `targets`; gives its URL."""
    binary = program("prometheus", "prometheus")
    config = directory / "prometheus.yml"
    scrape = {"job_name": "pdserve", "static_configs": [{"targets": targets}]}
    settings = {"global": {"scrape_interval": SCRAPE_INTERVAL, "scrape_timeout": SCRAPE_INTERVAL}}
    config.write_text(yaml.safe_dump({**settings, "scrape_configs": [scrape]}))
    url = f"127.0.0.1:{free_port()}"
    command = [binary, f"--config.file={config}", f"--storage.tsdb.path={directory / 'data'}"]
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={url}"], stdout=log, stderr=log)
    try:
        _wait(lambda: _get(f"http://{url}/-/ready") is not None, START_DEADLINE_S, "Prometheus to be ready")
        yield f"http://{url}"
    finally:
        process.terminate()
        process.wait(timeout=20)


def _get(url: str) -> bytes | None:
    try:
        with urllib.request.urlopen(url, timeout=5) as page:
            return bytes(page.read())
    except urllib.error.HTTPError as e:
        e.close()
        if e.code == 503:
            return None
        raise
    except urllib.error.URLError:
        return None


def _wait(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.05)  # polling a condition with a deadline


def _values(url: str, expression: str) -> list[float]:
    query = urllib.parse.urlencode({"query": expression.replace("$__rate_interval", WINDOW)})
    page = _get(f"{url}/api/v1/query?{query}")
    assert page is not None
    answer: dict[str, Any] = json.loads(page)
    assert answer["status"] == "success", answer
    return [float(series["value"][1]) for series in answer["data"]["result"]]


def test_every_query_finds_data(tmp_path: Path) -> None:
    samples = Samples()
    samples.grow()
    servers = [MetricsServer(registry, "127.0.0.1", 0) for registry in samples.registries]
    try:
        with _prometheus(tmp_path, [f"127.0.0.1:{s.port}" for s in servers]) as url:
            pending = dict.fromkeys(_queries())

            def all_answered() -> bool:
                samples.grow()
                for title, expression in list(pending):
                    values = _values(url, expression)
                    if values and all(math.isfinite(v) for v in values) and any(v > 0 for v in values):
                        del pending[(title, expression)]
                return not pending

            try:
                _wait(all_answered, DATA_DEADLINE_S, "data")
            except AssertionError:
                pytest.fail("no data for: " + "; ".join(f"{title}: {query}" for title, query in pending))
            (hidden,) = (expression for title, expression in _queries() if title == "Hidden share")

            def all_right() -> bool:  # but where a scrape came too late, or while the values grew
                samples.grow()
                usage = _values(url, "pdserve_engine_kv_usage_ratio")
                running = _values(url, "sum by (role) (pdserve_engine_sequences_running)")
                shown = max(usage, default=0.0), sorted(running), _values(url, hidden)
                return shown == (pytest.approx(0.4), [3, 3], [pytest.approx(0.5, rel=0.05)])

            _wait(all_right, DATA_DEADLINE_S, "the values that were given")
    finally:
        for server in servers:
            server.close()


def test_queries_use_metrics_that_exist() -> None:
    exposed = set()
    for registry in Samples().registries:
        for metric in registry.collect():
            exposed |= {metric.name, *(s.name for s in metric.samples)}
            suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
            exposed |= {metric.name + suffix for suffix in suffixes.get(metric.type, [])}
    used = {name for _, expression in _queries() for name in _METRIC.findall(expression)}
    assert used - exposed == set()
    assert len(used) > 25


def test_dashboard_is_current() -> None:
    spec = importlib.util.spec_from_file_location("build_dashboard", DASHBOARDS / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (DASHBOARDS / "pdserve.json").read_text() == module.render(), "run helm/dashboards/build.py"


def test_panels_have_title_description_and_unit() -> None:
    panels = [p for p in json.loads((DASHBOARDS / "pdserve.json").read_text())["panels"] if p["type"] != "row"]
    assert len(panels) >= 20
    for panel in panels:
        assert panel["title"] and panel["description"] and panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            assert target["legendFormat"] and target["datasource"]["uid"] == "${datasource}"
