"""Time as an argument: the one seam between the code and the wall clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Clock(Protocol):
    """Monotonic time and the waits on it. All values are seconds."""

    def now(self) -> float:
        """Monotonic seconds; only differences mean something."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Returns after `seconds` of this clock."""
        ...

    async def wait_for(self, awaitable: Awaitable[T], timeout_s: float | None) -> T:
        """Awaits with a limit on this clock.

        Raises:
            TimeoutError: `timeout_s` passed first; the awaitable was cancelled.
        """
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """See `Clock`."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """See `Clock`."""
        await asyncio.sleep(seconds)

    async def wait_for(self, awaitable: Awaitable[T], timeout_s: float | None) -> T:
        """See `Clock`."""
        async with asyncio.timeout(timeout_s):  # asyncio.wait_for of Python 3.11 may swallow a cancellation
            return await awaitable
