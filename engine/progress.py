"""Progress of long steps (fetch, convert, load, profile): a small protocol that the command line shows as bars."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import TaskID


class Progress(Protocol):
    """Told about one long step at a time, from one thread."""

    def begin(self, label: str, total: int | None = None) -> None:
        """A step starts.

        Args:
            label: What is being done, for a person.
            total: Amount of work in the step's own unit (bytes, files); None when unknown.
        """
        ...

    def update(self, done: int, total: int | None = None) -> None:
        """The step has done `done` of `total` (None: as before)."""
        ...

    def end(self) -> None:
        """The step is over."""
        ...


class SilentProgress:
    """Shows nothing."""

    def begin(self, label: str, total: int | None = None) -> None:
        """See `Progress`."""

    def update(self, done: int, total: int | None = None) -> None:
        """See `Progress`."""

    def end(self) -> None:
        """See `Progress`."""


class RichProgress:
    """Bars on stderr: bar, percentage and elapsed time; plain lines where stderr is no terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        self._console = Console(stderr=True)
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._task: TaskID | None = None

    def begin(self, label: str, total: int | None = None) -> None:
        """See `Progress`."""
        if not self._console.is_terminal:
            self._console.print(label)
            return
        self._bars.start()
        self._task = self._bars.add_task(label, total=total)

    def update(self, done: int, total: int | None = None) -> None:
        """See `Progress`."""
        if self._task is None:
            return
        if total is not None:
            self._bars.update(self._task, total=total)
        self._bars.update(self._task, completed=done)

    def end(self) -> None:
        """See `Progress`."""
        if self._task is None:
            return
        total = self._bars.tasks[self._task].total or 1
        self._bars.update(self._task, total=total, completed=total)
        self._bars.stop()
        self._task = None
