"""The sample request of `pdserve up`: streams an answer through the SDK and shows where its time went."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from pdserve.cli.timings import timing_lines
from pdserve.client import Client, PdserveError, Result, TokenStream

SAMPLE_MAX_TOKENS = 48


def run_sample(console: Console, address: str, prompt: str) -> None:
    """Streams the answer to `prompt` from the router at `address` and prints its timings.

    A model without a chat template is given the prompt as text.

    Raises:
        pdserve.client.errors.PdserveError: The request failed.
    """
    console.print(f"\n[bold]Prompt[/]  {escape(prompt)}\n[bold]Answer[/] ", end=" ", soft_wrap=True)
    with Client(address) as client:
        message = {"role": "user", "content": prompt}
        try:
            chat = client.stream_chat([message], max_tokens=SAMPLE_MAX_TOKENS, temperature=0, timeout_s=120)
            result = _print_stream(console, chat)
        except PdserveError as e:
            if e.reason != "NO_CHAT_TEMPLATE":
                raise
            text = client.stream(prompt, max_tokens=SAMPLE_MAX_TOKENS, temperature=0, timeout_s=120)
            result = _print_stream(console, text)
    console.print()
    console.print("\n[bold]Where the time went[/]")
    for line in timing_lines(result.timings, result.usage):
        console.print(line, soft_wrap=True)


def _print_stream(console: Console, stream: TokenStream) -> Result:
    for delta in stream:
        console.out(delta.text, end="")
    return stream.result
