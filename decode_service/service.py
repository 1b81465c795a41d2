"""Decode: reserves pages, pulls KV into them, generates, and streams. A MIXED submission is computed here as a whole.

A request with n > 1 is several sequences, forked from one prompt: its transfer moves the prompt's KV once, and each
choice, the first too, samples its first token here.

Life of a stream here, and who says so:

    Submit          -> DECODE: Reserve;  MIXED: Add                                     (router)
    Reserved        -> the router hears it; the transfer opens                          (engine)
    result          -> Activate with prefill's token; or Abort if it ended or failed    (transfer client)
    TokensSampled   -> text, stop strings; one StepOutputs per step and router          (engine)
    SequenceAborted -> no page is held: Aborted                                         (engine)

Fence, then free: while a transfer runs only its `result` (nothing writes any more) lets the engine free the pages.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.core.errors import CapacityError, EngineError, PdserveError, TransferError
from pdserve.core.output_stage import prompt_output
from pdserve.core.request import split_key
from pdserve.core.session import RouterSession
from pdserve.core.stream_record import StreamRecord
from pdserve.core.stream_service import Step, StreamParts, StreamService
from pdserve.core.streams import StepBatch, Stream
from pdserve.engine.async_engine import Engine
from pdserve.engine.step import (
    Abort,
    Activate,
    Add,
    Command,
    Event,
    PrefillStarted,
    PromptLogprobs,
    ReservationRefused,
    Reserve,
    Reserved,
    SequenceAborted,
    SequenceFailed,
    TokensSampled,
)
from pdserve.kvtransfer.control_client import Transfer, TransferClient, TransferPeer
from pdserve.v1 import common_pb2, worker_pb2

PARTS = (common_pb2.ROLE_DECODE, common_pb2.ROLE_MIXED)


@dataclass(eq=False, kw_only=True)
class DecodeStream(Stream):
    """One output, of one or several choices.

    Attributes:
        transfer: Set while pages may still be written.
        living: Engine keys of the choices that the engine may still have.
    """

    transfer: Transfer | None = None
    living: set[str] = field(default_factory=set)


class DecodeService(StreamService[DecodeStream, Event, Command]):
    """SessionHandler of a decode or mixed worker.

    Args:
        engine: Started by the caller.
        parts: See `StreamService`.
        transfers: Closed by the caller.
        reserve_wait_s: Time that a reservation waits for pages, seconds.
    """

    def __init__(self, engine: Engine, parts: StreamParts, *, transfers: TransferClient, reserve_wait_s: float) -> None:
        super().__init__(engine, parts)
        self._engine, self._transfers, self._reserve_wait_s = engine, transfers, reserve_wait_s
        self._tasks = asyncio.TaskGroup()

    # ---- from the router ------------------------------------------------------------

    def submit(self, session: RouterSession, message: worker_pb2.Submit) -> None:
        """See `SessionHandler`."""
        request, output = self._read(message, PARTS)
        now = self._clock.now()
        mixed = message.part == common_pb2.ROLE_MIXED
        first, *forks = request.choices()
        add = Add(first, forks=tuple(forks)) if mixed else Reserve(first, now + self._reserve_wait_s)
        self._engine.send(add)
        stream = DecodeStream(
            submit=message,
            request=request,
            session=session,
            output=output,
            record=StreamRecord(self._metrics, self._tracing, message, now),
            living={first.key, *(fork.key for fork in forks)} if mixed else {first.key},
        )
        self._streams.add(stream)

    def renew(self, session: RouterSession, transfer_ids: Sequence[str]) -> None:
        """See `SessionHandler`; a decode worker has no leases."""

    # ---- from the engine ------------------------------------------------------------

    async def run(self) -> None:
        """Handles the engine's events until it stops or dies; then every stream ends with the reason.

        No page of a dead engine is used again: what still writes into some is not waited for.
        """
        try:
            async with self._tasks:
                await self._handle_events()
        except* EngineError:
            pass  # it is the failure below
        for stream in self._streams.all():
            stream.answer_aborted(known=True)
            self._streams.remove(stream)
        if self._failure is not None:
            raise self._failure

    async def _handle_events(self) -> None:
        """Raises why the engine died."""
        try:
            async for events in self._engine.outputs():
                self._on_step(events)
        except EngineError as e:
            self._failure = e
            for stream in self._streams.all():
                self._fail(stream, e)
                stream.transfer = None
            raise
        for stream in self._streams.all():
            if stream.transfer is not None:
                self._tasks.create_task(stream.transfer.abort("ENGINE_STOPPED"))

    def _on_step(self, step: Step[Event]) -> None:
        super()._on_step(step)
        self._metrics.reservations.set(self._transfers.num_open)

    def _on_event(self, stream: DecodeStream, event: Event, batch: StepBatch, now: float, step_began: float) -> None:
        match event:
            case TokensSampled():
                if not stream.silent:
                    self._on_tokens(stream, event, batch, now, step_began)
            case PromptLogprobs(_, first, logprobs):
                if not stream.silent:
                    batch.add(stream.session, prompt_output(stream.submit.fence, first, logprobs))
            case PrefillStarted():
                stream.record.started(step_began)
            case Reserved():
                self._on_reserved(stream, event)
            case ReservationRefused():
                self._on_refused(stream, event)
            case SequenceAborted():
                self._left(stream, event.key, event.known)
            case SequenceFailed() if not stream.output.has_ended(split_key(event.key)[1]):
                self._fail(stream, PdserveError(event.message, reason=event.reason, status=event.status))
                self._end(stream)

    # ---- reservation and transfer ------------------------------------------------------------

    def _on_reserved(self, stream: DecodeStream, event: Reserved) -> None:
        if stream.ending:
            return
        stream.record.reserved(self._clock.now())
        self._send_reservation(stream, True, num_cached_pages=event.num_cached_pages)
        sources = (stream.submit.prefill, *stream.submit.prefill_shards)  # the first one samples
        try:
            stream.transfer = self._transfers.gather(
                stream.submit.transfer_id,
                [TransferPeer(peer.worker_id, peer.address, peer.incarnation) for peer in sources],
                num_cached_pages=event.num_cached_pages,
                destinations=[page.page_id for page in event.pages],
                expected_num_tokens=len(stream.request.prompt_token_ids) + len(stream.request.emitted_token_ids),
                expected_digest=stream.submit.prompt_digest,
                request_id=stream.submit.fence.request_id,
            )
        except TransferError as e:
            self._fail(stream, e)
            self._end(stream)
        else:
            self._tasks.create_task(self._receive(stream, stream.transfer))

    def _on_refused(self, stream: DecodeStream, event: ReservationRefused) -> None:
        self._metrics.refused_reservations.inc()
        if not stream.ending:
            refused = CapacityError("pages were not free in time", reason="RESERVATION_REFUSED")
            stream.record.failed(refused, self._clock.now())
            self._send_reservation(stream, False, retry_after_ms=round((event.retry_after_s or 0) * 1000))
            self._streams.remove(stream)

    def _send_reservation(self, stream: DecodeStream, reserved: bool, **facts: int) -> None:
        message = worker_pb2.ReservationResult(
            fence=stream.submit.fence, reservation_id=stream.submit.reservation_id, **facts, reserved=reserved
        )
        stream.session.send(worker_pb2.SessionResponse(reservation=message))

    async def _receive(self, stream: DecodeStream, transfer: Transfer) -> None:
        """Waits until nothing writes the pages any more; then they are VALID or freed."""
        if (error := await transfer.failure()) is not None:
            self._on_transfer_failed(stream, error)  # told at once, though pages may be written for a while yet
            with contextlib.suppress(TransferError):
                await transfer.result()
            stream.transfer = None
            self._free(stream)
            return
        result, stream.transfer = await transfer.result(), None
        if not result.finished and result.index != stream.output[0].num_tokens:
            message = f"prefill sent output index {result.index}; {stream.output[0].num_tokens} was expected"
            self._on_transfer_failed(stream, TransferError(message, reason="INDEX_MISMATCH"))
            self._free(stream)
            return
        stream.record.transferred(result, self._clock.now())
        if stream.silent or result.finished:
            stream.silent = True
            self._free(stream)
            return
        _, *forks = stream.request.choices()
        if forks:
            stream.living.update(fork.key for fork in forks)
            self._tell(Activate(stream.key, None, tuple(forks)))
        else:
            stream.output[0].skip([result.token_id])
            self._tell(Activate(stream.key, result.token_id))

    def _on_transfer_failed(self, stream: DecodeStream, error: TransferError) -> None:
        if error.reason == "FINISHED":
            stream.silent = True  # prefill's token ended the request before this transfer opened: no failure
        stream.record.transfer_failed(error, self._clock.now(), aborted=stream.silent)
        self._fail(stream, error)

    # ---- output ------------------------------------------------------------

    def _on_tokens(
        self, stream: DecodeStream, event: TokensSampled, batch: StepBatch, now: float, step_began: float
    ) -> None:
        _, choice = split_key(event.key)
        if stream.output.has_ended(choice):
            return  # a stop string ended it while this step was being computed
        out = stream.output.push(
            choice,
            event.token_ids,
            event.logprobs,
            finish_reason=event.finish_reason,
            stop_token_id=event.stop_token_id,
            num_cached_tokens=event.num_cached_tokens,
        )
        stream.record.sampled(out.num_tokens, step_began, now, event.num_cached_tokens, choice)
        if out.message.HasField("finished"):
            assert out.finish_reason is not None
            stream.record.finished(out.finish_reason, now)
            out.message.timings.CopyFrom(stream.record.timings)
            stream.silent = stream.ending = True
        if out.stopped_early:
            self._tell(Abort(event.key))  # the engine does not know that it ended
        elif out.finish_reason is not None:
            self._left(stream, event.key, True)
        batch.add(stream.session, out.message)

    # ---- ends ------------------------------------------------------------

    def _fence(self, stream: DecodeStream, reason: str) -> None:
        if stream.transfer is None:
            self._free(stream)
        else:
            self._tasks.create_task(stream.transfer.abort(reason))  # `_receive` frees the pages then

    def _free(self, stream: DecodeStream) -> None:
        """Lets the engine free the pages; a `SequenceAborted` of each choice follows."""
        stream.ending = True
        for key in sorted(stream.living):
            self._tell(Abort(key))

    def _left(self, stream: DecodeStream, key: str, known: bool) -> None:
        """The engine has nothing more of this choice; with the last one the stream is over."""
        stream.living.discard(key)
        if not stream.living:
            stream.answer_aborted(known or stream.output.num_choices > 1)
            self._streams.remove(stream)
