"""What every service process does at its edges: the event loop, stop signals, the ready line."""

from __future__ import annotations

import asyncio
import importlib
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Catches SIGTERM and SIGINT while entered: the first asks for a drain, the second for an end now."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.now = asyncio.Event()

    def _on_signal(self) -> None:
        (self.now if self.drain.is_set() else self.drain).set()

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)


def ready_line(role: str, *, grpc: str, metrics: str | None = None, data: str | None = None) -> str:
    """The line that a launcher waits for on stdout."""
    return f"READY {role} grpc={grpc} metrics={metrics or '-'} data={data or '-'}"


def announce(line: str) -> None:
    """Writes a line to stdout at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def run_async(main: Coroutine[Any, Any, int], *, uvloop: bool = True) -> int:
    """Runs a process's main coroutine on its one event loop; with uvloop where it is installed and wanted."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if uvloop:
        with suppress(ImportError):
            factory = importlib.import_module("uvloop").new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)
