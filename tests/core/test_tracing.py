"""One trace over several processes, against a real OTLP receiver; and what tracing must never do."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import time

from pdserve.core import tracing as t
from pdserve.core.clock import MonotonicClock
from pdserve.core.errors import TransferError
from pdserve.core.sampling import SamplingParams
from tests.support.otlp_receiver import otlp_receiver
from tests.support.redis_server import free_port

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_one_trace_over_two_processes():
    async def main(endpoint: str) -> None:
        clock = MonotonicClock()
        router = t.Tracing("pdserve-router", "r1", endpoint, clock)
        worker = t.Tracing("pdserve-decode", "w1", endpoint, clock)
        now = clock.now()
        sampling = SamplingParams(max_tokens=8, temperature=0.0, seed=3)
        attributes = t.request_attributes("smol", sampling)
        root = router.start_request("text_completion smol", now - 4, traceparent=CLIENT, attributes=attributes)
        root.event(t.SpanEvent(t.SCHEDULED, now - 3))
        worker.record(t.QUEUE, root.traceparent, now - 4, now - 3)
        marks = [t.SpanEvent(t.WATERMARK, now - 2.5, {t.NUM_PAGES: 2}), t.SpanEvent(t.COMMITTED, now - 2)]
        lost = TransferError("gone")
        worker.record(t.KV_TRANSFER, root.traceparent, now - 3, now - 2, events=marks, error=lost)
        root.set(t.usage_attributes(input_tokens=5, output_tokens=8, finish_reason="length"))
        root.end(now - 1)
        root.end(now)  # only the first counts
        await router.shutdown(5)
        await worker.shutdown(5)

    with otlp_receiver() as receiver:
        before = time.time()
        asyncio.run(main(receiver.endpoint))
        spans = {s.name: s for s in receiver.wait_for({"text_completion smol", t.QUEUE, t.KV_TRANSFER})}
    assert len(receiver.spans()) == 3
    root = spans["text_completion smol"]
    assert {s.span.trace_id.hex() for s in spans.values()} == {"0af7651916cd43dd8448eb211c80319c"}
    assert root.span.parent_span_id.hex() == "b7ad6b7169203331"
    assert {spans[n].span.parent_span_id for n in (t.QUEUE, t.KV_TRANSFER)} == {root.span.span_id}
    assert (root.service, spans[t.QUEUE].service, spans[t.QUEUE].instance) == ("pdserve-router", "pdserve-decode", "w1")
    assert root.attributes["gen_ai.request.model"] == "smol"
    assert root.attributes["gen_ai.request.max_tokens"] == 8
    assert root.attributes["gen_ai.usage.output_tokens"] == 8
    assert root.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert root.events == [t.SCHEDULED]
    transfer = spans[t.KV_TRANSFER]
    assert transfer.events == [t.WATERMARK, t.COMMITTED]
    assert transfer.attributes["error.type"] == "TRANSFER_FAILED"
    for span, seconds in ((root, 3), (spans[t.QUEUE], 1), (transfer, 1)):
        length_s = (span.span.end_time_unix_nano - span.span.start_time_unix_nano) / 1e9
        assert abs(length_s - seconds) < 0.5  # durations are the caller's; the wall clock is read twice
    assert abs(root.span.start_time_unix_nano / 1e9 - (before - 4)) < 60


def test_an_unreadable_traceparent_starts_a_new_trace():
    async def main(endpoint: str) -> None:
        tracing = t.Tracing("pdserve-router", "r1", endpoint, MonotonicClock())
        for text in ("", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"):
            span = tracing.start_request("a", 0.0, traceparent=text)
            assert span.traceparent.startswith("00-")
            span.end(1.0)
        await tracing.shutdown(5)

    with otlp_receiver() as receiver:
        asyncio.run(main(receiver.endpoint))
        spans = receiver.wait_for({"a"})
    assert len({s.span.trace_id for s in spans}) == 3


def test_an_unsampled_caller_is_respected():
    async def main(endpoint: str) -> None:
        tracing = t.Tracing("pdserve-router", "r1", endpoint, MonotonicClock())
        span = tracing.start_request("unsampled", 0.0, traceparent=CLIENT[:-2] + "00")
        tracing.record(t.QUEUE, span.traceparent, 0.0, 1.0)
        span.end(1.0)
        tracing.start_request("sampled", 0.0).end(1.0)
        await tracing.shutdown(5)

    with otlp_receiver() as receiver:
        asyncio.run(main(receiver.endpoint))
        assert [s.name for s in receiver.wait_for({"sampled"})] == ["sampled"]


def test_without_an_endpoint_nothing_is_loaded():
    program = (
        "import asyncio, sys\n"
        "from pdserve.core import tracing as t\n"
        "from pdserve.core.clock import MonotonicClock\n"
        "tracing = t.Tracing('s', 'i', None, MonotonicClock())\n"
        "span = tracing.start_request('a', 0.0)\n"
        "span.event(t.SpanEvent(t.SCHEDULED, 0.0)); span.set({}); span.end(1.0)\n"
        "tracing.record(t.QUEUE, span.traceparent, 0.0, 1.0)\n"
        "asyncio.run(tracing.shutdown(1))\n"
        "assert span.traceparent == ''\n"
        "print([m for m in sys.modules if m.startswith('opentelemetry')])\n"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "[]"


def test_an_unreachable_collector_neither_blocks_nor_spams(caplog):
    async def main() -> None:
        tracing = t.Tracing("s", "i", f"http://127.0.0.1:{free_port()}", MonotonicClock())
        for _ in range(5000):
            tracing.start_request("a", 0.0).end(1.0)
        async with asyncio.timeout(10):
            await tracing.shutdown(0.5)

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert len(caplog.records) < 20
