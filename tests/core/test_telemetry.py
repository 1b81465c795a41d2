"""Metric names and the endpoint that shows them."""

from __future__ import annotations

import urllib.request

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from pdserve.core.errors import ConfigError
from pdserve.core.telemetry import MetricsServer, RouterMetrics, WorkerMetrics

BOUNDED_LABELS = {
    *("role", "finish_reason", "reason", "outcome", "direction", "kind", "state", "operation", "mode"),
    *("le", "generation"),  # of histograms and of the garbage collector
    *("worker_id", "router_id", "incarnation", "model", "version"),  # of the info metrics
}


def scrape(server: MetricsServer):
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as response:
        return {family.name: family for family in text_string_to_metric_families(response.read().decode())}


def worker_registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry, "prefill")
    metrics.set_info(worker_id="w", incarnation="ab", model="smol")
    metrics.observe_load(num_running=2, num_waiting=1, num_free_pages=25, num_pages=100, num_pending_tokens=7)
    metrics.observe_step(duration_s=0.02, num_tokens=64)
    _preempt(metrics, 3)
    metrics.observe_prefix_cache(num_queried_tokens=40, num_hit_tokens=16)
    metrics.requests.labels("stop", "").inc()
    return registry


def _preempt(metrics: WorkerMetrics, num_swaps: int) -> None:
    metrics.observe_preemptions(
        num_recomputes=1,
        num_swaps=num_swaps,
        swapped_out_bytes=100 * num_swaps,
        swapped_in_bytes=100,
        num_host_pages=8,
        num_free_host_pages=6,
    )


def test_preemptions_follow_the_engines_totals() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry, "decode")
    for num_swaps in (0, 2, 2, 5):
        _preempt(metrics, num_swaps)
    for name, label, value in (
        ("pdserve_engine_preemptions_total", {"mode": "swap"}, 5),
        ("pdserve_engine_preemptions_total", {"mode": "recompute"}, 1),
        ("pdserve_engine_swapped_bytes_total", {"direction": "out"}, 500),
        ("pdserve_engine_swapped_bytes_total", {"direction": "in"}, 100),
        ("pdserve_engine_host_free_pages", {}, 6),
    ):
        assert registry.get_sample_value(name, {"role": "decode", **label}) == value


def router_registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    metrics.set_info(router_id="r", model="smol")
    metrics.workers.labels("decode", "ready").set(2)
    return registry


@pytest.mark.parametrize("make", [worker_registry, router_registry])
def test_names_follow_the_conventions(make):
    server = MetricsServer(make(), "127.0.0.1", 0)
    try:
        families = scrape(server)
    finally:
        server.close()
    ours = [f for name, f in families.items() if name.startswith("pdserve_")]
    assert len(ours) > 10
    for family in ours:
        assert family.documentation
        assert not family.name.endswith(("_ms", "_mb", "_milliseconds"))
        for sample in family.samples:
            assert set(sample.labels) <= BOUNDED_LABELS
            if family.type == "counter":
                assert sample.name.endswith(("_total", "_created"))
    assert "process_resident_memory_bytes" in families


def test_values_arrive_with_the_role():
    server = MetricsServer(worker_registry(), "127.0.0.1", 0)
    try:
        families = scrape(server)
    finally:
        server.close()
    (usage,) = families["pdserve_engine_kv_usage_ratio"].samples
    assert (usage.labels, usage.value) == ({"role": "prefill"}, 0.75)
    (info,) = families["pdserve_worker_info"].samples
    assert (info.labels["model"], info.labels["role"]) == ("smol", "prefill")
    count = next(s for s in families["pdserve_engine_step_seconds"].samples if s.name.endswith("_count"))
    assert count.value == 1


def test_a_port_in_use_is_a_config_error_and_close_frees_it():
    server = MetricsServer(CollectorRegistry(), "127.0.0.1", 0)
    with pytest.raises(ConfigError, match=rf"port {server.port} is in use.*--metrics-port"):
        MetricsServer(CollectorRegistry(), "127.0.0.1", server.port)
    server.close()
    MetricsServer(CollectorRegistry(), "127.0.0.1", server.port).close()


def test_two_registries_do_not_share_state():
    one, two = CollectorRegistry(), CollectorRegistry()
    WorkerMetrics(one, "decode").steps.inc(3)
    WorkerMetrics(two, "decode")
    assert one.get_sample_value("pdserve_engine_steps_total", {"role": "decode"}) == 3
    assert two.get_sample_value("pdserve_engine_steps_total", {"role": "decode"}) == 0
