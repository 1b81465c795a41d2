"""One trace per request over all processes by OTLP, with the spans queue, prefill, kv_transfer and decode."""

from __future__ import annotations

from pathlib import Path

from tests.support.deployment import deploy
from tests.support.otlp_receiver import otlp_receiver

CHILDREN = {"queue", "prefill", "kv_transfer", "decode"}


def test_one_trace_over_three_processes(tmp_path: Path) -> None:
    with (
        otlp_receiver() as receiver,
        deploy(tmp_path, "fake", common_flags=["--otlp-traces-endpoint", receiver.endpoint]) as running,
        running.client() as client,
    ):
        client.generate(prompt_token_ids=list(range(100)), max_tokens=5)
        spans = receiver.wait_for(CHILDREN, timeout_s=20)
        roots = [s for s in spans if not s.span.parent_span_id]
        while not roots:
            roots = [s for s in receiver.wait_for({"text_completion test-model"}, 20) if not s.span.parent_span_id]
    assert len(roots) == 1
    trace_id = roots[0].span.trace_id
    mine = [s for s in receiver.spans() if s.span.trace_id == trace_id]
    assert {s.name for s in mine} >= CHILDREN
    assert len({s.instance for s in mine}) == 3, "router, prefill and decode each report"
    by_name = {s.name: s for s in mine}
    assert {e for s in mine for e in s.events} >= {"scheduled", "first_token", "watermark", "committed", "finished"}
    for name in CHILDREN:
        span = by_name[name].span
        assert span.end_time_unix_nano >= span.start_time_unix_nano > 0
