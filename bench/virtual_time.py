"""An event loop on virtual time: the real control plane runs, waits cost nothing, and every run of a seed is the same.

Time stands still while anything can run and jumps to the next timer when nothing can. There is no I/O and no thread: a
coroutine that waits for either is reported as stuck instead of waiting for ever.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class StuckError(RuntimeError):
    """Nothing can run and no timer is set: something waits for what will never come."""


class _NoIo(selectors.BaseSelector):
    """A selector that never waits: it moves the loop's clock instead."""

    def __init__(self) -> None:
        self.loop: VirtualTimeLoop
        self._map: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = selectors.SelectorKey(fileobj, fileobj if isinstance(fileobj, int) else fileobj.fileno(), events, data)
        self._map[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._map.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise StuckError("nothing can run and no timer is set; some coroutine waits for ever")
        self.loop.advance(timeout)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._map


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """See the module. `VirtualClock` and `asyncio.sleep` both follow it."""

    def __init__(self) -> None:
        self._virtual_now = 0.0
        selector = _NoIo()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._virtual_now

    def advance(self, seconds: float) -> None:
        """Moves time; called when nothing can run before the next timer."""
        if seconds > 0:
            self._virtual_now += seconds


class VirtualClock:
    """`core.clock.Clock` on the running loop's time."""

    def now(self) -> float:
        """See `Clock`."""
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        """See `Clock`."""
        await asyncio.sleep(seconds)

    async def wait_for(self, awaitable: Any, timeout_s: float | None) -> Any:
        """See `Clock`."""
        async with asyncio.timeout(timeout_s):  # asyncio.wait_for of Python 3.11 may swallow a cancellation
            return await awaitable


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end on virtual time, like `asyncio.run`.

    Raises:
        StuckError: It waits for something that never comes.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
