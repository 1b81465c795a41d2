"""Writes the life of one request into its record: state changes in the words of `router.record`."""

from __future__ import annotations

from pdserve.core.errors import PdserveError
from pdserve.router.policy import Route
from pdserve.router.record import RecordChange, RequestRecord, RequestState
from pdserve.router.request_store import RequestStore


class Recorder:
    """One request's writer; nothing but `create` waits.

    Args:
        store: Where the record lives.
        request_id: The request.

    Attributes:
        owner_epoch: Epoch of this router's ownership, from `create` on; 0 before.
        attempt: Retry number in force.
        state: The newest one.
    """

    def __init__(self, store: RequestStore, request_id: str) -> None:
        self._store = store
        self._request_id = request_id
        self.owner_epoch = 0
        self.attempt = 1
        self.state = RequestState.QUEUED

    async def create(self, record: RequestRecord) -> None:
        """Stores the record; see `RequestStore.create`."""
        self.owner_epoch = await self._store.create(record)

    def placed(self, attempt: int, route: Route) -> None:
        """Workers were chosen."""
        self.attempt = attempt
        prefill = route.prefill or route.decode
        self._write(RequestState.PLACED, prefill_worker=prefill.worker_id, decode_worker=route.decode.worker_id)

    def decoding(self) -> None:
        """The first token was released."""
        self._write(RequestState.DECODING)

    def finished(self, finish_reason: str, emitted_tokens: int) -> None:
        """The stream ended properly."""
        self._write(RequestState.FINISHED, finish_reason=finish_reason, emitted_tokens=str(emitted_tokens))

    def cancelled(self, emitted_tokens: int) -> None:
        """The client or a deadline ended it."""
        self._write(RequestState.CANCELLED, finish_reason="cancelled", emitted_tokens=str(emitted_tokens))

    def failed(self, error: PdserveError, emitted_tokens: int) -> None:
        """It failed."""
        self._write(
            RequestState.FAILED,
            error_status=error.status,
            error_reason=error.reason,
            error_message=error.message,
            emitted_tokens=str(emitted_tokens),
        )

    def _write(self, state: RequestState, **fields: str) -> None:
        assert self.owner_epoch, "no record yet"
        self.state = state
        self._store.update(
            RecordChange(
                request_id=self._request_id,
                attempt=self.attempt,
                owner_epoch=self.owner_epoch,
                state=state,
                fields=fields,
            )
        )
