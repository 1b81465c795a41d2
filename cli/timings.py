"""Where one request's time went, as lines for a person."""

from __future__ import annotations

from pdserve.client.types import Timings, Usage

_PHASES = (
    ("queue_s", "queue"),
    ("prefill_s", "prefill"),
    ("transfer_s", "KV transfer"),
    ("handoff_gap_s", "hand-off gap"),
    ("decode_s", "decode"),
)
_SUMMARY = (
    ("ttft_s", "TTFT", "arrival to first token"),
    ("tpot_s", "TPOT", "per further token"),
    ("e2e_s", "E2E", "arrival to end"),
)
_BAR_WIDTH = 40


def timing_lines(timings: Timings, usage: Usage) -> list[str]:
    """One line per duration that happened, phases with a bar, in the order of the path; times in ms."""
    phases = [(label, s) for name, label in _PHASES if (s := getattr(timings, name)) is not None]
    longest = max((s for _, s in phases), default=0.0) or 1.0
    lines = [_line(label, s, "█" * round(_BAR_WIDTH * s / longest)) for label, s in phases]
    lines += [_line(label, s, note) for name, label, note in _SUMMARY if (s := getattr(timings, name)) is not None]
    if timings.transfer_s is not None:
        hidden = min(1.0, (timings.transfer_hidden_s or 0.0) / (timings.transfer_s or 1.0))
        megabytes = f"{timings.transfer_bytes / 1e6:.2f} MB moved"
        lines.append(f"{megabytes}; {hidden:.0%} of the transfer's time was hidden behind the prefill")
    prompt = f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached)"
    return [*lines, f"{prompt}, {usage.completion_tokens} output tokens"]


def _line(label: str, seconds: float, note: str) -> str:
    return f"{label:<13}{seconds * 1000:10.1f} ms  {note}".rstrip()
