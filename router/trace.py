"""What is reported of a request's life: the seam between the orchestrator and metrics and spans."""

from __future__ import annotations

from typing import Protocol

from pdserve.core.clock import Clock
from pdserve.core.errors import PdserveError
from pdserve.core.telemetry import RouterMetrics
from pdserve.core.tracing import (
    ATTEMPT,
    FINISHED,
    FIRST_TOKEN,
    QUEUE,
    RequestSpan,
    SpanEvent,
    Tracing,
    usage_attributes,
)
from pdserve.router.policy import Route
from pdserve.v1 import common_pb2


class RequestTrace(Protocol):
    """Reports of one request. None of them may fail."""

    @property
    def traceparent(self) -> str:
        """W3C traceparent of the root span; empty: not traced."""
        ...

    def refused(self, error: PdserveError) -> None:
        """It was refused before it was accepted; nothing else is reported of it."""
        ...

    def placed(self, route: Route, attempt: int, queue_s: float) -> None:
        """Workers were chosen; `queue_s` since arrival or since the last refusal."""
        ...

    def first_token(self, ttft_s: float) -> None:
        """Token 1 was released."""
        ...

    def tokens(self, num_tokens: int, gap_s: float | None) -> None:
        """A delta was released; `gap_s` since the one before, None for the first."""
        ...

    def ended(
        self, outcome: str, error: PdserveError | None, timings: common_pb2.Timings, usage: common_pb2.Usage
    ) -> None:
        """It ended: outcome "stop", "length", "cancelled" or "failed"; `error` is what the client was told."""
        ...


class NoTrace:
    """Reports nothing."""

    traceparent = ""

    def refused(self, error: PdserveError) -> None:
        """See `RequestTrace`."""

    def placed(self, route: Route, attempt: int, queue_s: float) -> None:
        """See `RequestTrace`."""

    def first_token(self, ttft_s: float) -> None:
        """See `RequestTrace`."""

    def tokens(self, num_tokens: int, gap_s: float | None) -> None:
        """See `RequestTrace`."""

    def ended(
        self, outcome: str, error: PdserveError | None, timings: common_pb2.Timings, usage: common_pb2.Usage
    ) -> None:
        """See `RequestTrace`."""


class RequestReport:
    """Metrics and spans of one request.

    Args:
        span: The root span, open.
        tracing: For the child span `queue`.
        metrics: The router's metrics.
        clock: Time.
    """

    def __init__(self, span: RequestSpan, tracing: Tracing, metrics: RouterMetrics, clock: Clock) -> None:
        self._span = span
        self._tracing = tracing
        self._metrics = metrics
        self._clock = clock

    @property
    def traceparent(self) -> str:
        """See `RequestTrace`."""
        return self._span.traceparent

    def refused(self, error: PdserveError) -> None:
        """See `RequestTrace`."""
        self._metrics.requests.labels("refused", error.reason).inc()
        self._span.end(self._clock.now(), error)

    def placed(self, route: Route, attempt: int, queue_s: float) -> None:
        """See `RequestTrace`."""
        now = self._clock.now()
        self._metrics.queue_seconds.observe(queue_s)
        self._tracing.record(QUEUE, self.traceparent, now - queue_s, now, attributes={ATTEMPT: attempt})

    def first_token(self, ttft_s: float) -> None:
        """See `RequestTrace`."""
        self._metrics.ttft_seconds.observe(ttft_s)
        self._span.event(SpanEvent(FIRST_TOKEN, self._clock.now()))

    def tokens(self, num_tokens: int, gap_s: float | None) -> None:
        """See `RequestTrace`."""
        self._metrics.generation_tokens.inc(num_tokens)
        if gap_s is not None:
            self._metrics.itl_seconds.observe(gap_s)

    def ended(
        self, outcome: str, error: PdserveError | None, timings: common_pb2.Timings, usage: common_pb2.Usage
    ) -> None:
        """See `RequestTrace`."""
        now, m = self._clock.now(), self._metrics
        m.requests.labels(outcome, error.reason if error else "").inc()
        m.prompt_tokens.inc(usage.prompt_tokens)
        m.e2e_seconds.observe(timings.e2e_s)
        if timings.tpot_s:
            m.tpot_seconds.observe(timings.tpot_s)
        if timings.handoff_gap_s:
            m.handoff_gap_seconds.observe(timings.handoff_gap_s)
        self._span.set(
            usage_attributes(
                input_tokens=usage.prompt_tokens,
                output_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
                finish_reason=outcome,
            )
        )
        self._span.event(SpanEvent(FINISHED, now))
        self._span.end(now, error)
