"""P full of leases and D full of reservations at the same instant: nobody waits in a circle, all requests end well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest

from pdserve.bench.sim import Scenario, simulate
from pdserve.bench.sim_worker import SimWorker
from pdserve.engine.sequence import SequenceState

NUM_PAGES, PAGE_SIZE = 32, 4


def full_of_leases(worker: SimWorker) -> bool:
    """Computed prompts that a reader may be at hold most pages, and the next prompt waits for their room."""
    scheduler = worker.engine.core._scheduler
    leased = [s for s in scheduler._sequences.values() if s.state is SequenceState.HANDOFF and s.num_announced]
    head = scheduler._waiting.head()
    if head is None or head.page_table or 2 * sum(len(s.page_table) for s in leased) <= NUM_PAGES:
        return False
    return -(-head.goal // PAGE_SIZE) > scheduler._pages.num_free


def full_of_reservations(worker: SimWorker) -> bool:
    """Pages set aside for transfers are most of all, and the next reservation waits for their room."""
    scheduler = worker.engine.core._scheduler
    granted = [s for s in scheduler._sequences.values() if s.granted]
    head = scheduler._reservations.head()
    if head is None or 2 * sum(len(s.page_table) for s in granted) <= NUM_PAGES:
        return False
    return -(-head.num_initial // PAGE_SIZE) > scheduler._pages.num_free


@pytest.mark.parametrize("number", [20, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_both_pools_full_at_once(number: int) -> None:
    """Pages take long, so that leases and reservations last; each request with its own tokens, in virtual time."""
    seen: Counter[str] = Counter()

    def look(workers: Mapping[str, SimWorker]) -> None:
        prefill, decode = workers.get("prefill-0"), workers.get("decode-0")
        if prefill is None or decode is None:
            return
        leases, reservations = full_of_leases(prefill), full_of_reservations(decode)
        seen.update(leases=leases, reservations=reservations, both=leases and reservations)

    scenario = Scenario(
        seed=7,
        num_prefill=1,
        num_decode=1,
        num_requests=number,
        request_rate=1000.0,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        page_s=0.01,
        deadline_s=1e6,
        queue_timeout_s=1e6,
        max_open=48,
        cancelled=0.0,
        kills=0,
        crashes=0,
        drains=0,
        stalls=0,
        lost=0.0,
        corrupt=0.0,
        stalled=0.0,
    )
    report = simulate(scenario, look)
    assert not report.problems, "\n".join(report.problems)  # no wrong token, no page or record left
    assert report.ends == {"length": number}
    assert seen["both"] >= number // 4, seen
