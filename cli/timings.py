"""Where one request's time went, as lines for a person."""

from __future__ import annotations

from pdserve.client.types import Timings, Usage

_LABELS = (
    ("queue_s", "queue"),
    ("prefill_s", "prefill"),
    ("transfer_s", "KV transfer"),
    ("handoff_gap_s", "hand-off gap"),
    ("decode_s", "decode"),
    ("ttft_s", "TTFT"),
    ("tpot_s", "TPOT"),
    ("e2e_s", "total"),
)


def timing_lines(timings: Timings, usage: Usage) -> list[str]:
    """One line per duration that happened, in the order of the path; times in ms."""
    lines = []
    for name, label in _LABELS:
        seconds = getattr(timings, name)
        if seconds is not None:
            note = _transfer_note(timings) if name == "transfer_s" else ""
            lines.append(f"{label:<13}{seconds * 1000:10.1f} ms{note}")
    prompt = f"{usage.prompt_tokens} prompt ({usage.cached_tokens} cached)"
    return [*lines, f"{'tokens':<13}{prompt}, {usage.completion_tokens} generated"]


def _transfer_note(timings: Timings) -> str:
    hidden = min(1.0, (timings.transfer_hidden_s or 0.0) / (timings.transfer_s or 1.0))
    return f"   {timings.transfer_bytes / 1e6:.2f} MB, {hidden:.0%} of the time hidden behind the prefill"
