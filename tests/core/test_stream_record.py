"""Where the time of an attempt went: every end is counted once, every part is one span, nothing is counted twice."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry

from pdserve.core.errors import CancelledError, CapacityError, PdserveError, TransferError
from pdserve.core.stream_record import StreamRecord
from pdserve.core.telemetry import WorkerMetrics
from pdserve.v1 import common_pb2, worker_pb2

P, D, MIXED = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE, common_pb2.ROLE_MIXED


@dataclass
class Spans:
    """A tracer that keeps (name, start, end, reason of the error)."""

    seen: list[tuple[str, float, float, str]] = field(default_factory=list)
    events: list[tuple[str, float, dict[str, object]]] = field(default_factory=list)

    def record(self, name, traceparent, start_s, end_s, *, attributes, events, error=None):
        assert start_s <= end_s and traceparent == "tp" and attributes["pdserve.request_id"] == "r"
        self.seen.append((name, start_s, end_s, error.reason if error else ""))
        self.events += [(e.name, e.at_s, dict(e.attributes)) for e in events]


@dataclass(frozen=True)
class Range:
    num_pages: int = 2
    num_bytes: int = 500
    wait_s: float = 0.25
    pull_s: float = 0.5
    verified_s: float = 15.5
    transport: str = "tcp"


@dataclass(frozen=True)
class Pulled:
    bytes_on_wire: int = 1000
    transfer_s: float = 3.0
    hidden_s: float = 2.0
    num_pages: int = 4
    transport: str = "tcp"
    manifest_s: float = 15.0
    ranges: tuple[Range, ...] = (Range(verified_s=13.0), Range(num_pages=1, num_bytes=300))
    pull_s: float = 1.0
    pull_hidden_s: float = 0.5


class Seen:
    def __init__(self, part: common_pb2.Role) -> None:
        self.registry, self.spans = CollectorRegistry(), Spans()
        submit = worker_pb2.Submit(
            fence=common_pb2.Fence(request_id="r", attempt=1), part=part, prompt_token_ids=[1, 2, 3], traceparent="tp"
        )
        self.record = StreamRecord(WorkerMetrics(self.registry, "decode"), self.spans, submit, 10.0)  # type: ignore[arg-type]

    def metric(self, name: str, **labels: str) -> float:
        samples = [s for m in self.registry.collect() for s in m.samples if s.name == name]
        return sum(s.value for s in samples if labels.items() <= s.labels.items())


def test_prefill_hands_off() -> None:
    s = Seen(P)
    s.record.started(12.0)
    s.record.watermark(2, 13.0)
    s.record.sampled(1, 15.0, 15.0, 2)
    s.record.finished("handoff", 16.0)
    assert s.spans.seen == [("queue", 10.0, 12.0, ""), ("prefill", 12.0, 15.0, "")]
    assert (s.record.timings.queue_s, s.record.timings.prefill_s) == (2.0, 3.0)
    assert s.metric("pdserve_cached_prompt_tokens_total") == 2


def test_decode_pulls_and_generates() -> None:
    s = Seen(D)
    s.record.reserved(12.0)
    s.record.transferred(Pulled(), 16.0)
    s.record.sampled(1, 16.5, 17.0)
    s.record.sampled(2, 17.0, 18.0)
    s.record.finished("stop", 18.0)
    assert s.spans.seen == [("queue", 10.0, 12.0, ""), ("kv_transfer", 12.0, 16.0, ""), ("decode", 16.5, 18.0, "")]
    t = s.record.timings
    assert (t.queue_s, t.transfer_s, t.transfer_hidden_s, t.transfer_bytes, t.decode_s) == (0.0, 3.0, 2.0, 1000, 1.5)
    assert (t.transfer_exposed_s, t.transfer_pull_s, t.transfer_pull_hidden_s) == (1.5, 1.0, 0.5)
    assert (t.transfer_last_pages, t.transfer_last_bytes) == (1, 300)
    assert s.metric("pdserve_generation_tokens_total") == 3
    assert s.metric("pdserve_worker_tpot_seconds_sum") == 0.5
    assert s.metric("pdserve_kv_transfer_exposed_seconds_sum") == 1.5
    assert s.metric("pdserve_kv_transfer_pull_seconds_sum") == 1.0
    pulls = [(at_s, facts["pdserve.num_bytes"]) for name, at_s, facts in s.spans.events if name == "pulled"]
    assert pulls == [(13.0, 500), (15.5, 300)]


def test_bytes_count_for_the_plane_that_moved_them() -> None:
    """Sources of one prompt may have unlike ones."""
    s = Seen(D)
    s.record.reserved(12.0)
    pulls = (Range(transport="shm"), Range(num_bytes=300), Range(num_bytes=200, transport="shm"))
    s.record.transferred(Pulled(transport="shm+tcp", ranges=pulls), 16.0)
    moved = "pdserve_kv_transfer_bytes_total"
    assert [s.metric(moved, transport=name) for name in ("shm", "tcp", "shm+tcp")] == [700, 300, 0]
    planes = [facts["pdserve.transport"] for name, _, facts in s.spans.events if name == "pulled"]
    assert planes == ["shm", "tcp", "shm"]


def test_mixed_does_both() -> None:
    s = Seen(MIXED)
    s.record.started(11.0)
    s.record.sampled(1, 11.0, 12.0)
    s.record.sampled(1, 12.0, 14.0)
    s.record.finished("length", 14.0)
    assert s.spans.seen == [("queue", 10.0, 11.0, ""), ("prefill", 11.0, 12.0, ""), ("decode", 12.0, 14.0, "")]
    assert (s.record.timings.prefill_s, s.record.timings.decode_s) == (1.0, 2.0)


@pytest.mark.parametrize("part", [P, D, MIXED])
def test_what_never_began_has_waited(part: common_pb2.Role) -> None:
    s = Seen(part)
    s.record.failed(CapacityError("full", reason="RESERVATION_REFUSED"), 13.0)
    assert s.spans.seen == [("queue", 10.0, 13.0, "RESERVATION_REFUSED")]
    assert s.metric("pdserve_worker_requests_total", finish_reason="failed", reason="RESERVATION_REFUSED") == 1


def test_a_failed_transfer_is_one_span_with_its_reason() -> None:
    s = Seen(D)
    lost = TransferError("gone", reason="PEER_LOST")
    s.record.reserved(11.0)
    s.record.failed(CancelledError("the router ended it"), 12.0)
    s.record.transfer_failed(lost, 13.0, aborted=True)
    assert s.spans.seen == [("queue", 10.0, 11.0, ""), ("kv_transfer", 11.0, 13.0, "PEER_LOST")]
    assert s.metric("pdserve_kv_transfers_total", outcome="aborted") == 1


def test_the_first_end_counts() -> None:
    s = Seen(P)
    s.record.started(11.0)
    s.record.sampled(1, 12.0, 12.0)
    s.record.finished("handoff", 12.0)
    s.record.failed(PdserveError("later"), 20.0)
    s.record.finished("handoff", 21.0)
    assert [name for name, *_ in s.spans.seen] == ["queue", "prefill"]
    assert s.metric("pdserve_worker_requests_total") == 1
