"""Work in threads that must be over before anything else may happen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from pdserve.core.errors import TransferError

T = TypeVar("T")


def submit(threads: Executor, work: Callable[..., T], *args: object) -> Future[T]:
    """Has a thread do it.

    An executor that cannot start a thread raises, but keeps the work, and a later thread does it all the same: into
    pages that are somebody else's by then. What this refuses is never done.

    Raises:
        TransferError: NO_THREAD: the system gives no more of them; the work has not begun and never will.
    """
    future = Future[T]()
    try:
        threads.submit(_do, future, work, args)
    except RuntimeError as e:
        if future.cancel():
            raise TransferError(f"no thread to move pages: {e}", reason="NO_THREAD") from e
    return future


def _do(future: Future[T], work: Callable[..., T], args: tuple[object, ...]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work(*args)
    except BaseException as e:  # noqa: BLE001 - who waits is told
        future.set_exception(e)
        del future  # the traceback of its exception refers to this frame
    else:
        future.set_result(result)


async def settled(waiter: asyncio.Future[Any]) -> None:
    """Waits until it is done, however often the caller is cancelled meanwhile; its failure is taken note of."""
    while not waiter.done():
        try:
            await asyncio.wait([waiter])
        except asyncio.CancelledError:
            continue
    if not waiter.cancelled():
        waiter.exception()  # the cancellation is what is told


async def until_over(work: Future[T], stop: Callable[[], object]) -> T:
    """Waits for work; when this returns or raises, also because the caller was cancelled, the work is over.

    Args:
        work: What a thread does, or will do.
        stop: Makes it end soon; called once the caller is cancelled.

    Returns:
        What the work returned. What it raised is raised.
    """
    waiter = asyncio.wrap_future(work)
    try:
        return await asyncio.shield(waiter)
    except asyncio.CancelledError:
        stop()
        await settled(waiter)
        raise
