"""StreamPlaces: how many control streams a prefill worker keeps, whoever opens them.

| a stream | how many at once |
| --- | --- |
| that has not said hello | MAX_MUTE; each ends after a few seconds |
| of one process of a decode worker | MAX_PER_WORKER: it needs one; lost ones end late at a worker that hung |
| of all of them | MAX_STREAMS |

Not counted are connections: a proxy may carry the streams of many workers over one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from pdserve.core.errors import TransferError

MAX_STREAMS = 256
MAX_PER_WORKER = 16
MAX_MUTE = 64


class StreamPlaces:
    """Counts streams, and refuses those that are too many. Event loop only.

    Args:
        max_streams: Of all decode workers.
        max_per_worker: Of one process.
        max_mute: That have not said hello.
    """

    def __init__(
        self, max_streams: int = MAX_STREAMS, max_per_worker: int = MAX_PER_WORKER, max_mute: int = MAX_MUTE
    ) -> None:
        self._max_streams, self._max_per_worker, self._max_mute = max_streams, max_per_worker, max_mute
        self._num_mute = 0
        self._of_worker = Counter[tuple[str, str]]()

    @contextmanager
    def mute(self) -> Iterator[None]:
        """A place until its hello.

        Raises:
            TransferError: There is none.
        """
        if self._num_mute >= self._max_mute:
            raise _too_many(f"{self._num_mute} others have not said who they are")
        self._num_mute += 1
        try:
            yield
        finally:
            self._num_mute -= 1

    @contextmanager
    def of(self, worker_id: str, incarnation: str) -> Iterator[None]:
        """A place from its hello to its end.

        Args:
            worker_id: As the hello says, of bounded length.
            incarnation: The same.

        Raises:
            TransferError: There is none.
        """
        key = (worker_id, incarnation)
        if self._of_worker[key] >= self._max_per_worker:
            raise _too_many(f"this process of {worker_id} has {self._max_per_worker}")
        if (num := self._of_worker.total()) >= self._max_streams:
            raise _too_many(f"decode workers have {num}")
        self._of_worker[key] += 1
        try:
            yield
        finally:
            self._of_worker[key] -= 1
            if not self._of_worker[key]:
                del self._of_worker[key]


def _too_many(why: str) -> TransferError:
    message = f"this prefill worker takes no more control streams: {why}"
    return TransferError(message, reason="TOO_MANY_STREAMS", status="FAILED_PRECONDITION")
