"""StreamRecord: where the time of one attempt went on this worker. Durations for the router, metrics, and spans.

arrival --queue--> first step --prefill--> token --...            computed here (prefill, mixed)
arrival --queue--> reserved --kv_transfer--> first decode step --decode--> end
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pdserve.core.errors import PdserveError
from pdserve.core.telemetry import WorkerMetrics
from pdserve.core.tracing import (
    ATTEMPT,
    COMMITTED,
    DECODE,
    FINISHED,
    FIRST_TOKEN,
    HIDDEN_S,
    KV_TRANSFER,
    NUM_BYTES,
    NUM_PAGES,
    PREFILL,
    PULL_HIDDEN_S,
    PULL_S,
    PULLED,
    QUEUE,
    REQUEST_ID,
    SCHEDULED,
    TRANSFER_ID,
    TRANSPORT,
    WAIT_S,
    WATERMARK,
    AttributeValue,
    SpanEvent,
    Tracing,
)
from pdserve.v1 import common_pb2, worker_pb2


class RangeFacts(Protocol):
    """What one pull of a transfer says of itself; see `kvtransfer.timeline.PulledRange`."""

    @property
    def num_pages(self) -> int:
        """Pages."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of the data plane."""
        ...

    @property
    def wait_s(self) -> float:
        """Announced to pull begun, seconds."""
        ...

    @property
    def pull_s(self) -> float:
        """Pull begun to verified, seconds."""
        ...

    @property
    def verified_s(self) -> float:
        """When the last page was here and verified, monotonic seconds."""
        ...

    @property
    def transport(self) -> str:
        """Data plane they came over."""
        ...


class TransferFacts(Protocol):
    """What a complete transfer says of itself; see `kvtransfer.timeline.TransferResult`."""

    @property
    def bytes_on_wire(self) -> int:
        """Bytes of the data plane."""
        ...

    @property
    def transfer_s(self) -> float:
        """First byte asked to last page verified, seconds."""
        ...

    @property
    def hidden_s(self) -> float:
        """Part of it before the manifest came, seconds."""
        ...

    @property
    def num_pages(self) -> int:
        """Pages pulled."""
        ...

    @property
    def transport(self) -> str:
        """Data planes they came over, with a plus between them; which moved what is in `ranges`."""
        ...

    @property
    def manifest_s(self) -> float:
        """When the manifest came, monotonic seconds."""
        ...

    @property
    def ranges(self) -> Sequence[RangeFacts]:
        """The pulls, in order."""
        ...

    @property
    def pull_s(self) -> float:
        """Time in which pages moved, seconds."""
        ...

    @property
    def pull_hidden_s(self) -> float:
        """Part of it before the manifest came, seconds."""
        ...


class StreamRecord:
    """Times of one attempt.

    Args:
        metrics: Of this process.
        tracing: Of this process.
        submit: What the router asked.
        arrival_s: When; monotonic seconds, as all times here.
    """

    def __init__(self, metrics: WorkerMetrics, tracing: Tracing, submit: worker_pb2.Submit, arrival_s: float) -> None:
        self._metrics, self._tracing, self._traceparent = metrics, tracing, submit.traceparent
        self._attributes: dict[str, AttributeValue] = {
            REQUEST_ID: submit.fence.request_id,
            ATTEMPT: submit.fence.attempt,
        }
        if submit.transfer_id:
            self._attributes[TRANSFER_ID] = submit.transfer_id
        self._prefills = submit.part != common_pb2.ROLE_DECODE
        self._decodes = submit.part != common_pb2.ROLE_PREFILL
        self._arrival_s = self._decode_began_s = self._last_s = arrival_s
        self._choices: dict[int, tuple[int, float]] = {}  # tokens, and when the last of them came
        self._started_s: float | None = None
        self._first_s: float | None = None
        self._transfer_began_s: float | None = None
        self._manifest_s: float | None = None
        self._queued, self._ended = True, False
        self._prefill_events: list[SpanEvent] = []
        self.timings = common_pb2.Timings()
        metrics.prompt_tokens.inc(len(submit.prompt_token_ids))

    def started(self, at: float) -> None:
        """The first step of the prompt began."""
        if self._started_s is None:
            self._started_s = at
            self._end_queue(at, SCHEDULED)

    def reserved(self, now: float) -> None:
        """Pages are set aside; the transfer opens."""
        self._end_queue(now, SCHEDULED)
        self._transfer_began_s = now

    def transferred(self, result: TransferFacts, now: float) -> None:
        """The transfer is complete."""
        self.timings.transfer_s = result.transfer_s
        self.timings.transfer_hidden_s = result.hidden_s
        self.timings.transfer_bytes = result.bytes_on_wire
        self.timings.transfer_pull_s = result.pull_s
        self.timings.transfer_pull_hidden_s = result.pull_hidden_s
        if result.ranges:
            self.timings.transfer_last_pages = result.ranges[-1].num_pages
            self.timings.transfer_last_bytes = result.ranges[-1].num_bytes
        self._manifest_s = result.manifest_s
        self._metrics.kv_transfers.labels("complete", "").inc()
        for pulled in result.ranges:
            self._metrics.kv_bytes.labels(pulled.transport).inc(pulled.num_bytes)
        self._metrics.kv_seconds.observe(result.transfer_s)
        self._metrics.kv_hidden_seconds.observe(result.hidden_s)
        self._metrics.kv_pull_seconds.observe(result.pull_s)
        facts: dict[str, AttributeValue] = {
            NUM_PAGES: result.num_pages,
            NUM_BYTES: result.bytes_on_wire,
            HIDDEN_S: result.hidden_s,
            PULL_S: result.pull_s,
            PULL_HIDDEN_S: result.pull_hidden_s,
            TRANSPORT: result.transport,
        }
        events = [*map(_pulled, result.ranges), SpanEvent(COMMITTED, now)]
        began, self._transfer_began_s = self._transfer_began_s or now, None
        self._span(KV_TRANSFER, began, now, events=events, more=facts)

    def transfer_failed(self, error: PdserveError, now: float, *, aborted: bool) -> None:
        """The transfer did not complete."""
        self._metrics.kv_transfers.labels("aborted" if aborted else "failed", error.reason).inc()
        began, self._transfer_began_s = self._transfer_began_s or now, None
        self._span(KV_TRANSFER, began, now, error=error)

    @property
    def _num_tokens(self) -> int:
        """Tokens of the choice that has most: they come side by side."""
        return max((num for num, _ in self._choices.values()), default=0)

    def sampled(
        self, num_tokens: int, step_began: float, now: float, num_cached_tokens: int = 0, choice: int = 0
    ) -> None:
        """A step gave tokens of a choice; with the first come the prompt tokens had by prefix reuse."""
        self._metrics.generation_tokens.inc(num_tokens)
        num_before, last_s = self._choices.get(choice, (0, None))
        self._choices[choice] = (num_before + num_tokens, now)
        if last_s is not None:
            self._metrics.itl_seconds.observe(now - last_s)
        if self._first_s is None:
            self._first_s = now
            self._metrics.cached_tokens.inc(num_cached_tokens)
            self._decode_began_s = now if self._prefills else step_began
            if self._manifest_s is not None:
                self.timings.transfer_exposed_s = max(0.0, step_began - self._manifest_s)
                self._metrics.kv_exposed_seconds.observe(self.timings.transfer_exposed_s)
            if self._prefills:
                self._end_prefill(now)
        self._last_s = now

    def watermark(self, num_pages: int, now: float) -> None:
        """So many more pages of the prompt may be pulled."""
        self._prefill_events.append(SpanEvent(WATERMARK, now, {NUM_PAGES: num_pages}))

    def finished(self, reason: str, now: float) -> None:
        """The stream ended properly here: "stop", "length", or "handoff" once the manifest is out. First end counts."""
        if self._ended:
            return
        self._ended = True
        self._metrics.requests.labels(reason, "").inc()
        if not self._decodes:
            self._prefill_span(now)
            return
        assert self._first_s is not None
        self._metrics.e2e_seconds.observe(now - self._arrival_s)
        if self._num_tokens > 1:
            self._metrics.tpot_seconds.observe((self._last_s - self._first_s) / (self._num_tokens - 1))
        if not self._prefills or self._num_tokens > 1:
            self.timings.decode_s = now - self._decode_began_s
            self._metrics.decode_seconds.observe(self.timings.decode_s)
            self._span(DECODE, self._decode_began_s, now, events=[SpanEvent(FINISHED, now)])

    def failed(self, error: PdserveError, now: float) -> None:
        """The stream ended with an error, or was cancelled. The first end counts."""
        if self._ended:
            return
        self._ended = True
        cancelled = error.status == "CANCELLED"
        self._metrics.requests.labels("cancelled" if cancelled else "failed", error.reason).inc()
        if self._transfer_began_s is not None:
            return  # the transfer's span tells it
        if self._first_s is not None and self._decodes:
            self._span(DECODE, self._decode_began_s, now, error=error)
        elif self._started_s is not None:
            self._prefill_span(now, error)
        elif self._queued:
            self._span(QUEUE, self._arrival_s, now, error=error)

    def _end_queue(self, at: float, event: str) -> None:
        self._queued = False
        if self._prefills:  # a decode worker's wait for pages runs beside prefill's queue: counted twice otherwise
            self.timings.queue_s = at - self._arrival_s
        self._metrics.queue_seconds.observe(at - self._arrival_s)
        self._span(QUEUE, self._arrival_s, at, events=[SpanEvent(event, at)])

    def _end_prefill(self, now: float) -> None:
        self.timings.prefill_s = now - (self._arrival_s if self._started_s is None else self._started_s)
        self._metrics.prefill_seconds.observe(self.timings.prefill_s)
        self._metrics.ttft_seconds.observe(now - self._arrival_s)
        self._prefill_events.append(SpanEvent(FIRST_TOKEN, now))
        if self._decodes:
            self._prefill_span(now)

    def _prefill_span(self, now: float, error: PdserveError | None = None) -> None:
        start_s = self._arrival_s if self._started_s is None else self._started_s
        self._span(PREFILL, start_s, self._first_s or now, events=self._prefill_events, error=error)

    def _span(
        self,
        name: str,
        start_s: float,
        end_s: float,
        *,
        events: list[SpanEvent] | None = None,
        error: PdserveError | None = None,
        more: dict[str, AttributeValue] | None = None,
    ) -> None:
        attributes = {**self._attributes, **(more or {})}
        self._tracing.record(
            name, self._traceparent, start_s, end_s, attributes=attributes, events=events or (), error=error
        )


def _pulled(pulled: RangeFacts) -> SpanEvent:
    """The event of one pull, at its end."""
    facts: dict[str, AttributeValue] = {
        NUM_PAGES: pulled.num_pages,
        NUM_BYTES: pulled.num_bytes,
        WAIT_S: pulled.wait_s,
        PULL_S: pulled.pull_s,
        TRANSPORT: pulled.transport,
    }
    return SpanEvent(PULLED, pulled.verified_s, facts)
