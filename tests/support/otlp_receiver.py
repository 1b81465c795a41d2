"""An OTLP gRPC trace receiver within the test process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass
class ReceivedSpan:
    """One span with the `service.name` and `service.instance.id` of the process that sent it."""

    service: str
    instance: str
    span: trace_pb2.Span

    @property
    def name(self) -> str:
        """Name of the span."""
        return self.span.name

    @property
    def attributes(self) -> dict[str, object]:
        """Attributes by name; lists as tuples."""
        return {a.key: _value(a.value) for a in self.span.attributes}

    @property
    def events(self) -> list[str]:
        """Names of the events."""
        return [event.name for event in self.span.events]


@dataclass
class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every span that it is sent.

    Attributes:
        endpoint: For `--otlp-traces-endpoint`.
    """

    endpoint: str = ""
    _spans: list[ReceivedSpan] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def Export(self, request, context):  # the generated names
        """See the OTLP protocol."""
        received = []
        for resource in request.resource_spans:
            about = {a.key: a.value.string_value for a in resource.resource.attributes}
            received += [
                ReceivedSpan(about.get("service.name", ""), about.get("service.instance.id", ""), span)
                for scope in resource.scope_spans
                for span in scope.spans
            ]
        with self._changed:
            self._spans += received
            self._changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans(self) -> list[ReceivedSpan]:
        """What came so far."""
        with self._changed:
            return list(self._spans)

    def wait_for(self, names: set[str], timeout_s: float = 10.0) -> list[ReceivedSpan]:
        """Waits until a span of each name came; returns all spans.

        Raises:
            TimeoutError: Some did not come in time.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while missing := names - {s.name for s in self._spans}:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"spans that did not come: {sorted(missing)}")
            return list(self._spans)


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    """A receiver on a free port of the loopback."""
    receiver = OtlpReceiver()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    receiver.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(0).wait(5)


def _value(value):
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return tuple(_value(v) for v in value.array_value.values)
    return getattr(value, kind) if kind else None
