"""A bar for people who wait for an offline batch: `LLM.generate(..., progress=True)`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_EVERY_S = 0.1
"""Steps of a small model are shorter, and counting a large batch takes time."""


class Countable(Protocol):
    """A request under way."""

    @property
    def ended(self) -> bool:
        """Nothing more will come of it."""
        ...

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        ...


class BatchBar:
    """Prompts done of all, and output tokens per second.

    Args:
        requests: All of the batch.
        console: Where it is drawn.

    Attributes:
        start_s: When it began, by `time.monotonic()`.
        display: To be entered while it is shown.
    """

    def __init__(self, requests: Sequence[Countable], console: Console) -> None:
        self._requests = requests
        self.start_s = self._shown_s = time.monotonic()
        self.display = Progress(
            TextColumn("prompts"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeElapsedColumn(),
            TextColumn("<"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self.display.add_task("prompts", total=len(requests), speed="")

    def update(self, now_s: float) -> None:
        """Shows what has become of the requests, some ten times a second.

        Args:
            now_s: `time.monotonic()`.
        """
        if now_s - self._shown_s >= _EVERY_S:
            self._shown_s = now_s
            self.show(now_s)

    def show(self, now_s: float) -> None:
        """Shows it at once."""
        elapsed_s = now_s - self.start_s
        num_tokens = sum(r.num_tokens for r in self._requests)
        speed = f"{num_tokens} tokens, {num_tokens / elapsed_s:.1f}/s" if elapsed_s > 0 else f"{num_tokens} tokens"
        self.display.update(self._task, completed=sum(r.ended for r in self._requests), speed=speed)


@contextmanager
def batch_bar(requests: Sequence[Countable]) -> Iterator[BatchBar]:
    """Draws a bar on standard error while the block runs; where that is no terminal, once, at the end."""
    bar = BatchBar(requests, Console(stderr=True))
    with bar.display:
        try:
            yield bar
        finally:
            bar.show(time.monotonic())
