"""Ranges of a transfer: what was announced when, and how much of the pulling was hidden."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.kvtransfer.timeline import PulledRange, Timeline, TransferResult, merged


def result(manifest_s: float, *ranges: PulledRange) -> TransferResult:
    return TransferResult(1, 0, False, 0, 0.0, 0.0, 0, "tcp", manifest_s, ranges)


def pulled(began_s: float, verified_s: float) -> PulledRange:
    return PulledRange(0, 1, 100, began_s, began_s, verified_s, "tcp")


def test_a_range_waits_from_when_all_of_it_was_announced() -> None:
    line = Timeline()
    line.announced(2, 1.0)
    line.announced(2, 1.5)  # a repetition
    line.announced(5, 2.0)
    line.announced(6, 3.0)
    line.pulled(0, 2, 20, 1.25, 3.5, "tcp")
    line.pulled(2, 4, 40, 3.5, 4.0, "tcp")
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


def part(token_id: int, transport: str, manifest_s: float, *ranges: PulledRange) -> TransferResult:
    num_bytes, moved = sum(r.num_bytes for r in ranges), [replace(r, transport=transport) for r in ranges]
    return TransferResult(token_id, 0, False, num_bytes, 0.0, 0.0, len(ranges), transport, manifest_s, moved)


def test_parts_of_several_sources_are_one_transfer() -> None:
    """From the first pull of any to the last page of all; hidden until the last of them was computed."""
    first = part(7, "tcp", 4.0, pulled(2.0, 3.0), pulled(4.0, 8.0))
    found = merged([first, part(9, "shm", 6.0, pulled(1.0, 5.0))])
    assert (found.token_id, found.transport, found.manifest_s) == (7, "shm+tcp", 6.0)
    assert (found.transfer_s, found.hidden_s) == (7.0, 5.0)
    assert (found.bytes_on_wire, found.num_pages) == (300, 3)
    assert [(r.verified_s, r.transport) for r in found.ranges] == [(3.0, "tcp"), (5.0, "shm"), (8.0, "tcp")]
    assert (found.pull_s, found.pull_hidden_s) == (9.0, 7.0)


def test_parts_that_pulled_nothing_take_no_time() -> None:
    found = merged([part(7, "tcp", 4.0), part(7, "tcp", 5.0)])
    assert (found.transfer_s, found.hidden_s, found.num_pages, found.transport) == (0.0, 0.0, 0, "tcp")


def test_nothing_pulled_takes_no_time() -> None:
    assert (result(3.0).pull_s, result(3.0).pull_hidden_s, Timeline().ranges) == (0.0, 0.0, ())
