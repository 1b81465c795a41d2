"""TransferClient: the decode side of the control plane. One stream per prefill process, one pull at a time per
transfer.

Life of an incoming transfer: `start` (destinations are FILLING) -> watermarks -> pulls -> manifest -> `result`. However
it ends, `result` and `abort` return only when nothing writes into the destinations any more; then they are VALID or may
be freed. A transfer waits for prefill as long as its control stream lives: prefill sends a heartbeat every second.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import grpc.aio

from pdserve.core.clock import Clock
from pdserve.core.errors import TransferError
from pdserve.core.grpc_server import channel_options
from pdserve.core.layout import KVLayout
from pdserve.kvtransfer import handoff
from pdserve.kvtransfer.arrival import Arrival, Stages
from pdserve.kvtransfer.control_messages import OUTCOMES, facts_of, reason_of
from pdserve.kvtransfer.control_stream import ControlStream
from pdserve.kvtransfer.handoff import SinkTransfer, TransferState
from pdserve.kvtransfer.timeline import Timeline, TransferResult
from pdserve.kvtransfer.transport import PageSink, QuarantiningSink, SourcePageRef
from pdserve.v1 import kvtransfer_pb2 as pb

log = logging.getLogger(__name__)
MAX_MESSAGE_BYTES = 16 << 20  # a watermark names its pages in about 20 bytes each
OUTCOME_OF_STATE = {state: outcome for outcome, state in OUTCOMES.items()}
NO_FAILURES = ("ABORTED", "FINISHED")
"""Reasons for which prefill closes a transfer that is not wanted any more."""


@dataclass(frozen=True, slots=True)
class TransferPeer:
    """A prefill process, as the router named it.

    Attributes:
        worker_id: Stable name.
        address: host:port of its gRPC endpoint.
        incarnation: Process start, as hex; another process at the address refuses.
    """

    worker_id: str
    address: str
    incarnation: str


class IncomingTransfer:
    """One transfer; made by `TransferClient.start`."""

    def __init__(
        self,
        transfer_id: str,
        transfer: SinkTransfer,
        destinations: Sequence[int],
        stream: ControlStream,
        clock: Clock,
        request_id: str,
    ) -> None:
        self.transfer_id = transfer_id
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
        t = self._transfer
        assert t.manifest is not None
        first, last = t.first_pull_s or 0.0, t.last_pull_s or 0.0
        hidden = min(max((t.manifest_s or 0.0) - first, 0.0), last - first)
        return TransferResult(
            t.manifest.token_id,
            t.manifest.index,
            t.manifest.finished,
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
        self._feed(handoff.Ended(TransferState.ABORTED, reason))
        await asyncio.shield(self._done)

    def opening(self) -> pb.ControlRequest:
        """Its first message."""
        cached, asked_by = self._arriving().num_cached_pages, self._request_id
        opening = pb.OpenTransfer(transfer_id=self.transfer_id, num_cached_pages=cached, request_id=asked_by)
        return pb.ControlRequest(open=opening)

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
        self._arriving()
        match message.WhichOneof("message"):
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

    def on_overdue(self, error: TransferError) -> None:
        """Its pull is too slow, and goes on until nothing writes any more: the transfer ends now."""
        self._message = self._message or error.message
        self._feed(handoff.Ended(TransferState.FAILED, error.reason))

    def on_stream_lost(self, error: TransferError) -> None:
        """The control stream died: so does the transfer."""
        self._message = self._message or error.message
        self._feed(handoff.Ended(TransferState.FAILED, error.reason, by_peer=True))

    def _feed(self, event: handoff.SinkEvent) -> None:
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
                    outcome = OUTCOME_OF_STATE[action.state]
                    closed = pb.CloseTransfer(transfer_id=self.transfer_id, outcome=outcome, reason=action.reason)
                    self._stream.send(pb.ControlRequest(close=closed))
                case handoff.Resolve():
                    self._stream.forget(self.transfer_id)
                    self._done.set_result(None)
        if self._transfer.state in handoff.TERMINAL and not self._decided.done():
            self._decided.set_result(None)
            self._log_failure()

    def _log_failure(self) -> None:
        """Names a failed transfer; one that the request's end has ended, on either side, did not fail."""
        t, stream = self._transfer, self._stream
        if t.state is not TransferState.FAILED or t.reason in NO_FAILURES:
            return
        over = f" over {stream.transport}" if stream.transport else ""
        log.warning(
            "KV transfer %s of request %s from %s%s failed: %s%s",
            self.transfer_id,
            self._request_id or "(unknown)",
            stream.peer.worker_id,
            over,
            t.reason,
            f": {self._message}" if self._message else "",
        )

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
        self._timeline.pulled(action.position, len(action.pages), num_bytes, began_s, self._clock.now())
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


class TransferClient:
    """Pulls transfers into one decode worker's pool.

    Args:
        worker_id: This worker's name.
        incarnation: This process's start, as hex.
        identity_digest: Must equal prefill's.
        layout: This pool's layout.
        sinks: Data planes into this pool by name, most wanted first; closed by `close`.
        clock: Time.
        stages: For peers whose layout is another; closed by `close`. None: those are refused.
        integrity: "host": only pages with checksums are taken; "none": prefill decides.
        host_id: See `negotiation.host_id`; empty: no plane within the host.
        open_channel: Makes a gRPC channel to host:port; None: a plain one.
        connect_timeout_s: Limit for the first answer of a peer, seconds.
        peer_timeout_s: A peer silent for this long is taken for dead, seconds.
        refusal: Says why the TLS of a gRPC server at host:port refuses this process, or None; asked in a thread when
            one ended a stream before its welcome. None: not asked.
        expect: Told, once they are reserved, of the pages that a transfer will write; must not block. None: nobody is.
    """

    def __init__(
        self,
        *,
        worker_id: str,
        incarnation: str,
        identity_digest: bytes,
        layout: KVLayout,
        sinks: Mapping[str, PageSink],
        clock: Clock,
        stages: Stages | None = None,
        integrity: str = "host",
        host_id: str = "",
        open_channel: Callable[[str], grpc.aio.Channel] | None = None,
        connect_timeout_s: float = 5.0,
        peer_timeout_s: float = 3.0,
        refusal: Callable[[str], str | None] | None = None,
        expect: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        self.worker_id, self.incarnation, self.identity_digest = worker_id, incarnation, identity_digest
        self.layout, self.clock, self.integrity = layout, clock, integrity
        self.open_channel = open_channel or _plain_channel
        self.connect_timeout_s, self.peer_timeout_s = connect_timeout_s, peer_timeout_s
        self.sinks, self.host_id = dict(sinks), host_id
        self.stages, self.refusal = stages, refusal
        self._expect = expect
        self._streams: dict[tuple[str, str], ControlStream] = {}
        self._transfers: dict[str, IncomingTransfer] = {}
        self._quarantining = [s for s in self.sinks.values() if isinstance(s, QuarantiningSink)]
        for sink in self._quarantining:
            sink.on_overdue(self._on_overdue)
        if stages is not None:
            stages.on_overdue(self._on_overdue)
        self._closed = False

    @property
    def num_quarantined(self) -> int:
        """Pages of failed transfers into which something may still write; callable from any thread."""
        in_pool = sum(sink.num_quarantined for sink in self._quarantining)
        return in_pool + (self.stages.num_quarantined if self.stages else 0)

    @property
    def num_open(self) -> int:
        """Transfers that have not ended."""
        return len(self._transfers)

    def start(
        self,
        transfer_id: str,
        peer: TransferPeer,
        *,
        num_cached_pages: int,
        destinations: Sequence[int],
        expected_num_tokens: int,
        expected_digest: bytes,
        request_id: str = "",
    ) -> IncomingTransfer:
        """Opens a transfer; call it on the event loop, once the destinations are reserved.

        Args:
            transfer_id: The transfer, minted by the router for this attempt.
            peer: Who computes the prompt.
            num_cached_pages: Leading prompt pages that are here already; they are not pulled.
            destinations: Page ids of ALL prompt pages in prompt order, cached ones included.
            expected_num_tokens: Tokens whose KV the manifest must name.
            expected_digest: Prompt digest that the manifest must carry.
            request_id: For logs and traces.

        Raises:
            TransferError: A transfer of that id is open.
        """
        if self._closed:
            raise TransferError("the transfer client is closed", reason="CLIENT_CLOSED")
        if transfer_id in self._transfers:
            raise TransferError(f"transfer {transfer_id} is open", reason="DUPLICATE_TRANSFER", status="ALREADY_EXISTS")
        key = (peer.address, peer.incarnation)
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = ControlStream(self, peer)
        state = SinkTransfer(len(destinations), num_cached_pages, expected_num_tokens, expected_digest)
        transfer = IncomingTransfer(transfer_id, state, destinations, stream, self.clock, request_id)
        stream.transfers[transfer_id] = self._transfers[transfer_id] = transfer
        stream.send(transfer.opening)
        if self._expect is not None:
            self._expect(destinations[num_cached_pages:])
        return transfer

    def forget(self, transfer_id: str) -> None:
        """The transfer has ended."""
        self._transfers.pop(transfer_id, None)

    def _on_overdue(self, transfer_id: str, error: TransferError) -> None:
        if (transfer := self._transfers.get(transfer_id)) is not None:
            transfer.on_overdue(error)

    def on_stream_ended(self, stream: ControlStream) -> None:
        """A stream died; the next `start` opens another."""
        key = (stream.peer.address, stream.peer.incarnation)
        if self._streams.get(key) is stream:
            del self._streams[key]

    async def close(self) -> None:
        """Ends all streams and transfers; returns when nothing writes into the pool any more. Idempotent."""
        self._closed = True
        streams = list(self._streams.values())
        for stream in streams:
            stream.task.cancel()
        await asyncio.gather(*(s.task for s in streams), return_exceptions=True)
        for transfer in list(self._transfers.values()):
            await transfer.abort("CLIENT_CLOSED")
        self._streams.clear()
        for sink in self.sinks.values():
            await sink.close()
        if self.stages is not None:
            await self.stages.close()


def _plain_channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=channel_options(MAX_MESSAGE_BYTES))
