"""Computed prompts that no decode worker has asked for yet: how long their pages wait."""

from __future__ import annotations

from pdserve.core.clock import MonotonicClock
from pdserve.core.config import WorkerConfig
from pdserve.engine.fake import expected_tokens
from pdserve.prefill_service.service import PrefillService
from pdserve.v1 import common_pb2, worker_pb2
from tests.services.test_pair import prompt_of, run
from tests.services.world import Pair, until


class AheadClock(MonotonicClock):
    """Runs as the machine's, from a time that a test sets forward."""

    ahead_s = 0.0

    def now(self) -> float:
        return super().now() + self.ahead_s


def test_an_unopened_lease_expires_though_nothing_else_happens() -> None:
    async def scenario(both: Pair) -> None:
        await both.to_prefill.send(submit=both.submission("r", prompt_of(100)))
        await until(lambda: both.to_prefill.of("r").failed is not None, "the failure")
        await both.prefill.all_free()
        failed = both.to_prefill.of("r").failed
        assert len(both.to_prefill.of("r").token_ids) == 1
        assert failed is not None and failed.reason == "LEASE_EXPIRED"
        assert both.prefill.metric("pdserve_worker_requests_total", reason="LEASE_EXPIRED") == 1
        assert both.prefill.metric("pdserve_kv_leases_expired_total") == 1

    run(scenario, worker=WorkerConfig(kv_lease_s=0.3))


def test_a_renewed_lease_is_served_after_its_first_end_and_no_other_is() -> None:
    clock = AheadClock()

    async def scenario(both: Pair) -> None:
        service, prompts = both.prefill.handler, {"kept": prompt_of(100, 1), "lost": prompt_of(100, 2)}
        assert isinstance(service, PrefillService)
        for name, prompt in prompts.items():
            await both.to_prefill.send(submit=both.submission(name, prompt))
        await until(lambda: all(len(both.to_prefill.of(name).token_ids) == 1 for name in prompts), "both first tokens")
        clock.ahead_s += 600
        await both.to_prefill.send(renew_leases=worker_pb2.RenewLeases(transfer_ids=["t-kept-1", "unknown"]))
        await both.to_prefill.send(submit=both.submission("after", prompt_of(5), max_tokens=1))
        await until(lambda: both.to_prefill.of("after").finished is not None, "what was sent after the renewal")
        clock.ahead_s += 600
        service.sweep()
        await until(lambda: both.to_prefill.of("lost").failed is not None, "the end of the other")
        for name, prompt in prompts.items():
            await both.to_decode.send(submit=both.submission(name, prompt, common_pb2.ROLE_DECODE))
        lost, kept = both.to_decode.of("lost"), both.to_decode.of("kept")
        await until(lambda: lost.failed is not None, "decode to be told")
        assert lost.failed is not None and lost.failed.reason == "LEASE_EXPIRED"
        await until(lambda: kept.finished is not None, "the renewed one")
        assert both.to_prefill.of("kept").token_ids + kept.token_ids == expected_tokens(prompts["kept"], 16)
        assert both.prefill.metric("pdserve_kv_leases_expired_total") == 1

    run(scenario, worker=WorkerConfig(kv_lease_s=1000), prefill_clock=clock)
