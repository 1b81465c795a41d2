"""From outcomes to numbers: latency statistics, throughput, goodput. Pure.

TTFT: sent to first output. ITL: each gap between outputs. TPOT: (E2EL - TTFT) / (output tokens - 1). E2EL: sent to end.
Goodput: requests per second that meet every limit; a refused or failed request meets none.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from pdserve.bench.load import Outcome
from pdserve.bench.report import Row

METRICS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}
MEANINGS = {
    "ttft": "from sending a request to its first output",
    "tpot": "per further output token",
    "itl": "between two outputs",
    "e2el": "from sending to the end",
}


def values_ms(outcome: Outcome, metric: str) -> list[float]:
    """The values of one metric in one successful outcome, milliseconds; empty where it is not defined."""
    if metric == "e2el":
        return [(outcome.end_s - outcome.sent_s) * 1000]
    if not outcome.output_s:
        return []
    first = outcome.output_s[0]
    if metric == "ttft":
        return [(first - outcome.sent_s) * 1000]
    if metric == "itl":
        return [(b - a) * 1000 for a, b in zip(outcome.output_s, outcome.output_s[1:], strict=False)]
    return [(outcome.end_s - first) * 1000 / (outcome.output_tokens - 1)] if outcome.output_tokens > 1 else []


def meets(outcome: Outcome, limits_ms: Mapping[str, float]) -> bool:
    """True when a request succeeded within every limit; a metric that is not defined for it limits nothing."""
    return outcome.error is None and all(
        value <= limit for metric, limit in limits_ms.items() for value in values_ms(outcome, metric)
    )


def percentile(values: Sequence[float], p: float) -> float:
    """The p-th percentile, 0..100, interpolated linearly between the closest ranks; `values` is not empty."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * p / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarize(
    outcomes: Sequence[Outcome], metrics: Sequence[str], percentiles: Sequence[float], limits_ms: Mapping[str, float]
) -> list[Row]:
    """The rows of a load report.

    Args:
        outcomes: All requests, failed ones included.
        metrics: Names in `METRICS`.
        percentiles: Each in 0..100.
        limits_ms: Metric name -> limit, for the goodput; empty: no goodput row.
    """
    good = [o for o in outcomes if o.error is None]
    duration = max(o.end_s for o in outcomes) - min(o.sent_s for o in outcomes) if outcomes else 0.0
    input_tokens = sum(len(o.item.prompt_token_ids) for o in good)
    output_tokens = sum(o.output_tokens for o in good)
    rows = [
        Row("requests", len(outcomes), ""),
        Row("succeeded", len(good), ""),
        Row("failed", len(outcomes) - len(good), "", "0"),
        *(Row(f"failed: {reason}", n, "") for reason, n in Counter(o.error for o in outcomes if o.error).most_common()),
        Row("duration", duration, "s"),
        Row("input tokens", input_tokens, ""),
        Row("output tokens", output_tokens, ""),
        Row("request throughput", _per(len(good), duration), "requests/s"),
        Row("output token throughput", _per(output_tokens, duration), "tokens/s"),
        Row("total token throughput", _per(input_tokens + output_tokens, duration), "tokens/s"),
    ]
    if limits_ms:
        met = sum(meets(o, limits_ms) for o in outcomes)
        stated = " ".join(f"{METRICS[m]} <= {limit:g} ms" for m, limit in limits_ms.items())
        rows.append(Row(f"goodput ({stated})", _per(met, duration), "requests/s"))
        rows.append(Row("requests within the limits", 100 * met / len(outcomes) if outcomes else None, "%"))
    for metric in metrics:
        rows += _statistics(METRICS[metric], [v for o in good for v in values_ms(o, metric)], percentiles)
    return rows


def _statistics(label: str, values: Sequence[float], percentiles: Sequence[float]) -> list[Row]:
    return [
        Row(f"mean {label}", statistics.fmean(values) if values else None, "ms"),
        Row(f"median {label}", statistics.median(values) if values else None, "ms"),
        *(Row(f"P{p:g} {label}", percentile(values, p) if values else None, "ms") for p in percentiles),
    ]


def _per(count: int, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None
