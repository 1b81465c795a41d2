"""StreamService: what the prefill and the decode service do alike with the attempts that routers submit.

A subclass says what starts an attempt, what an event of the engine means to it, and how what it holds is fenced. What
ends an attempt before its time passes `_end`: its router hears no more of it, its pages are fenced, then freed; the
engine's answer removes it from the table and answers the Aborts that wait.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from pdserve.core.clock import Clock
from pdserve.core.errors import CancelledError, EngineError, PdserveError
from pdserve.core.output_stage import OutputStates
from pdserve.core.request import Request, split_key
from pdserve.core.session import RouterSession
from pdserve.core.streams import Load, StepBatch, Stream, StreamTable, load_message, observe_step, send_aborted
from pdserve.core.submission import ModelLimits, check_part, read_request, sequence_key
from pdserve.core.telemetry import WorkerMetrics
from pdserve.core.tokenizer import Tokenizer
from pdserve.core.tracing import Tracing
from pdserve.v1 import common_pb2, worker_pb2

C = TypeVar("C")
C_contra = TypeVar("C_contra", contravariant=True)


class Driven(Protocol[C_contra]):
    """An engine, as far as it is needed here."""

    def send(self, command: C_contra) -> None:
        """Queues a command.

        Raises:
            EngineError: It has died.
        """
        ...

    def load(self) -> Load:
        """Load after the last step."""
        ...


class HasKey(Protocol):
    """An event of an engine."""

    @property
    def key(self) -> str:
        """The sequence."""
        ...


S = TypeVar("S", bound=Stream)
E = TypeVar("E", bound=HasKey)
E_co = TypeVar("E_co", bound=HasKey, covariant=True)


class Step(Protocol[E_co]):
    """What one step of an engine told; see `engine.step.StepEvents`."""

    @property
    def step(self) -> int:
        """Step number."""
        ...

    @property
    def events(self) -> Sequence[E_co]:
        """In order."""
        ...

    @property
    def load(self) -> Load:
        """Load afterwards."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens computed."""
        ...

    @property
    def duration_s(self) -> float:
        """Seconds."""
        ...


@dataclass(frozen=True, kw_only=True)
class StreamParts:
    """What a service is made of, beside its engine.

    Attributes:
        welcome: First message to routers.
        limits: What prompts are checked against.
        tokenizer: For the text.
        clock: Time.
        metrics: Of this process.
        tracing: Of this process.
    """

    welcome: worker_pb2.Welcome
    limits: ModelLimits
    tokenizer: Tokenizer
    clock: Clock
    metrics: WorkerMetrics
    tracing: Tracing


class StreamService(ABC, Generic[S, E, C]):
    """`SessionHandler` of one role, with its table of live attempts. Event loop only.

    Args:
        engine: For its load, and for commands.
        parts: The rest.
    """

    def __init__(self, engine: Driven[C], parts: StreamParts) -> None:
        self._engine_load, self._engine_send = engine.load, engine.send
        self._welcome, self._limits = parts.welcome, parts.limits
        self._tokenizer, self._clock = parts.tokenizer, parts.clock
        self._metrics, self._tracing = parts.metrics, parts.tracing
        self._streams: StreamTable[S] = StreamTable()
        self._failure: EngineError | None = None
        observe_step(self._metrics, engine.load(), 0, 0.0)  # pages are reported before the first step too

    @abstractmethod
    def _on_event(self, stream: S, event: E, batch: StepBatch, now: float, step_began: float) -> None:
        """The engine told something of a live stream."""

    @abstractmethod
    def _fence(self, stream: S, reason: str) -> None:
        """Ends whatever reads or writes the stream's pages, then has the engine free them."""

    async def drain(self) -> None:
        """Waits until nothing of any attempt is left; the caller sets the limit."""
        await self._streams.wait_empty()

    def welcome(self) -> worker_pb2.Welcome:
        """See `SessionHandler`."""
        return self._welcome

    def load(self) -> worker_pb2.Load:
        """See `SessionHandler`."""
        return load_message(self._engine_load())

    def abort(self, session: RouterSession, message: worker_pb2.Abort) -> None:
        """See `SessionHandler`."""
        stream = self._streams.get(sequence_key(message.fence))
        if stream is None:
            send_aborted(session, message, known=False)
        else:
            stream.abort_answers.append(session)
        for live in self._streams.up_to(message.fence):
            self._end(live)

    def session_ended(self, session: RouterSession) -> None:
        """See `SessionHandler`."""
        for stream in self._streams.of_session(session):
            self._end(stream)

    def _read(self, message: worker_pb2.Submit, parts: Sequence[common_pb2.Role]) -> tuple[Request, OutputStates]:
        """Checks a submission and ends what lives under older fences of its request.

        Raises:
            PdserveError: It cannot be started; nothing was.
        """
        if self._failure is not None:
            raise self._failure
        check_part(message, parts, self._welcome.incarnation)
        request = read_request(message, self._limits)
        for older in self._streams.up_to(message.fence):
            self._end(older)
        output = OutputStates(message.fence, self._tokenizer, request.sampling, len(request.prompt_token_ids))
        output[0].skip(request.emitted_token_ids)
        return request, output

    def _on_step(self, step: Step[E]) -> None:
        batch, now = StepBatch(), self._clock.now()
        for event in step.events:
            if stream := self._streams.get(split_key(event.key)[0]):
                self._on_event(stream, event, batch, now, now - step.duration_s)
        batch.send(step.step, step.load)
        observe_step(self._metrics, step.load, step.num_tokens, step.duration_s)

    def _fail(self, stream: S, error: PdserveError) -> None:
        """Tells the router, once, that nothing more will come."""
        if not stream.silent:
            stream.record.failed(error, self._clock.now())
        stream.fail(error)

    def _end(self, stream: S, reason: str = "ABORTED") -> None:
        """Ends a stream that its router wants no more, or that failed. Idempotent."""
        if not stream.silent:
            stream.record.failed(CancelledError("the router ended it"), self._clock.now())
        stream.silent = True
        if not stream.ending:
            stream.ending = True
            self._fence(stream, reason)

    def _tell(self, command: C) -> None:
        """Sends what an engine that has died need not hear: `run` hears of that too, and ends every stream."""
        with contextlib.suppress(EngineError):
            self._engine_send(command)
