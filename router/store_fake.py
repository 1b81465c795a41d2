"""A request store in memory, with failures on command, for tests and simulation."""

from __future__ import annotations

from dataclasses import replace

from pdserve.core.errors import UnavailableError, UnknownError
from pdserve.router.record import (
    PHASES,
    TERMINAL_PHASE,
    RecordChange,
    RequestRecord,
    RequestState,
    duplicate_error,
)
from pdserve.router.request_store import still_running_error


class FakeStore:
    """`RequestStore` in a dict.

    Attributes:
        records: What is stored.
        history: Every state that a request went through, in order.
        down: True: awaited calls fail, changes are lost.
        clock: Owner epoch of the newest record.
    """

    def __init__(self) -> None:
        self.records: dict[str, RequestRecord] = {}
        self.history: dict[str, list[tuple[int, RequestState]]] = {}
        self.down = False
        self.clock = 0

    async def create(self, record: RequestRecord) -> int:
        """See `RequestStore`."""
        self._check()
        if known := self.records.get(record.request_id):
            raise duplicate_error(record.request_id, known.request_digest == record.request_digest, known.state)
        self.clock += 1
        self.records[record.request_id] = replace(record, owner_epoch=self.clock)
        self.history[record.request_id] = [(record.attempt, record.state)]
        return self.clock

    def update(self, change: RecordChange) -> None:
        """See `RequestStore`."""
        old = self.records.get(change.request_id)
        if old is None or self.down or old.owner_epoch != change.owner_epoch:
            return
        if PHASES[old.state] == TERMINAL_PHASE:
            return
        if (change.attempt, PHASES[change.state]) < (old.attempt, PHASES[old.state]):
            return
        values = {k: int(v) if k == "emitted_tokens" else v for k, v in change.fields.items()}
        new = replace(old, attempt=change.attempt, state=change.state, **values)  # type: ignore[arg-type]
        self.records[change.request_id] = new
        self.history[change.request_id].append((change.attempt, change.state))

    async def get(self, request_id: str) -> RequestRecord:
        """See `RequestStore`."""
        self._check()
        if request_id not in self.records:
            raise UnknownError(f"no request {request_id!r} is stored", reason="UNKNOWN_REQUEST")
        return self.records[request_id]

    async def delete(self, request_id: str) -> bool:
        """See `RequestStore`."""
        self._check()
        record = self.records.get(request_id)
        if record is not None and PHASES[record.state] != TERMINAL_PHASE:
            raise still_running_error(request_id)
        return self.records.pop(request_id, None) is not None

    def _check(self) -> None:
        if self.down:
            raise UnavailableError("the request store does not answer; retry soon", reason="STORE_UNAVAILABLE")
