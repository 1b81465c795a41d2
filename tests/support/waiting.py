"""Waiting for a condition with a deadline: never a bare sleep in a test."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable


async def eventually(condition: Callable[[], object], timeout_s: float = 10.0, every_s: float = 0.01):
    """Asks `condition` (plain or async) until it is true; returns what it gave.

    Raises:
        TimeoutError: It stayed false.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"still false after {timeout_s:g} s: {inspect.getsource(condition).strip()}")
        await asyncio.sleep(every_s)
