"""Builds the Grafana dashboard pdserve.json beside this file from the metrics of core/telemetry.py.

    .venv/bin/python helm/dashboards/build.py

tests/observability runs every query of it against a real Prometheus, and checks that the committed file is current.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from grafana_foundation_sdk.builders import common, prometheus, timeseries
from grafana_foundation_sdk.builders.dashboard import Dashboard, DatasourceVariable, Row
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement, TooltipDisplayMode
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, DataSourceRef

OUTPUT = Path(__file__).with_name("pdserve.json")
DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
WINDOW = "[$__rate_interval]"
Query = tuple[str, str]  # expression, legend


def rate(metric: str, by: str = "") -> str:
    """Sum of a counter's rates."""
    return f"sum{_by(by)}(rate({metric}{WINDOW}))"


def share(part: str, whole: str, by: str = "") -> str:
    """Quotient of two rates."""
    return f"{rate(part, by)} / {rate(whole, by)}"


def quantiles(histogram: str, by: str = "", legend: str = "") -> list[Query]:
    """p50, p95 and p99 of a histogram."""
    labels = f"le, {by}" if by else "le"
    return [
        (f"histogram_quantile({q / 100}, {rate(histogram + '_bucket', labels)})", f"p{q} {legend}".strip())
        for q in (50, 95, 99)
    ]


def panel(title: str, description: str, unit: str, queries: Sequence[Query], width: int = 8) -> timeseries.Panel:
    """One graph over time."""
    built = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .unit(unit)
        .datasource(DATASOURCE)
        .min(0)
        .span(width)
        .height(8)
        .line_width(1)
        .fill_opacity(10)
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
    )
    for index, (expression, legend) in enumerate(queries):
        query = prometheus.Dataquery().expr(expression).legend_format(legend).range().ref_id(chr(ord("A") + index))
        built = built.with_target(query.datasource(DATASOURCE))
    return built


def dashboard() -> Dashboard:
    """The whole dashboard: what clients see, what workers do, what moves between them."""
    built = (
        Dashboard("pdserve")
        .uid("pdserve")
        .description("Requests at the routers, engines of the workers, KV transfer between them")
        .tags(["pdserve", "llm"])
        .time("now-30m", "now")
        .refresh("10s")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for title, panels in (("Requests", _requests()), ("Workers", _workers()), ("KV transfer", _transfer())):
        built = built.with_row(Row(title))
        for one in panels:
            built = built.with_panel(one)
    return built


def _requests() -> list[timeseries.Panel]:
    requests = "pdserve_router_requests_total"
    refused = requests + '{finish_reason=~"refused|failed"}'
    return [
        panel("Requests ended", "By finish reason", "reqps", [(rate(requests, "finish_reason"), "{{finish_reason}}")]),
        panel(
            "Refused and failed",
            "By reason; nothing here is good",
            "reqps",
            [(rate(refused, "finish_reason, reason"), "{{finish_reason}} {{reason}}")],
        ),
        panel(
            "Open requests",
            "Accepted and not ended; of these, waiting for a worker",
            "short",
            [("sum(pdserve_router_requests_open)", "open"), ("sum(pdserve_router_requests_queued)", "queued")],
        ),
        panel("TTFT", "Arrival at the router to token 1 released", "s", quantiles("pdserve_router_ttft_seconds")),
        panel(
            "TPOT", "(last - first token) / (tokens - 1), per request", "s", quantiles("pdserve_router_tpot_seconds")
        ),
        panel("ITL", "Gap between two deltas of a request", "s", quantiles("pdserve_router_itl_seconds")),
        panel("E2E", "Arrival to end", "s", quantiles("pdserve_router_e2e_seconds")),
        panel("Queue time", "Arrival to a worker chosen", "s", quantiles("pdserve_router_queue_seconds")),
        panel("Hand-off gap", "Gap between tokens 1 and 2", "s", quantiles("pdserve_router_handoff_gap_seconds")),
        panel(
            "Tokens",
            "Prompt tokens accepted, output tokens released",
            "short",
            [
                (rate("pdserve_router_prompt_tokens_total"), "prompt tokens/s"),
                (rate("pdserve_router_generation_tokens_total"), "output tokens/s"),
            ],
        ),
        panel(
            "Workers known",
            "What the routers see",
            "short",
            [("max by (role, state) (pdserve_router_workers)", "{{role}} {{state}}")],
        ),
        panel(
            "Store errors",
            "Failed operations on Redis",
            "ops",
            [(rate("pdserve_router_store_errors_total", "operation"), "{{operation}}")],
        ),
        panel(
            "Late messages",
            "Messages of workers for attempts that had ended; a few after cancels and retries are normal",
            "ops",
            [(rate("pdserve_router_late_messages_total"), "late messages")],
        ),
    ]


def _workers() -> list[timeseries.Panel]:
    outputs = '{direction="sent", kind="step_outputs"}'
    return [
        panel(
            "Sequences",
            "Running and waiting in the engines",
            "short",
            [
                ("sum by (role) (pdserve_engine_sequences_running)", "running {{role}}"),
                ("sum by (role) (pdserve_engine_sequences_waiting)", "waiting {{role}}"),
            ],
        ),
        panel(
            "KV usage",
            "Share of KV pages in use",
            "percentunit",
            [("pdserve_engine_kv_usage_ratio", "{{role}} {{instance}}")],
        ),
        panel(
            "Preemptions",
            "Sequences whose pages were taken, by what became of their KV",
            "ops",
            [(rate("pdserve_engine_preemptions_total", "role, mode"), "{{role}} {{mode}}")],
        ),
        panel(
            "Swapped KV",
            "Copied to the host pool and back",
            "Bps",
            [(rate("pdserve_engine_swapped_bytes_total", "role, direction"), "{{role}} {{direction}}")],
        ),
        panel(
            "Pending prefill tokens",
            "Prompt tokens known but not computed",
            "short",
            [("sum by (role) (pdserve_engine_pending_prefill_tokens)", "{{role}}")],
        ),
        panel(
            "Prefix cache hits",
            "Share of the tokens looked for that were cached; on decode these pages are not pulled",
            "percentunit",
            [
                (
                    share(
                        "pdserve_engine_prefix_cache_hits_total", "pdserve_engine_prefix_cache_queries_total", "role"
                    ),
                    "{{role}}",
                )
            ],
        ),
        panel("Step time", "By role", "s", quantiles("pdserve_engine_step_seconds", "role", "{{role}}")),
        panel(
            "Tokens per step",
            "Mean; what the token budget is used for",
            "short",
            [(share("pdserve_engine_step_tokens_sum", "pdserve_engine_step_tokens_count", "role"), "{{role}}")],
        ),
        panel(
            "Generated tokens",
            "By role",
            "short",
            [(rate("pdserve_generation_tokens_total", "role"), "{{role}} tokens/s")],
        ),
        panel("Queue time", "Arrival at the worker to first step", "s", quantiles("pdserve_worker_queue_seconds")),
        panel("Prefill time", "First step to first token sampled", "s", quantiles("pdserve_worker_prefill_seconds")),
        panel(
            "Sessions",
            "Routers connected to the workers; sessions that workers cut",
            "short",
            [
                ("sum by (role) (pdserve_sessions)", "{{role}}"),
                (rate("pdserve_sessions_cut_total", "reason"), "cut/s {{reason}}"),
            ],
        ),
        panel(
            "Messages per step",
            "Worker to router; at most one per step and router",
            "short",
            [(share(f"pdserve_session_messages_total{outputs}", "pdserve_engine_steps_total", "role"), "{{role}}")],
        ),
    ]


def _transfer() -> list[timeseries.Panel]:
    failed = 'pdserve_kv_transfers_total{outcome!="complete"}'
    return [
        panel("Bytes", "KV on the wire", "Bps", [(rate("pdserve_kv_transfer_bytes_total"), "bytes/s")]),
        panel("Transfers ended", "By outcome", "ops", [(rate("pdserve_kv_transfers_total", "outcome"), "{{outcome}}")]),
        panel(
            "Transfers not completed",
            "By reason",
            "ops",
            [(rate(failed, "outcome, reason"), "{{outcome}} {{reason}}")],
        ),
        panel("Transfer time", "First byte to last page verified", "s", quantiles("pdserve_kv_transfer_seconds")),
        panel(
            "Time waiting for pages",
            "From the manifest, when the prompt is computed, to the begin of the first decode step",
            "s",
            quantiles("pdserve_kv_transfer_exposed_seconds"),
        ),
        panel(
            "Hidden share",
            "Part of the transfers' time that ran while the prompt was still computed",
            "percentunit",
            [(share("pdserve_kv_transfer_hidden_seconds_sum", "pdserve_kv_transfer_seconds_sum"), "hidden")],
        ),
        panel(
            "Leases and reservations",
            "Alive; expired and refused per second",
            "short",
            [
                ("sum(pdserve_kv_leases)", "leases"),
                ("sum(pdserve_kv_reservations)", "reservations"),
                (rate("pdserve_kv_leases_expired_total"), "expired leases/s"),
                (rate("pdserve_kv_reservations_refused_total"), "refused reservations/s"),
            ],
        ),
    ]


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""


def render() -> str:
    """The dashboard as JSON text."""
    return json.dumps(dashboard().build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    OUTPUT.write_text(render())
    sys.stdout.write(f"{OUTPUT}\n")
