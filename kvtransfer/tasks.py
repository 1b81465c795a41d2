"""Waiting for work in threads that must be over before anything else may happen."""

from __future__ import annotations

import asyncio
from typing import Any


async def settled(waiter: asyncio.Future[Any]) -> None:
    """Waits until it is done, however often the caller is cancelled meanwhile; its failure is taken note of."""
    while not waiter.done():
        try:
            await asyncio.wait([waiter])
        except asyncio.CancelledError:
            continue
    if not waiter.cancelled():
        waiter.exception()  # the cancellation is what is told
