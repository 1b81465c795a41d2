"""`pdserve bench engine`: every experiment at its quick size, the arithmetic by hand, and the contiguous baselines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pdserve.bench import engine
from pdserve.bench.engine import EXPERIMENTS
from pdserve.bench.engine_lab import Lab, VirtualTime, serve
from pdserve.bench.engine_scheduler import pass_through
from pdserve.bench.report import Report, Row, print_report
from pdserve.bench.reservation import Buddy, MaximumLength, power_of_two, simulate
from pdserve.bench.slots import Slots, StepCost, continuous, fit_cost, fixed
from pdserve.bench.workload import Item, TraceRow
from pdserve.cli import __main__ as cli
from pdserve.core.errors import ConfigError
from pdserve.engine.config import EngineConfig

SLOTS = {"num_pages": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n == "swap" else n for n in EXPERIMENTS])
def test_every_experiment_runs_and_reports(name: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert cli.main(["bench", "engine", name, "--quick", "--runner", "fake", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["command"].startswith(f"pdserve bench engine {name} --quick")
    assert report["machine"]["cores"] and report["seed"] == 0 and report["rows"]
    assert all(row["goal"] is None for row in report["rows"])
    names = [row["name"] for row in report["rows"]]
    assert len(names) == len(set(names))


def test_an_unknown_experiment_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "engine", "speed"]) == 2
    error = capsys.readouterr().err
    assert "unknown experiment 'speed'" in error and all(name in error for name in EXPERIMENTS)


def test_experiments_refuse_options_that_change_what_they_measure() -> None:
    with pytest.raises(ConfigError, match=r"^--batching is 'static'"):
        engine.main(["batching", "--quick", "--batching", "static"])


def test_slot_arithmetic_of_four_lengths() -> None:
    lengths = [10, 50, 100, 200]
    assert fixed(lengths, 4) == Slots(200, 800)
    assert continuous(lengths, 4) == Slots(200, 360)
    twice = lengths * 2
    assert fixed(twice, 4) == Slots(400, 1600)
    # 10, 10, 50, 200 in the slot that is free first; 50, 100 in the next; 100; 200
    assert continuous(twice, 4) == Slots(270, 720)
    assert fixed(lengths, 3) == Slots(300, 500)


def test_the_cost_of_a_step_is_found_again() -> None:
    cost = StepCost(0.05, 0.02, 0.01)
    steps = [(rows, chunk, cost.of(Slots(1, rows), chunk)) for rows in range(5) for chunk in (0, 3, 17)]
    found = fit_cost(steps)
    assert (found.step_s, found.row_s, found.chunk_token_s) == pytest.approx((0.05, 0.02, 0.01))
    assert fit_cost([(1, 0, 0.3), (2, 0, 0.2), (4, 0, 0.1)]).row_s == 0


@pytest.mark.parametrize("policy", ["continuous", "static"])
def test_the_engine_takes_the_steps_of_the_arithmetic(policy: str) -> None:
    lengths = [10, 50, 100, 200] * 2
    items = [Item(0.0, (1, 2, 3), n) for n in lengths]
    core, recorder = Lab(EngineConfig(runner="fake", batching=policy, **SLOTS)).engine()
    served = serve(core, recorder, items, VirtualTime(1.0, 0.0))
    slots = fixed(lengths, 4) if policy == "static" else continuous(lengths, 4)
    assert len(served.steps) == slots.steps == served.seconds
    # the arithmetic counts a prompt, whose last token gives the first output, as a row
    assert sum(s.num_decodes for s in served.steps) == slots.rows - len(lengths)
    assert sum(s.num_useful for s in served.steps) == sum(lengths)


def test_requests_are_sent_when_they_arrive() -> None:
    items = [Item(0.0, (1,), 2), Item(7.5, (2,), 1)]
    core, recorder = Lab(EngineConfig(runner="fake", **SLOTS)).engine()
    served = serve(core, recorder, items, VirtualTime(1.0, 0.0))
    assert [o.output_s for o in served.outcomes] == [(1.0, 2.0), (8.5,)]
    assert served.seconds == 8.5


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 200), st.integers(1, 60)), max_size=60))
def test_buddy_blocks_cover_the_memory_once(steps: list[tuple[bool, int, int]]) -> None:
    memory, taken = Buddy(1024), list[int]()
    for give_back, prompt, output in steps:
        if give_back and taken:
            memory.release(taken.pop(prompt % len(taken)))
        elif (handle := memory.reserve(prompt, output)) is not None:
            taken.append(handle)
        memory.check()
    for handle in taken:
        memory.release(handle)
    assert memory.reserved == 0
    assert memory.reserve(512, 512) == 0  # all of it is one block again


def test_contiguous_memory_in_virtual_time() -> None:
    rows = [TraceRow(0.0, 4, 4), TraceRow(0.0, 4, 4)]
    one = simulate(rows, MaximumLength(16, 16), 16, 8, 100, step_s=1.0, token_s=0.0)
    # one at a time; it holds 4, 5, 6, 7 of 16 tokens in its four steps
    assert (one.seconds, one.num_running, one.held_of_reserved) == (8.0, 1.0, 22 / 64)
    both = simulate(rows, Buddy(16), 16, 8, 100, step_s=1.0, token_s=0.0)
    assert (both.seconds, both.num_running, both.held_of_reserved) == (4.0, 2.0, 22 / 32)
    assert [power_of_two(n) for n in (1, 2, 3, 4, 5, 1000)] == [1, 2, 4, 4, 8, 1024]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_hundred_thousand_sequences_leave_nothing_behind() -> None:
    assert pass_through(100_000).num_left == 0


def test_many_sequences_leave_nothing_behind() -> None:
    assert pass_through(2000).num_left == 0


def test_groups_of_rows_are_set_apart() -> None:
    rows = [
        Row(f"{head}: {what}", 1, "") for head in ("16 tokens", "32 tokens") for what in ("swap", "recompute", "ratio")
    ]
    console = Console(record=True, width=80)
    print_report(Report(title="t", command=[], seed=0, rows=[*rows, Row("mean", 1, ""), Row("P99", 1, "")]), console)
    assert [line[0] for line in console.export_text().splitlines()[4:14]] == list("│││├│││├││")
