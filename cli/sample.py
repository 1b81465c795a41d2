"""The sample request of `pdserve up`: streams an answer through the SDK and shows where its time went."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from pdserve.client import Client
from pdserve.client.types import Timings

SAMPLE_MAX_TOKENS = 48
BAR_WIDTH = 40


def run_sample(console: Console, address: str, prompt: str) -> None:
    """Streams the answer to `prompt` from the router at `address` and prints its timings.

    Raises:
        pdserve.client.errors.PdserveError: The request failed.
    """
    console.print(f"\n[bold]Prompt[/]  {prompt}\n[bold]Answer[/] ", end=" ", soft_wrap=True)
    with Client(address) as client:
        stream = client.stream_chat(
            [{"role": "user", "content": prompt}], max_tokens=SAMPLE_MAX_TOKENS, temperature=0, timeout_s=120
        )
        for delta in stream:
            console.out(delta.text, end="")
        result = stream.result
    console.print()
    usage, timings = result.usage, result.timings
    console.print(
        f"\n[bold]Where the time went[/]  "
        f"({usage.prompt_tokens} prompt tokens, {usage.completion_tokens} output tokens)"
    )
    console.print(timing_table(timings))
    if timings.transfer_bytes and timings.transfer_s:
        hidden = 100 * (timings.transfer_hidden_s or 0.0) / timings.transfer_s
        console.print(
            f"KV transfer: {timings.transfer_bytes / 1e6:.2f} MB; "
            f"{hidden:.0f} % of its time was hidden behind the prefill"
        )


def timing_table(timings: Timings) -> Table:
    """Rows of name, milliseconds and a bar for the phases of one request."""
    phases = [
        ("queue", timings.queue_s),
        ("prefill", timings.prefill_s),
        ("transfer", timings.transfer_s),
        ("hand-off gap", timings.handoff_gap_s),
        ("decode", timings.decode_s),
    ]
    longest = max((seconds or 0.0 for _, seconds in phases), default=0.0) or 1.0
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    for name, seconds in phases:
        bar = "█" * round(BAR_WIDTH * (seconds or 0.0) / longest)
        table.add_row(name, _milliseconds(seconds), bar)
    table.add_row("TTFT", _milliseconds(timings.ttft_s), "arrival to first token", style="bold")
    table.add_row("TPOT", _milliseconds(timings.tpot_s), "per further token", style="bold")
    table.add_row("E2E", _milliseconds(timings.e2e_s), "arrival to end", style="bold")
    return table


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f} ms"
