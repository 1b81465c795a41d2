"""A whole deployment on virtual time: whatever happens, tokens are right, streams end once, pages come back."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from pdserve.bench.sim import Report, Scenario, simulate
from pdserve.kvtransfer import fake

QUIET: dict[str, Any] = {
    "cancelled": 0.0,
    "kills": 0,
    "crashes": 0,
    "drains": 0,
    "stalls": 0,
    "lost": 0.0,
    "corrupt": 0.0,
}


@pytest.fixture(autouse=True)
def _no_log() -> Iterator[None]:
    """Dying workers are reported by the hundred; a failing test would print them all."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def check(scenario: Scenario) -> Report:
    report = simulate(scenario)
    assert not report.problems, f"{scenario}\n" + "\n".join(report.problems)
    assert len(report.outcomes) == scenario.num_requests
    return report


def test_without_faults_every_request_finishes() -> None:
    report = check(Scenario(seed=1, num_requests=50, deadline_s=1000.0, stalled=0.0, **QUIET))
    assert report.ends == {"length": 50}


def test_small_pools_and_mixed_workers() -> None:
    scenario = Scenario(seed=2, num_requests=50, num_mixed=1, num_pages=32, deadline_s=1000.0, stalled=0.0, **QUIET)
    report = check(scenario)
    assert report.ends == {"length": 50}


@pytest.mark.parametrize("batching", ["static", "dynamic"])
def test_fixed_batches_on_mixed_workers(batching: str) -> None:
    check(
        Scenario(
            seed=4, num_requests=40, num_prefill=0, num_decode=0, num_mixed=2, mixed_batching=batching, max_num_seqs=4
        )
    )


@pytest.mark.parametrize("seed", range(3))
def test_all_faults_at_once(seed: int) -> None:
    report = check(Scenario(seed=seed, num_requests=60))
    assert report.ends["length"] >= 20
    assert report.faults["kill"] + report.faults["crash"] + report.faults["drain"] >= 1


def test_requests_with_several_choices() -> None:
    quiet = Scenario(seed=1, num_requests=30, num_mixed=1, several=0.7, deadline_s=1000.0, stalled=0.0, **QUIET)
    assert check(quiet).ends == {"length": 30}
    check(Scenario(seed=2, num_requests=40, num_mixed=1, num_pages=48, several=0.7))


def test_a_corrupt_page_fails_its_transfer() -> None:
    scenario = Scenario(seed=3, num_requests=40, **{**QUIET, "corrupt": 0.05})
    report = check(scenario)
    assert 0 < report.ends["CORRUPT_PAGE"] <= report.faults["corrupt"]
    assert report.ends["length"] > 0


def test_the_same_seed_gives_the_same_events() -> None:
    scenario = Scenario(seed=5, num_requests=30)
    first, second = check(scenario), check(scenario)
    assert first.digest == second.digest
    assert first.outcomes == second.outcomes
    assert check(Scenario(seed=6, num_requests=30)).digest != first.digest


def test_a_page_that_is_not_verified_becomes_a_wrong_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation can fail: without checksums the same faults are seen as wrong tokens."""
    monkeypatch.setattr(fake.xxhash, "xxh3_64_intdigest", lambda _: 1)
    report = simulate(Scenario(seed=3, num_requests=30, **{**QUIET, "corrupt": 0.05}))
    assert any("wrong token" in problem for problem in report.problems)


@pytest.mark.parametrize("seed", range(10))
def test_drawn_scenarios(seed: int) -> None:
    check(Scenario.drawn(seed, num_requests=20))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(1000, 1100, 20))
def test_many_drawn_scenarios(first: int) -> None:
    for seed in range(first, first + 20):
        check(Scenario.drawn(seed, num_requests=60))
