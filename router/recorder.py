"""Writes the life of one request into its record: state changes in the words of `router.record`."""

from __future__ import annotations

from pdserve.core.errors import PdserveError
from pdserve.router.policy import Route
from pdserve.router.record import RecordChange, RequestState
from pdserve.router.request_store import RequestStore


class Recorder:
    """One request's writer; nothing here waits.

    Args:
        store: Where the record lives.
        request_id: The request.
        owner_epoch: Epoch of this router's ownership.

    Attributes:
        attempt: Retry number in force.
    """

    def __init__(self, store: RequestStore, request_id: str, owner_epoch: int) -> None:
        self._store = store
        self._request_id = request_id
        self._epoch = owner_epoch
        self.attempt = 1

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
        self._store.update(
            RecordChange(
                request_id=self._request_id,
                attempt=self.attempt,
                owner_epoch=self._epoch,
                state=state,
                fields=fields,
            )
        )
