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

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.core.errors import EngineError, PdserveError, TransferError
from pdserve.core.output_stage import prompt_output
from pdserve.core.session import RouterSession
from pdserve.core.stream_record import StreamRecord
from pdserve.core.stream_service import Step, StreamParts, StreamService
from pdserve.core.streams import StepBatch, Stream
from pdserve.engine.async_engine import Engine
from pdserve.engine.step import (
    Abort,
    Add,
    Command,
    Event,
    MarkReserved,
    PagesReady,
    PrefillStarted,
    PromptLogprobs,
    ReleaseLease,
    SequenceAborted,
    SequenceFailed,
    TokensSampled,
)
from pdserve.kvtransfer.control_server import TransferServer
from pdserve.kvtransfer.handoff import TransferState
from pdserve.v1 import common_pb2, worker_pb2


@dataclass(eq=False, kw_only=True)
class PrefillStream(Stream):
    """One prompt.

    Attributes:
        token: The sampled token as (id, index, finished); None before.
        opened: Decode has reserved its pages.
        lease_until_s: Unopened, its pages are given up then; set once the token is sampled.
    """

    token: tuple[int, int, bool] | None = None
    opened: bool = False
    lease_until_s: float | None = None


class PrefillService(StreamService[PrefillStream, Event, Command]):
    """SessionHandler of a prefill worker, and owner of its leased pages.

    Args:
        engine: Started by the caller.
        parts: See `StreamService`.
        lease_s: Time that a computed prompt waits for its reader without renewal, seconds.
    """

    def __init__(self, engine: Engine, parts: StreamParts, *, lease_s: float) -> None:
        super().__init__(engine, parts)
        self._engine, self._lease_s = engine, lease_s
        self._transfers: TransferServer

    def attach(self, transfers: TransferServer) -> None:
        """Sets the transfer server, whose listener this is; before the first message."""
        self._transfers = transfers

    # ---- from the router ------------------------------------------------------------

    def submit(self, session: RouterSession, message: worker_pb2.Submit) -> None:
        """See `SessionHandler`."""
        request, output = self._read(message, [common_pb2.ROLE_PREFILL])
        record = StreamRecord(self._metrics, self._tracing, message, self._clock.now())
        stream = PrefillStream(submit=message, request=request, session=session, output=output, record=record)
        self._streams.add(stream)
        try:
            self._engine.send(Add(request, handoff=True))
            self._transfers.offer(message.transfer_id, -(-_num_known(stream) // self._welcome.page_size))
        except PdserveError as e:
            record.failed(e, self._clock.now())
            stream.silent = stream.ending = True
            self._tell(Abort(stream.key))
            raise

    def renew(self, session: RouterSession, transfer_ids: Sequence[str]) -> None:
        """See `SessionHandler`."""
        self._transfers.renew(transfer_ids)
        for transfer_id in transfer_ids:
            stream = self._streams.of_transfer(transfer_id)
            if stream is not None and stream.lease_until_s is not None:
                stream.lease_until_s = self._clock.now() + self._lease_s

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
        if state is TransferState.EXPIRED:
            self._metrics.expired_leases.inc()
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
                message = f"no decode worker asked for the computed prompt within {self._lease_s:g} s"
                self._fail(stream, TransferError(message, reason="LEASE_EXPIRED"))
                self._end(stream, "LEASE_EXPIRED")

    def _on_step(self, step: Step[Event]) -> None:
        super()._on_step(step)
        self._metrics.leases.set(self._transfers.num_leases)

    def _on_event(self, stream: PrefillStream, event: Event, batch: StepBatch, now: float, step_began: float) -> None:
        match event:
            case PromptLogprobs(_, first, logprobs):
                if not stream.silent:
                    batch.add(stream.session, prompt_output(stream.submit.fence, first, logprobs))
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
        if stream.output.num_choices > 1:
            self._on_prompt(stream, event, batch, now)
            return
        out = stream.output.push(
            0,
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
        stream.record.sampled(out.num_tokens, now, now, event.num_cached_tokens)
        out.message.timings.CopyFrom(stream.record.timings)
        batch.add(stream.session, out.message)
        if out.finish_reason is not None:
            self._complete(stream, out.finish_reason, now)
            stream.silent = True

    def _on_prompt(self, stream: PrefillStream, event: TokensSampled, batch: StepBatch, now: float) -> None:
        """The prompt of several choices is computed: the router hears the times, decode samples all first tokens."""
        stream.token = (event.token_ids[0], event.index, False)
        stream.lease_until_s = now + self._lease_s
        if not stream.silent:
            stream.record.sampled(0, now, now, event.num_cached_tokens)
            batch.add(
                stream.session,
                worker_pb2.SequenceOutput(
                    fence=stream.submit.fence,
                    timings=stream.record.timings,
                    cached_tokens=event.num_cached_tokens,
                ),
            )

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
        """The token and, unless it ended the request, all pages are there: sends the manifest, if anybody needs it."""
        assert stream.token is not None
        token_id, index, finished = stream.token
        stream.record.finished(reason, now)
        if finished and not stream.opened:
            self._fence(stream, "FINISHED")  # nothing is left to wait for
            return
        self._transfers.complete(
            stream.submit.transfer_id,
            num_tokens=_num_known(stream),
            token_id=token_id,
            index=index,
            prompt_digest=stream.submit.prompt_digest,
            finished=finished,
        )

    def _fence(self, stream: PrefillStream, reason: str) -> None:
        self._transfers.close(stream.submit.transfer_id, reason)  # `on_ended` goes on


def _num_known(stream: Stream) -> int:
    return len(stream.request.prompt_token_ids) + len(stream.request.emitted_token_ids)
