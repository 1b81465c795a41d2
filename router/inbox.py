"""What a request waits for, in one queue: news of its workers, its cancellation, and changes of the worker table.

Bounded by the request itself: a worker sends at most `max_tokens` deltas per choice and attempt.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from pdserve.core.errors import PdserveError
from pdserve.v1 import worker_pb2 as pb


@dataclass(frozen=True, slots=True)
class Reservation:
    """A decode worker answered a Submit."""

    worker_id: str
    attempt: int
    result: pb.ReservationResult


@dataclass(frozen=True, slots=True)
class Output:
    """News of a sequence."""

    worker_id: str
    attempt: int
    output: pb.SequenceOutput


@dataclass(frozen=True, slots=True)
class Died:
    """A worker's session ended; nothing more of the attempt comes from there."""

    worker_id: str
    attempt: int
    error: PdserveError


@dataclass(frozen=True, slots=True)
class Cancel:
    """End the request.

    Attributes:
        reason: UPPER_SNAKE_CASE, for the workers.
        error: What the stream ends with; None: Finished(CANCELLED).
    """

    reason: str
    error: PdserveError | None = None


@dataclass(frozen=True, slots=True)
class WorkersChanged:
    """Another route may be possible now."""


AttemptEvent = Reservation | Output | Died
Event = AttemptEvent | Cancel | WorkersChanged


class Inbox:
    """Events of one request, in order of arrival."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Event] = asyncio.Queue()

    def put(self, event: Event) -> None:
        """Adds an event; never blocks."""
        self._queue.put_nowait(event)

    async def get(self) -> Event:
        """The oldest event."""
        return await self._queue.get()
