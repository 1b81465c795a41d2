"""Background tasks of a worker: owned, ended together; one that fails ends the process with its reason."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pdserve.core.errors import PdserveError

_log = logging.getLogger(__name__)
T = TypeVar("T")


async def in_own_thread(work: Callable[..., T], *args: object) -> T:
    """Runs long blocking work in a thread of its own. A caller that is cancelled, and the end of the event loop, do not
    wait for it; the end of the interpreter does."""
    executor = ThreadPoolExecutor(1)
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, work, *args)
    finally:
        executor.shutdown(wait=False)


class Background:
    """Owner of tasks.

    Args:
        fail: Told of a task that raised.
    """

    def __init__(self, fail: Callable[[PdserveError], None]) -> None:
        self._fail = fail
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Starts a task."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    async def wait(self) -> None:
        """Waits until all tasks have ended, those too that they start meanwhile."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def cancel(self) -> None:
        """Ends all tasks. Idempotent."""
        for task in list(self._tasks):
            task.cancel()
        await self.wait()

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, PdserveError):
            _log.error("task %s failed", task.get_name(), exc_info=error)
            error = PdserveError(f"internal error in {task.get_name()}: {type(error).__name__}: {error}")
        self._fail(error)
