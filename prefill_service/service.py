"""Prefill: computes prompts, leases their pages to decode workers, and sends the first token.

Life of a stream here, and who says so:

    Submit          -> the transfer is offered, the engine computes                     (router)
    on_opened       -> the destination is reserved: MarkReserved                        (decode)
    PagesReady      -> checksums, watermark                                             (engine)
    TokensSampled   -> the first token goes to the router, the manifest to decode       (engine)
    on_ended        -> nobody reads the pages any more: ReleaseLease, or Abort          (transfer server)
    SequenceAborted -> no page is held: Aborted                                         (engine)

Fence, then free: whatever ends a stream closes its transfer first; only `on_ended` lets the engine free the pages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.core.clock import Clock
from pdserve.core.errors import CancelledError, EngineError, PdserveError, TransferError
from pdserve.core.output_stage import OutputState
from pdserve.core.session import RouterSession
from pdserve.core.stream_record import StreamRecord
from pdserve.core.streams import StepBatch, Stream, StreamTable, load_message, observe_step, send_aborted
from pdserve.core.submission import ModelLimits, check_part, read_request, sequence_key
from pdserve.core.telemetry import WorkerMetrics
from pdserve.core.tokenizer import Tokenizer
from pdserve.core.tracing import Tracing
from pdserve.engine.async_engine import Engine
from pdserve.engine.step import (
    Abort,
    Add,
    Command,
    Event,
    MarkReserved,
    PagesReady,
    PrefillStarted,
    ReleaseLease,
    SequenceAborted,
    SequenceFailed,
    StepEvents,
    TokensSampled,
)
from pdserve.kvtransfer.control_server import TransferServer
from pdserve.kvtransfer.handoff import TransferState
from pdserve.v1 import common_pb2, worker_pb2


@dataclass(eq=False, kw_only=True)
class PrefillStream(Stream):
    """One prompt.

    Attributes:
        record: Where its time went.
        token: The sampled token as (id, index, finished); None before.
        opened: Decode has reserved its pages.
        done: The manifest is complete; only the lease is left.
        lease_until_s: Unopened, its pages are given up then; set once the token is sampled.
    """

    record: StreamRecord
    token: tuple[int, int, bool] | None = None
    opened: bool = False
    done: bool = False
    lease_until_s: float | None = None


class PrefillService:
    """SessionHandler of a prefill worker, and owner of its leased pages.

    Args:
        engine: Started by the caller.
        transfers: Whose listener this is; set with `attach`.
        welcome: First message to routers.
        limits: What prompts are checked against.
        tokenizer: For the first token's text.
        clock: Time.
        metrics: Of this process.
        tracing: Of this process.
        lease_s: Time that a computed prompt waits for its reader without renewal, seconds.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        welcome: worker_pb2.Welcome,
        limits: ModelLimits,
        tokenizer: Tokenizer,
        clock: Clock,
        metrics: WorkerMetrics,
        tracing: Tracing,
        lease_s: float,
    ) -> None:
        self._engine, self._welcome, self._limits = engine, welcome, limits
        self._tokenizer, self._clock, self._metrics, self._tracing = tokenizer, clock, metrics, tracing
        self._lease_s = lease_s
        self._transfers: TransferServer
        self._streams: StreamTable[PrefillStream] = StreamTable()
        self._failure: EngineError | None = None

    def attach(self, transfers: TransferServer) -> None:
        """Sets the transfer server, whose listener this is; before the first message."""
        self._transfers = transfers

    async def drain(self) -> None:
        """Waits until nothing of any attempt is left; the caller sets the limit."""
        await self._streams.wait_empty()

    # ---- from the router ------------------------------------------------------------

    def welcome(self) -> worker_pb2.Welcome:
        """See `SessionHandler`."""
        return self._welcome

    def load(self) -> worker_pb2.Load:
        """See `SessionHandler`."""
        return load_message(self._engine.load())

    def submit(self, session: RouterSession, message: worker_pb2.Submit) -> None:
        """See `SessionHandler`."""
        if self._failure is not None:
            raise self._failure
        check_part(message, [common_pb2.ROLE_PREFILL], self._welcome.incarnation)
        request = read_request(message, self._limits, self._clock.now())
        for older in self._streams.up_to(message.fence):
            self._end(older)
        output = OutputState(message.fence, self._tokenizer, request.sampling, len(request.prompt_token_ids))
        output.skip(request.emitted_token_ids)
        record = StreamRecord(self._metrics, self._tracing, message, request.arrival_s)
        stream = PrefillStream(submit=message, request=request, session=session, output=output, record=record)
        self._streams.add(stream)
        try:
            self._engine.send(Add(request, handoff=True))
            self._transfers.offer(message.transfer_id, -(-_num_known(stream) // self._welcome.page_size))
        except PdserveError:
            stream.silent = stream.ending = True
            self._tell(Abort(stream.key))
            raise

    def abort(self, session: RouterSession, message: worker_pb2.Abort) -> None:
        """See `SessionHandler`."""
        stream = self._streams.get(sequence_key(message.fence))
        if stream is None:
            send_aborted(session, message, known=False)
        else:
            stream.abort_answers.append(session)
        for live in self._streams.up_to(message.fence):
            self._end(live)

    def renew(self, session: RouterSession, transfer_ids: Sequence[str]) -> None:
        """See `SessionHandler`."""
        self._transfers.renew(transfer_ids)
        for transfer_id in transfer_ids:
            stream = self._streams.of_transfer(transfer_id)
            if stream is not None and stream.lease_until_s is not None:
                stream.lease_until_s = self._clock.now() + self._lease_s

    def session_ended(self, session: RouterSession) -> None:
        """See `SessionHandler`."""
        for stream in self._streams.of_session(session):
            self._end(stream)

    # ---- from the transfer server ------------------------------------------------------------

    def on_opened(self, transfer_id: str) -> None:
        """See `TransferListener`."""
        if stream := self._streams.of_transfer(transfer_id):
            stream.opened = True
            self._tell(MarkReserved(stream.key))

    def on_ended(self, transfer_id: str, state: TransferState, reason: str) -> None:
        """See `TransferListener`."""
        stream = self._streams.of_transfer(transfer_id)
        if stream is None:
            return
        if stream.token is None and not stream.ending:
            message = f"the KV transfer ended before the prompt was computed: {reason}"
            self._fail(stream, TransferError(message, reason=reason))
            stream.ending = True
        if stream.ending:
            self._tell(Abort(stream.key))
        else:
            self._tell(ReleaseLease(stream.key))
            self._streams.remove(stream)

    # ---- from the engine ------------------------------------------------------------

    async def run(self) -> None:
        """Handles the engine's events until it stops or dies; then every stream ends with the reason."""
        try:
            async for events in self._engine.outputs():
                self._on_step(events)
        except EngineError as e:
            self._failure = e
            for stream in self._streams.all():
                self._fail(stream, e)
                stream.answer_aborted(known=True)
                self._transfers.close(stream.submit.transfer_id, "ENGINE_FAILED")
                self._streams.remove(stream)
            raise

    async def sweep_forever(self) -> None:
        """Calls `sweep` on its own timer."""
        while True:
            await self._clock.sleep(self._lease_s / 5)
            self.sweep()

    def sweep(self) -> None:
        """Gives up computed prompts that no decode worker opened and no router renewed."""
        now = self._clock.now()
        for stream in self._streams.all():
            if stream.lease_until_s is not None and not stream.opened and stream.lease_until_s <= now:
                self._metrics.expired_leases.inc()
                self._end(stream)

    def _on_step(self, step: StepEvents) -> None:
        batch, now = StepBatch(), self._clock.now()
        for event in step.events:
            if stream := self._streams.get(event.key):
                self._on_event(stream, event, batch, now, now - step.duration_s)
        batch.send(step.step, step.load)
        observe_step(self._metrics, step.load, step.num_tokens, step.duration_s)
        self._metrics.leases.set(self._transfers.num_leases)

    def _on_event(self, stream: PrefillStream, event: Event, batch: StepBatch, now: float, step_began: float) -> None:
        match event:
            case PrefillStarted():
                stream.record.started(step_began)
            case TokensSampled():
                self._on_token(stream, event, batch, now)
            case PagesReady():
                self._on_pages(stream, event, now)
            case SequenceAborted():
                stream.answer_aborted(event.known)
                self._streams.remove(stream)
            case SequenceFailed():
                self._fail(stream, PdserveError(event.message, reason=event.reason, status=event.status))
                self._end(stream, "ENGINE_FAILED")

    def _on_token(self, stream: PrefillStream, event: TokensSampled, batch: StepBatch, now: float) -> None:
        out = stream.output.push(
            event.token_ids,
            event.logprobs,
            finish_reason=event.finish_reason,
            stop_token_id=event.stop_token_id,
            num_cached_tokens=event.num_cached_tokens,
        )
        stream.token = (event.token_ids[0], event.index, out.finish_reason is not None)
        stream.lease_until_s = now + self._lease_s
        if stream.silent:
            return
        stream.record.sampled(out.num_tokens, now, now)
        out.message.timings.CopyFrom(stream.record.timings)
        batch.add(stream.session, out.message)
        if out.finish_reason is not None:
            self._complete(stream, out.finish_reason, now)

    def _on_pages(self, stream: PrefillStream, event: PagesReady, now: float) -> None:
        if stream.token is not None and stream.token[2]:
            return  # that token ended the request: decode pulls nothing more
        self._transfers.pages_ready(stream.submit.transfer_id, event.first_page, event.pages)
        if stream.silent:
            return
        stream.record.watermark(len(event.pages), now)
        if event.complete:
            self._complete(stream, "handoff", now)

    def _complete(self, stream: PrefillStream, reason: str, now: float) -> None:
        """The token and, unless it ended the request, all pages are there: sends the manifest."""
        assert stream.token is not None
        token_id, index, finished = stream.token
        self._transfers.complete(
            stream.submit.transfer_id,
            num_tokens=_num_known(stream),
            token_id=token_id,
            index=index,
            prompt_digest=stream.submit.prompt_digest,
            finished=finished,
        )
        stream.record.finished(reason, now)
        stream.done = True

    def _fail(self, stream: PrefillStream, error: PdserveError) -> None:
        if not stream.silent and not stream.done:
            stream.record.failed(error, self._clock.now())
        stream.fail(error)

    def _end(self, stream: PrefillStream, reason: str = "ABORTED") -> None:
        """Ends a stream that its router wants no more, or that failed: close the transfer; `on_ended` goes on."""
        if not stream.silent and not stream.done:
            stream.record.failed(CancelledError("the router ended it"), self._clock.now())
        stream.silent = True
        if not stream.ending:
            stream.ending = True
            self._transfers.close(stream.submit.transfer_id, reason)

    def _tell(self, command: Command) -> None:
        with contextlib.suppress(EngineError):  # `run` hears of it too, and ends every stream
            self._engine.send(command)


def _num_known(stream: Stream) -> int:
    return len(stream.request.prompt_token_ids) + len(stream.request.emitted_token_ids)
