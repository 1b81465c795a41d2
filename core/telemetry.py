"""Names of all Prometheus metrics, once, and the endpoint that shows them. Seconds and bytes; no label is unbounded.

Every process makes its own `CollectorRegistry`; there is no module-level state. Spans are in `core.tracing`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from wsgiref.simple_server import WSGIServer

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    Info,
    ProcessCollector,
    start_http_server,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pdserve.core.net import check_port_free

# Buckets of the GenAI semantic conventions where they define some.
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0)
_TPOT_S = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_E2E_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84, 327.68)
_STEP_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_PULL_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class _WithLabels(Collector):
    """Adds constant labels to every sample of a registry."""

    def __init__(self, inner: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self._inner = inner
        self._labels = dict(labels)

    def collect(self) -> Iterator[Metric]:
        for metric in self._inner.collect():
            metric.samples = [s._replace(labels={**self._labels, **s.labels}) for s in metric.samples]
            yield metric


def _process_metrics(registry: CollectorRegistry) -> None:
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)


class _Total:
    """A counter that follows a total which somebody else counts."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._seen = 0

    def follow(self, total: int) -> None:
        self._counter.inc(total - self._seen)
        self._seen = total


class WorkerMetrics:
    """Metrics of a worker process; each carries the label `role`.

    Attributes are prometheus_client objects: `.inc()`, `.set()`, `.observe()`, `.labels(...)`. Labels in order:
    `requests` (finish_reason, reason), `kv_transfers` (outcome, reason), `kv_bytes` (transport),
    `session_messages` (direction, kind), `stale_messages` (kind), `sessions_cut` (reason), `preemptions` (mode),
    `swapped_bytes` (direction).

    Args:
        registry: Where they are registered.
        role: "prefill", "decode" or "mixed".
    """

    def __init__(self, registry: CollectorRegistry, role: str) -> None:
        _process_metrics(registry)
        r = CollectorRegistry()
        registry.register(_WithLabels(r, {"role": role}))
        self.info = Info("pdserve_worker", "What this worker is", registry=r)
        # engine
        self.running = Gauge("pdserve_engine_sequences_running", "Sequences running", registry=r)
        self.waiting = Gauge("pdserve_engine_sequences_waiting", "Sequences waiting", registry=r)
        self.pages = Gauge("pdserve_engine_kv_pages", "KV pages in all", registry=r)
        self.free_pages = Gauge("pdserve_engine_kv_free_pages", "KV pages free or evictable", registry=r)
        self.kv_usage = Gauge("pdserve_engine_kv_usage_ratio", "Share of KV pages in use, 0 to 1", registry=r)
        self.pending_prefill = Gauge(
            "pdserve_engine_pending_prefill_tokens", "Prompt tokens known but not computed", registry=r
        )
        self.preemptions = Counter(
            "pdserve_engine_preemptions_total",
            "Sequences whose pages were taken; mode recompute or swap: what became of their KV",
            ["mode"],
            registry=r,
        )
        self.swapped_bytes = Counter(
            "pdserve_engine_swapped_bytes_total",
            "Bytes of KV copied to the host pool (direction out) and back (in)",
            ["direction"],
            registry=r,
        )
        self.host_pages = Gauge("pdserve_engine_host_pages", "Host pages for preempted sequences", registry=r)
        self.free_host_pages = Gauge("pdserve_engine_host_free_pages", "Host pages free", registry=r)
        self._recomputes = _Total(self.preemptions.labels("recompute"))
        self._swaps = _Total(self.preemptions.labels("swap"))
        self._bytes_out = _Total(self.swapped_bytes.labels("out"))
        self._bytes_in = _Total(self.swapped_bytes.labels("in"))
        self.prefix_queries = Counter(
            "pdserve_engine_prefix_cache_queries_total", "Tokens looked for in the prefix cache", registry=r
        )
        self.prefix_hits = Counter(
            "pdserve_engine_prefix_cache_hits_total", "Tokens found in the prefix cache", registry=r
        )
        self._queried, self._hit = _Total(self.prefix_queries), _Total(self.prefix_hits)
        self.steps = Counter("pdserve_engine_steps_total", "Engine steps executed", registry=r)
        self.step_seconds = Histogram(
            "pdserve_engine_step_seconds", "Time of an engine step", buckets=_STEP_S, registry=r
        )
        self.step_tokens = Histogram(
            "pdserve_engine_step_tokens", "Tokens computed in an engine step", buckets=_STEP_TOKENS, registry=r
        )
        self.prompt_tokens = Counter("pdserve_prompt_tokens_total", "Prompt tokens of started requests", registry=r)
        self.cached_tokens = Counter(
            "pdserve_cached_prompt_tokens_total", "Prompt tokens had by prefix reuse", registry=r
        )
        self.generation_tokens = Counter("pdserve_generation_tokens_total", "Tokens generated", registry=r)
        # requests
        self.requests = Counter(
            "pdserve_worker_requests_total",
            "Attempts ended on this worker; finish_reason stop, length, cancelled, handoff or failed",
            ["finish_reason", "reason"],
            registry=r,
        )
        self.queue_seconds = Histogram(
            "pdserve_worker_queue_seconds", "Arrival at the worker to first step", buckets=_TTFT_S, registry=r
        )
        self.prefill_seconds = Histogram(
            "pdserve_worker_prefill_seconds", "First step to first token sampled", buckets=_TTFT_S, registry=r
        )
        self.decode_seconds = Histogram(
            "pdserve_worker_decode_seconds", "First decode step to the end", buckets=_E2E_S, registry=r
        )
        self.ttft_seconds = Histogram(
            "pdserve_worker_ttft_seconds", "Arrival at the worker to first token", buckets=_TTFT_S, registry=r
        )
        self.tpot_seconds = Histogram(
            "pdserve_worker_tpot_seconds", "(last - first token) / (tokens - 1)", buckets=_TPOT_S, registry=r
        )
        self.itl_seconds = Histogram(
            "pdserve_worker_itl_seconds", "Gap between two outputs of a sequence", buckets=_TPOT_S, registry=r
        )
        self.e2e_seconds = Histogram(
            "pdserve_worker_e2e_seconds", "Arrival at the worker to the end", buckets=_E2E_S, registry=r
        )
        # KV transfer
        self.kv_transfers = Counter(
            "pdserve_kv_transfers_total",
            "KV transfers ended; outcome complete, aborted or failed",
            ["outcome", "reason"],
            registry=r,
        )
        self.kv_bytes = Counter(
            "pdserve_kv_transfer_bytes_total",
            "Bytes of KV transfers; on the wire, or copied by transport shm",
            ["transport"],
            registry=r,
        )
        self.kv_seconds = Histogram(
            "pdserve_kv_transfer_seconds", "First byte asked to last page verified", buckets=_TTFT_S, registry=r
        )
        self.kv_hidden_seconds = Histogram(
            "pdserve_kv_transfer_hidden_seconds",
            "Part of a transfer that ran while the prompt was still computed",
            buckets=_TTFT_S,
            registry=r,
        )
        self.kv_pull_seconds = Histogram(
            "pdserve_kv_transfer_pull_seconds",
            "Time in which a transfer moved pages: the sum of its pulls",
            buckets=_PULL_S,
            registry=r,
        )
        self.kv_exposed_seconds = Histogram(
            "pdserve_kv_transfer_exposed_seconds",
            "Manifest received to the begin of the first decode step",
            buckets=_PULL_S,
            registry=r,
        )
        self.leases = Gauge("pdserve_kv_leases", "Leases alive", registry=r)
        self.expired_leases = Counter("pdserve_kv_leases_expired_total", "Leases that nobody renewed", registry=r)
        self.reservations = Gauge("pdserve_kv_reservations", "Reservations alive", registry=r)
        self.refused_reservations = Counter(
            "pdserve_kv_reservations_refused_total", "Reservations refused for want of pages", registry=r
        )
        self.quarantined_pages = Gauge(
            "pdserve_kv_quarantined_pages",
            "Pages of failed pulls into which a one-sided read may still write",
            registry=r,
        )
        # sessions
        self.sessions = Gauge("pdserve_sessions", "Routers connected", registry=r)
        self.session_messages = Counter(
            "pdserve_session_messages_total", "Session messages", ["direction", "kind"], registry=r
        )
        self.stale_messages = Counter(
            "pdserve_session_stale_messages_total", "Messages refused by their fence", ["kind"], registry=r
        )
        self.sessions_cut = Counter("pdserve_sessions_cut_total", "Sessions ended by us", ["reason"], registry=r)

    def set_info(self, *, worker_id: str, incarnation: str, model: str) -> None:
        """Sets `pdserve_worker_info`."""
        info = {"worker_id": worker_id, "incarnation": incarnation, "model": model, "version": version("pdserve")}
        self.info.info(info)

    def observe_load(
        self, *, num_running: int, num_waiting: int, num_free_pages: int, num_pages: int, num_pending_tokens: int
    ) -> None:
        """Sets the engine's gauges."""
        self.running.set(num_running)
        self.waiting.set(num_waiting)
        self.free_pages.set(num_free_pages)
        self.pages.set(num_pages)
        self.kv_usage.set(1 - num_free_pages / num_pages if num_pages else 0)
        self.pending_prefill.set(num_pending_tokens)

    def observe_preemptions(
        self,
        *,
        num_recomputes: int,
        num_swaps: int,
        swapped_out_bytes: int,
        swapped_in_bytes: int,
        num_host_pages: int,
        num_free_host_pages: int,
    ) -> None:
        """Takes over the engine's totals since its start, and its host pool now."""
        self._recomputes.follow(num_recomputes)
        self._swaps.follow(num_swaps)
        self._bytes_out.follow(swapped_out_bytes)
        self._bytes_in.follow(swapped_in_bytes)
        self.host_pages.set(num_host_pages)
        self.free_host_pages.set(num_free_host_pages)

    def observe_prefix_cache(self, *, num_queried_tokens: int, num_hit_tokens: int) -> None:
        """Takes over the engine's totals since its start."""
        self._queried.follow(num_queried_tokens)
        self._hit.follow(num_hit_tokens)

    def observe_step(self, *, duration_s: float, num_tokens: int) -> None:
        """Counts one executed engine step."""
        self.steps.inc()
        self.step_seconds.observe(duration_s)
        self.step_tokens.observe(num_tokens)


class RouterMetrics:
    """Metrics of a router process.

    Labels in order: `requests` (finish_reason, reason), `workers` (role, state), `store_errors` (operation).
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        _process_metrics(registry)
        r = registry
        self.info = Info("pdserve_router", "What this router is", registry=r)
        self.open_requests = Gauge("pdserve_router_requests_open", "Requests open", registry=r)
        self.queued_requests = Gauge("pdserve_router_requests_queued", "Requests waiting for a worker", registry=r)
        self.requests = Counter(
            "pdserve_router_requests_total",
            "Requests ended; finish_reason stop, length, cancelled, refused or failed",
            ["finish_reason", "reason"],
            registry=r,
        )
        self.prompt_tokens = Counter("pdserve_router_prompt_tokens_total", "Prompt tokens accepted", registry=r)
        self.generation_tokens = Counter("pdserve_router_generation_tokens_total", "Tokens released", registry=r)
        self.workers = Gauge("pdserve_router_workers", "Workers known", ["role", "state"], registry=r)
        self.queue_seconds = Histogram(
            "pdserve_router_queue_seconds", "Arrival to a worker chosen", buckets=_TTFT_S, registry=r
        )
        self.ttft_seconds = Histogram(
            "pdserve_router_ttft_seconds", "Arrival to token 1 released", buckets=_TTFT_S, registry=r
        )
        self.tpot_seconds = Histogram(
            "pdserve_router_tpot_seconds", "(last - first token) / (tokens - 1)", buckets=_TPOT_S, registry=r
        )
        self.itl_seconds = Histogram(
            "pdserve_router_itl_seconds", "Gap between two deltas of a request", buckets=_TPOT_S, registry=r
        )
        self.e2e_seconds = Histogram("pdserve_router_e2e_seconds", "Arrival to the end", buckets=_E2E_S, registry=r)
        self.handoff_gap_seconds = Histogram(
            "pdserve_router_handoff_gap_seconds", "Gap between tokens 1 and 2", buckets=_TTFT_S, registry=r
        )
        self.store_errors = Counter(
            "pdserve_router_store_errors_total",
            "Failed operations on Redis: create, update, get, delete; dropped and refused changes of records",
            ["operation"],
            registry=r,
        )
        self.late_messages = Counter(
            "pdserve_router_late_messages_total", "Messages of workers for attempts that had ended; dropped", registry=r
        )

    def set_info(self, *, router_id: str, model: str) -> None:
        """Sets `pdserve_router_info`."""
        self.info.info({"router_id": router_id, "model": model, "version": version("pdserve")})


class MetricsServer:
    """The `/metrics` HTTP endpoint, in its own thread.

    Args:
        registry: What it shows.
        host: Address to listen on.
        port: 0 picks a free one.

    Raises:
        ConfigError: The port is in use.
    """

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        check_port_free(host, port, "--metrics-port")
        started: tuple[WSGIServer, threading.Thread] = start_http_server(port, addr=host, registry=registry)
        self._server, self._thread = started
        self.port = int(self._server.server_port)

    def close(self) -> None:
        """Stops listening and waits for the thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)
