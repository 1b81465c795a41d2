"""A request that lives on this router: its parts, and the ways in which it can end.

An end is written to the record and told to the trace, and gives the terminal event of the client's stream.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from pdserve.core.errors import DeadlineError, EngineError, PdserveError
from pdserve.router.admission import Admitted
from pdserve.router.inbox import Cancel, Inbox
from pdserve.router.output_stream import OutputStream, Terminal
from pdserve.router.progress import Progress
from pdserve.router.recorder import Recorder
from pdserve.router.trace import RequestTrace
from pdserve.v1 import common_pb2, inference_pb2, worker_pb2

MAX_DEADLINE_MS = 2**32 - 1
_FINISH_WORDS = {common_pb2.FINISH_REASON_STOP: "stop", common_pb2.FINISH_REASON_LENGTH: "length"}


@dataclass(eq=False, kw_only=True)
class OpenRequest:
    """A request that lives on this router.

    Attributes:
        admitted: What is computed.
        arrival_s: When it arrived.
        deadline_s: When it must be over, on this router's clock; None: no deadline.
        trace: Hears of its life.
        progress: Released output.
        recorder: Writes its record.
        stream: What its client reads.
        inbox: What it waits for.
        accepted: Set once its record is stored, or with the refusal.
        cancel_asked: The first cancellation.
    """

    admitted: Admitted
    arrival_s: float
    deadline_s: float | None
    trace: RequestTrace
    progress: Progress
    recorder: Recorder
    stream: OutputStream
    inbox: Inbox = field(default_factory=Inbox)
    accepted: asyncio.Future[None]
    cancel_asked: Cancel | None = None

    def cancel(self, reason: str, error: PdserveError | None = None) -> None:
        """Ends it: its workers are told, then the stream ends with `error`, or with Finished(CANCELLED)."""
        if self.cancel_asked is None:
            self.cancel_asked = Cancel(reason, error)
            self.inbox.put(self.cancel_asked)

    def left_ms(self, now: float) -> int:
        """Time until the deadline, at least 1; 0: no deadline."""
        if self.deadline_s is None:
            return 0
        return min(MAX_DEADLINE_MS, max(1, int((self.deadline_s - now) * 1000)))

    # ---- ends

    def finished(self, said: worker_pb2.SequenceFinished) -> Terminal:
        """The last worker ended it."""
        word = _FINISH_WORDS.get(said.finish_reason)
        if word is None:
            name = common_pb2.FinishReason.Name(said.finish_reason)
            error = EngineError(f"a worker ended the request with {name}: report this", reason="BROKEN_STREAM")
            return self.failed(error)
        usage = self._usage()
        finished = self._terminal(said.finish_reason, said.stop_reason, usage)
        self.recorder.finished(word, self.progress.num_tokens)
        self.trace.ended(word, None, finished.timings, usage)
        return finished

    def cancelled(self) -> Terminal:
        """Its cancellation was carried out."""
        assert self.cancel_asked is not None
        error = self.cancel_asked.error
        if error is not None and not isinstance(error, DeadlineError):
            return self.failed(error)
        usage = self._usage()
        finished = self._terminal(common_pb2.FINISH_REASON_CANCELLED, "", usage)
        self.recorder.cancelled(self.progress.num_tokens)
        self.trace.ended("cancelled", error, finished.timings, usage)
        return finished if error is None else error

    def failed(self, error: PdserveError) -> Terminal:
        """It cannot go on."""
        self.recorder.failed(error, self.progress.num_tokens)
        self.trace.ended("failed", error, self.progress.timings(), self._usage())
        return error

    def _terminal(
        self, reason: common_pb2.FinishReason, stop_reason: str, usage: common_pb2.Usage
    ) -> inference_pb2.Finished:
        return inference_pb2.Finished(
            finish_reason=reason,
            stop_reason=stop_reason,
            usage=usage,
            timings=self.progress.timings(),
            attempt=self.recorder.attempt,
        )

    def _usage(self) -> common_pb2.Usage:
        return common_pb2.Usage(
            prompt_tokens=len(self.admitted.prompt_token_ids),
            completion_tokens=self.progress.num_tokens,
            cached_tokens=self.progress.num_cached_tokens,
        )
