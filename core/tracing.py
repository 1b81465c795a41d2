"""One trace per request over all processes: the root span of the router; children queue, prefill, kv_transfer, decode.

A span's place in the trace travels as a W3C traceparent string; empty means "not traced". Without an endpoint nothing
of OpenTelemetry is imported and every call returns at once. Times are seconds of the process's `Clock`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.core.clock import Clock
from pdserve.core.errors import PdserveError
from pdserve.core.sampling import SamplingParams

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

# Spans.
QUEUE, PREFILL, KV_TRANSFER, DECODE = "queue", "prefill", "kv_transfer", "decode"
# Events.
SCHEDULED, FIRST_TOKEN, WATERMARK, PULLED, COMMITTED, FINISHED = (
    "scheduled",
    "first_token",
    "watermark",
    "pulled",
    "committed",
    "finished",
)
# Attributes of ours; those of OpenTelemetry's GenAI conventions are made by the functions below.
REQUEST_ID, ATTEMPT, TRANSFER_ID = "pdserve.request_id", "pdserve.attempt", "pdserve.transfer_id"
NUM_PAGES, NUM_BYTES, HIDDEN_S = "pdserve.num_pages", "pdserve.num_bytes", "pdserve.hidden_s"
TRANSPORT = "pdserve.transport"
WAIT_S, PULL_S, PULL_HIDDEN_S = "pdserve.wait_s", "pdserve.pull_s", "pdserve.pull_hidden_s"

EXPORT_TIMEOUT_S = 2.0
_TRACEPARENT = "traceparent"

AttributeValue = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, AttributeValue]


def request_attributes(model: str, sampling: SamplingParams | None = None, *, chat: bool = False) -> Attributes:
    """GenAI attributes known at the start of a request."""
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": "chat" if chat else "text_completion",
        "gen_ai.provider.name": "pdserve",
        "gen_ai.request.model": model,
        "gen_ai.request.stream": True,
    }
    if sampling is not None:
        names = ("max_tokens", "temperature", "top_p", "top_k", "seed")
        values = {f"gen_ai.request.{name}": getattr(sampling, name) for name in names}
        attributes.update({name: value for name, value in values.items() if value is not None})
    return attributes


def usage_attributes(
    *, input_tokens: int, output_tokens: int, cached_tokens: int = 0, finish_reason: str = ""
) -> Attributes:
    """GenAI attributes known at the end of a request."""
    attributes: dict[str, AttributeValue] = {
        "gen_ai.usage.input_tokens": input_tokens,
        "gen_ai.usage.output_tokens": output_tokens,
        "gen_ai.usage.cache_read.input_tokens": cached_tokens,
    }
    if finish_reason:
        attributes["gen_ai.response.finish_reasons"] = (finish_reason,)
    return attributes


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Something that happened within a span.

    Attributes:
        name: One of the events above.
        at_s: When, on the process's clock.
        attributes: What else is known.
    """

    name: str
    at_s: float
    attributes: Attributes = field(default_factory=dict)


class RequestSpan:
    """A root span that is open. All methods do nothing when the request is not traced.

    Attributes:
        traceparent: For the children of this span, in whatever process; empty when not traced.
    """

    def __init__(self, span: Span | None, traceparent: str, to_unix_ns: Callable[[float], int]) -> None:
        self.traceparent = traceparent
        self._span = span
        self._to_unix_ns = to_unix_ns

    def event(self, event: SpanEvent) -> None:
        """Adds an event."""
        if self._span is not None:
            self._span.add_event(event.name, dict(event.attributes), self._to_unix_ns(event.at_s))

    def set(self, attributes: Attributes) -> None:
        """Adds attributes."""
        if self._span is not None:
            self._span.set_attributes(dict(attributes))

    def end(self, at_s: float, error: PdserveError | None = None) -> None:
        """Ends the span. Idempotent."""
        if self._span is not None:
            _end(self._span, self._to_unix_ns(at_s), error)
            self._span = None


class Tracing:
    """The tracer of a process.

    Args:
        service_name: E.g. "pdserve-router".
        instance_id: Worker or router id.
        endpoint: OTLP gRPC endpoint (http://host:port, https://host:port); None: nothing is traced.
        clock: The clock of all times given to this object.
        wall_ns: Unix nanoseconds.
    """

    def __init__(
        self,
        service_name: str,
        instance_id: str,
        endpoint: str | None,
        clock: Clock,
        *,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._clock = clock
        self._wall_ns = wall_ns
        self._provider = _make_provider(service_name, instance_id, endpoint) if endpoint else None
        self._tracer: Tracer | None = self._provider.get_tracer("pdserve") if self._provider else None

    def start_request(
        self, name: str, start_s: float, *, traceparent: str = "", attributes: Attributes | None = None
    ) -> RequestSpan:
        """Opens a request's root span.

        Args:
            name: "{operation} {model}" by the GenAI conventions.
            start_s: Arrival.
            traceparent: The caller's; empty or unreadable starts a new trace.
            attributes: See `request_attributes`.
        """
        if self._tracer is None:
            return RequestSpan(None, "", self._to_unix_ns)
        span = self._start(self._tracer, name, traceparent, start_s, attributes, root=True)
        return RequestSpan(span, _inject(span), self._to_unix_ns)

    def record(
        self,
        name: str,
        traceparent: str,
        start_s: float,
        end_s: float,
        *,
        attributes: Attributes | None = None,
        events: Sequence[SpanEvent] = (),
        error: PdserveError | None = None,
    ) -> None:
        """Records a finished child span.

        Args:
            name: QUEUE, PREFILL, KV_TRANSFER or DECODE.
            traceparent: Of the request's root span; empty: not traced.
            start_s: Begin.
            end_s: End.
            attributes: What is known.
            events: In order.
            error: Set when it failed.
        """
        if self._tracer is None or not traceparent:
            return
        span = self._start(self._tracer, name, traceparent, start_s, attributes, root=False)
        for event in events:
            span.add_event(event.name, dict(event.attributes), self._to_unix_ns(event.at_s))
        _end(span, self._to_unix_ns(end_s), error)

    async def shutdown(self, timeout_s: float) -> None:
        """Sends what is left, for `timeout_s` at most."""
        if self._provider is None:
            return
        provider, self._provider, self._tracer = self._provider, None, None
        # A daemon thread: an exporter that hangs must not keep the process alive.
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def shut() -> None:
            provider.shutdown()
            if not loop.is_closed():
                loop.call_soon_threadsafe(done.set)

        threading.Thread(target=shut, name="trace-flush", daemon=True).start()
        try:
            await asyncio.wait_for(done.wait(), timeout_s)
        except TimeoutError:
            return  # the collector does not answer; the exporter has said so in the log

    def _to_unix_ns(self, at_s: float) -> int:
        return self._wall_ns() - int((self._clock.now() - at_s) * 1e9)

    def _start(
        self, tracer: Tracer, name: str, traceparent: str, start_s: float, attributes: Attributes | None, *, root: bool
    ) -> Span:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract({_TRACEPARENT: traceparent})
        kind = SpanKind.SERVER if root else SpanKind.INTERNAL
        return tracer.start_span(name, parent, kind, dict(attributes or {}), start_time=self._to_unix_ns(start_s))


def _make_provider(service_name: str, instance_id: str, endpoint: str) -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    insecure = not endpoint.startswith("https://")
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=insecure, timeout=EXPORT_TIMEOUT_S)
    resource = Resource.create({"service.name": service_name, "service.instance.id": instance_id})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
    return provider


def _inject(span: Span) -> str:
    from opentelemetry.trace import set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, set_span_in_context(span))
    return carrier.get(_TRACEPARENT, "")


def _end(span: Span, at_ns: int, error: PdserveError | None) -> None:
    if error is not None:
        from opentelemetry.trace import Status, StatusCode

        span.set_attribute("error.type", error.reason)
        span.set_status(Status(StatusCode.ERROR, error.reason))
    span.end(at_ns)
