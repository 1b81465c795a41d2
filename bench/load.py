"""Sends a workload and records when what came back: open loop (arrival times), closed loop (a limit on what runs)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pdserve.bench.workload import Item
from pdserve.core.clock import Clock


class RequestFailed(Exception):
    """A request did not end properly.

    Args:
        reason: Short and the same for all requests of one kind: they are counted by it.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Backend(Protocol):
    """What is measured."""

    async def send(self, item: Item, on_output: Callable[[], None]) -> int:
        """Runs one request to its end.

        Args:
            item: The request.
            on_output: Called at each piece of output.

        Returns:
            Tokens generated.

        Raises:
            RequestFailed: It was refused, failed or broke.
        """
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened to one request. Times are seconds of one clock.

    Attributes:
        item: The request.
        sent_s: When it was sent.
        output_s: When each piece of output came.
        end_s: When the stream ended.
        output_tokens: Tokens generated.
        error: Why it failed; None: it did not.
    """

    item: Item
    sent_s: float
    output_s: tuple[float, ...]
    end_s: float
    output_tokens: int
    error: str | None


async def run_load(
    items: Sequence[Item],
    backend: Backend,
    clock: Clock,
    max_concurrency: int | None,
    on_end: Callable[[Outcome], None],
) -> list[Outcome]:
    """Sends every item at its time and waits for all ends.

    Args:
        items: The workload.
        backend: Where to send it.
        clock: Time.
        max_concurrency: Requests in flight at most; later ones wait, and their times count from when they are sent.
        on_end: Called at the end of each request.

    Returns:
        One outcome per item, in their order.
    """
    start = clock.now()
    limit = asyncio.Semaphore(max_concurrency or len(items) or 1)

    async def one(item: Item) -> Outcome:
        if (wait_s := start + item.arrival_s - clock.now()) > 0:
            await clock.sleep(wait_s)
        async with limit:
            outcome = await _measure(item, backend, clock)
        on_end(outcome)
        return outcome

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(item)) for item in items]
    return [task.result() for task in tasks]


async def _measure(item: Item, backend: Backend, clock: Clock) -> Outcome:
    output_s: list[float] = []
    tokens, error = 0, None
    sent_s = clock.now()
    try:
        tokens = await backend.send(item, lambda: output_s.append(clock.now()))
    except RequestFailed as e:
        error = e.reason
    return Outcome(item, sent_s, tuple(output_s), clock.now(), tokens, error)
