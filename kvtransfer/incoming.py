"""IncomingTransfer: one transfer from one source, on decode's side. It carries out what `handoff.on_sink` says.

Life: `TransferClient` puts it on the control stream of its source -> the welcome is there: it opens, or tells its owner
and waits for `open` -> watermarks -> pulls -> manifest -> `result`. `result` and `abort` return only when nothing of it
writes into the destinations any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from pdserve.core.clock import Clock
from pdserve.core.errors import TransferError
from pdserve.kvtransfer import handoff
from pdserve.kvtransfer.arrival import Arrival
from pdserve.kvtransfer.control_messages import OUTCOMES, facts_of, reason_of
from pdserve.kvtransfer.control_stream import ControlStream
from pdserve.kvtransfer.convert import HeadShard
from pdserve.kvtransfer.handoff import SinkTransfer, TransferState
from pdserve.kvtransfer.timeline import Timeline, TransferResult
from pdserve.kvtransfer.transport import SourcePageRef
from pdserve.v1 import kvtransfer_pb2 as pb

log = logging.getLogger(__name__)
OUTCOME_OF_STATE = {state: outcome for outcome, state in OUTCOMES.items()}
NO_FAILURES = ("ABORTED", "FINISHED")
"""Reasons for which prefill closes a transfer that is not wanted any more."""


def log_failure(
    transfer_id: str, request_id: str, source: str, state: TransferState, reason: str, message: str
) -> None:
    """Names a transfer that failed; one that the request's end has ended, on either side, did not."""
    if state is not TransferState.FAILED or reason in NO_FAILURES:
        return
    log.warning(
        "KV transfer %s of request %s from %s failed: %s%s",
        transfer_id,
        request_id or "(unknown)",
        source,
        reason,
        f": {message}" if message else "",
    )


class PartOwner(Protocol):
    """Whom a transfer tells that is one of several sources' parts. Called on the event loop; must not block."""

    def joined(self, shard: HeadShard) -> None:
        """The source said which heads it has; `IncomingTransfer.open` may be called from now on."""
        ...

    def decided(self) -> None:
        """How it ends is known; called once."""
        ...


class IncomingTransfer:
    """One transfer from one source; made by `TransferClient.start`, or as a part by `TransferClient.gather`.

    Args:
        transfer_id: The transfer.
        transfer: Where it begins, counted in our pages.
        destinations: Page ids of the whole prompt here.
        stream: To its source.
        clock: Time.
        request_id: For logs.
        over: Called once when nothing of it writes into the destinations any more.
        owner: Of a part, which opens when it says so; None: it opens with the welcome.
    """

    def __init__(
        self,
        transfer_id: str,
        transfer: SinkTransfer,
        destinations: Sequence[int],
        stream: ControlStream,
        clock: Clock,
        request_id: str,
        over: Callable[[], None],
        owner: PartOwner | None = None,
    ) -> None:
        self.transfer_id = transfer_id
        self._over, self._owner = over, owner
        self._joined = self._opened = False
        self._transfer, self._destinations = transfer, tuple(destinations)
        self._stream, self._clock, self._request_id = stream, clock, request_id
        self._arrival: Arrival | None = None
        self._pull: asyncio.Task[handoff.PullEnded] | None = None
        self._done = asyncio.get_running_loop().create_future()
        self._decided = asyncio.get_running_loop().create_future()
        self._message = ""
        self._timeline = Timeline()

    @property
    def state(self) -> TransferState:
        """Where it is."""
        return self._transfer.state

    @property
    def num_late(self) -> int:
        """Messages dropped because they came too late or twice."""
        return self._transfer.num_late

    async def failure(self) -> TransferError | None:
        """Waits until it is known how it ends; safe to cancel, and to call again.

        Returns:
            None when it is complete; else why not, and pages may be written until `result` raises the same.
        """
        await asyncio.shield(self._decided)
        return self.error()

    def error(self) -> TransferError | None:
        """`failure` of a transfer that is known to end."""
        t = self._transfer
        if t.state is TransferState.COMPLETE and t.manifest is not None:
            return None
        return TransferError(
            f"KV transfer {self.transfer_id} from {self._stream.peer.worker_id} ended {t.state}: "
            f"{self._message or t.reason}",
            reason=t.reason,
        )

    async def result(self) -> TransferResult:
        """Waits for the end; safe to cancel, and to call again.

        Raises:
            TransferError: It did not complete; `reason` says why. Nothing writes into the destinations any more.
        """
        await asyncio.shield(self._done)
        if (error := await self.failure()) is not None:
            raise error
        return self.outcome()

    def facts(self) -> handoff.ManifestFacts:
        """What prefill said of the prompt; it must be complete."""
        assert self._transfer.manifest is not None
        return self._transfer.manifest

    def outcome(self) -> TransferResult:
        """`result` of a transfer that is complete."""
        t, manifest = self._transfer, self.facts()
        first, last = t.first_pull_s or 0.0, t.last_pull_s or 0.0
        hidden = min(max((t.manifest_s or 0.0) - first, 0.0), last - first)
        return TransferResult(
            manifest.token_id,
            manifest.index,
            manifest.finished,
            t.num_bytes,
            last - first,
            hidden,
            t.num_asked,
            self._stream.transport,
            t.manifest_s or 0.0,
            self._timeline.ranges,
        )

    async def abort(self, reason: str = "ABORTED") -> None:
        """Ends it and returns when nothing writes into the destinations any more. Idempotent, in every state."""
        self.end(reason)
        await asyncio.shield(self._done)

    def end(self, reason: str) -> None:
        """Begins what `abort` waits for."""
        self._feed(handoff.Ended(TransferState.ABORTED, reason))

    def opening(self) -> pb.ControlRequest | None:
        """Its first message, once the welcome is there; a part has none before its owner lets it `open`."""
        inlet = self._stream.inlet
        assert inlet is not None  # set with the welcome
        if self._transfer.state in handoff.TERMINAL:
            return self._claim()  # what closes it is queued behind
        if self._owner is not None:
            self._joined = True
            self._owner.joined(inlet.shard)
            return None
        if inlet.fault is not None:
            told = f"prefill worker {self._stream.peer.worker_id} has not all KV heads: {inlet.fault}"
            self._message = self._message or told
            self._feed(handoff.Ended(TransferState.FAILED, "SHARDS"))
            return self._claim()
        return self._open_message()

    def open(self) -> None:
        """Asks the source for its pages."""
        self._stream.send(self._open_message())

    def _open_message(self) -> pb.ControlRequest:
        return self._opening(self._arriving().num_cached_pages)

    def _claim(self) -> pb.ControlRequest:
        """Opens it without a page, only to close it: a source ends a transfer for nobody but who opened it."""
        return self._opening(self._arriving().num_pages)

    def _opening(self, num_cached_pages: int) -> pb.ControlRequest:
        self._opened = True
        return pb.ControlRequest(
            open=pb.OpenTransfer(
                transfer_id=self.transfer_id, num_cached_pages=num_cached_pages, request_id=self._request_id
            )
        )

    def _arriving(self) -> Arrival:
        """Prefill's layout is known; from the first call on, everything counts in prefill's pages."""
        if self._arrival is None:
            t, inlet = self._transfer, self._stream.inlet
            assert inlet is not None  # set with the welcome
            self._arrival = a = inlet.arrival(self._destinations, t.num_cached_pages, t.num_tokens)
            self._transfer = replace(t, num_pages=a.num_pages, num_cached_pages=a.num_cached_pages)
        return self._arrival

    def on_message(self, message: pb.ControlResponse) -> None:
        """A message of prefill for this transfer."""
        kind = message.WhichOneof("message")
        if not self._opened and kind != "closed":
            self._feed(handoff.Ended(TransferState.FAILED, "NOT_OPENED"))  # nobody asked it yet
            return
        self._arriving()
        match kind:
            case "watermark":
                pages = tuple(SourcePageRef(p.page_id, p.generation, p.checksum) for p in message.watermark.pages)
                if self._stream.checks_pages and not all(p.checksum for p in pages):
                    self._feed(handoff.Ended(TransferState.FAILED, "NO_CHECKSUM"))
                else:
                    self._feed(handoff.PagesFinal(message.watermark.first_page, pages))
                    known = self._transfer.num_cached_pages + len(self._transfer.known)
                    self._timeline.announced(known, self._clock.now())
            case "manifest":
                self._feed(handoff.Computed(facts_of(message.manifest)))
            case "closed":
                self._feed(handoff.Ended(TransferState.FAILED, reason_of(message.closed.reason, "CLOSED"), True))

    def on_overdue(self, address: str, error: TransferError) -> None:
        """Its pull is too slow, and goes on until nothing writes any more: the transfer ends now.

        Args:
            address: Data address of the pull's source; of another source it is another part's.
            error: Why.
        """
        said = self._stream.welcome
        if said is None or said.data_address != address:
            return
        self._message = self._message or error.message
        self._feed(handoff.Ended(TransferState.FAILED, error.reason))

    def on_stream_lost(self, error: TransferError) -> None:
        """The control stream died: so does the transfer."""
        self._message = self._message or error.message
        self._feed(handoff.Ended(TransferState.FAILED, error.reason, by_peer=True))

    def _feed(self, event: handoff.SinkEvent) -> None:
        is_over = False
        self._transfer, actions = handoff.on_sink(self._transfer, event, self._clock.now())
        for action in actions:
            match action:
                case handoff.Pull():
                    self._pull = asyncio.get_running_loop().create_task(self._run_pull(action))
                    self._pull.add_done_callback(self._on_pull_done)
                case handoff.CancelPull():
                    assert self._pull is not None
                    self._pull.cancel()
                case handoff.SendClosed():
                    if self._joined and not self._opened:
                        self._stream.send(self._claim())
                    outcome = OUTCOME_OF_STATE[action.state]
                    closed = pb.CloseTransfer(transfer_id=self.transfer_id, outcome=outcome, reason=action.reason)
                    self._stream.send(pb.ControlRequest(close=closed))
                case handoff.Resolve():
                    self._stream.forget(self.transfer_id)
                    is_over = True
        if self._transfer.state in handoff.TERMINAL and not self._decided.done():
            self._decided.set_result(None)
            if self._owner is None:
                self._log_failure()
            else:
                self._owner.decided()
        if is_over:
            self._done.set_result(None)
            self._over()

    def _log_failure(self) -> None:
        t, stream = self._transfer, self._stream
        over = f" over {stream.transport}" if stream.transport else ""
        source = f"{stream.peer.worker_id}{over}"
        log_failure(self.transfer_id, self._request_id, source, t.state, t.reason, self._message)

    async def _run_pull(self, action: handoff.Pull) -> handoff.PullEnded:
        said = self._stream.welcome
        assert said is not None
        began_s = self._clock.now()
        try:
            num_bytes = await self._arriving().pull(
                said.data_address, said.data_token, self.transfer_id, action.position, action.pages
            )
        except TransferError as e:
            self._message = self._message or e.message
            return handoff.PullEnded(0, e.reason)
        now, transport = self._clock.now(), self._stream.transport
        self._timeline.pulled(action.position, len(action.pages), num_bytes, began_s, now, transport)
        return handoff.PullEnded(num_bytes)

    def _on_pull_done(self, task: asyncio.Task[handoff.PullEnded]) -> None:
        """The sink has returned (or never began): nothing writes any more."""
        if task.cancelled():
            self._feed(handoff.PullEnded(0, "CANCELLED"))
        elif (error := task.exception()) is not None:
            self._feed(handoff.PullEnded(0, "SINK_FAILED"))
            raise error
        else:
            self._feed(task.result())
