"""Ranges of a transfer: what was announced when, and how much of the pulling was hidden."""

from __future__ import annotations

import pytest

from pdserve.kvtransfer.timeline import PulledRange, Timeline, TransferResult


def result(manifest_s: float, *ranges: PulledRange) -> TransferResult:
    return TransferResult(1, 0, False, 0, 0.0, 0.0, 0, "tcp", manifest_s, ranges)


def pulled(began_s: float, verified_s: float) -> PulledRange:
    return PulledRange(0, 1, 100, began_s, began_s, verified_s)


def test_a_range_waits_from_when_all_of_it_was_announced() -> None:
    line = Timeline()
    line.announced(2, 1.0)
    line.announced(2, 1.5)  # a repetition
    line.announced(5, 2.0)
    line.announced(6, 3.0)
    line.pulled(0, 2, 20, 1.25, 3.5)
    line.pulled(2, 4, 40, 3.5, 4.0)
    first, second = line.ranges
    assert (first.announced_s, first.wait_s, first.pull_s) == (1.0, 0.25, 2.25)
    assert (second.announced_s, second.first_page, second.num_pages, second.num_bytes) == (3.0, 2, 4, 40)


@pytest.mark.parametrize(
    ("manifest_s", "hidden_s"),
    [(0.5, 0.0), (1.5, 0.5), (3.0, 1.0), (4.5, 1.5), (9.0, 2.0)],
    ids=["nothing", "within the first", "between", "within the last", "all"],
)
def test_what_ran_before_the_manifest_is_hidden(manifest_s: float, hidden_s: float) -> None:
    found = result(manifest_s, pulled(1.0, 2.0), pulled(4.0, 5.0))
    assert (found.pull_s, found.pull_hidden_s) == (2.0, hidden_s)


def test_nothing_pulled_takes_no_time() -> None:
    assert (result(3.0).pull_s, result(3.0).pull_hidden_s, Timeline().ranges) == (0.0, 0.0, ())
