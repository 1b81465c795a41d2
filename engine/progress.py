"""Progress of long steps (fetch, convert, load, profile): a small protocol that `cli.progress` shows as bars."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
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
