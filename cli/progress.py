"""Progress bars for people: the launcher's implementation of the engine's `Progress` seam."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    Task,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text


class _StateColumn(SpinnerColumn):
    """A spinner, then ✓ or ✗."""

    def render(self, task: Task) -> RenderableType:
        return Text("✗", style="red") if task.fields.get("failed") else super().render(task)


class RichProgress:
    """Bars and spinners on a console; usable as a context manager."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            _StateColumn(finished_text="[green]✓[/]"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
        )

        self._current: TaskID | None = None

    def begin(self, label: str, total: int | None = None) -> None:
        """See `engine.progress.Progress`."""
        self._current = self._progress.add_task(label, total=total)

    def update(self, done: int, total: int | None = None) -> None:
        """See `engine.progress.Progress`."""
        if self._current is None:
            return
        if total is not None:
            self._progress.update(self._current, total=total)
        self._progress.update(self._current, completed=done)

    def end(self) -> None:
        """See `engine.progress.Progress`."""
        if self._current is not None:
            total = self._progress.tasks[self._current].total or 1
            self._progress.update(self._current, total=total, completed=total)
            self._current = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None and self._current is not None:
            self._fail(self._current)
        self._progress.stop()

    @contextmanager
    def task(self, description: str) -> Iterator[None]:
        """Shows a step of unknown length; marked done when the block ends without error."""
        task = self._progress.add_task(description, total=None)
        try:
            yield
        except BaseException:
            self._fail(task)
            raise
        self._progress.update(task, total=1, completed=1)

    def _fail(self, task: TaskID) -> None:
        self._progress.update(task, failed=True)
        self._progress.stop_task(task)
