"""Batching: who joins when, what finished members keep, and that a fixed batch leaves nothing behind."""

from __future__ import annotations

import pytest

from pdserve.core.errors import ConfigError
from pdserve.engine.batching import BATCHINGS, ContinuousBatching, FixedBatching, make_batching
from pdserve.engine.config import EngineConfig
from pdserve.engine.llm import LLM
from pdserve.engine.step import Abort, Add, RunnerOutput, SchedulerOutput, SequenceAborted
from tests.engine.engines import Engine, Streams, request


class Watched:
    """A runner that notes which keys each step computes."""

    def __init__(self, engine: Engine) -> None:
        self._runner = engine.runner
        self.steps: list[list[str]] = []

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        assert output.num_tokens == sum(len(item.token_ids) for item in output.sequences)
        self.steps.append([item.key for item in output.sequences])
        return self._runner.execute(output)


def watched(engine: Engine) -> Watched:
    runner = Watched(engine)
    engine.core._runner = runner
    return runner


def test_continuous_fills_every_free_slot() -> None:
    gate = ContinuousBatching(4)
    assert gate.room(0.0, num_members=1, num_waiting=9) == 3
    gate.join(3)
    assert gate.room(0.0, num_members=4, num_waiting=6) == 0
    assert gate.next_wakeup() is None


def test_static_takes_what_waits_once_the_batch_has_ended() -> None:
    gate = FixedBatching(4)
    assert gate.room(0.0, 0, 3) == 3
    gate.join(2)  # the budget kept one out
    assert gate.room(0.0, 2, 5) == 1  # it joins; those that came later do not
    gate.join(1)
    assert gate.room(1.0, 3, 4) == 0
    assert gate.room(2.0, 0, 4) == 4
    assert gate.next_wakeup() is None


def test_a_place_of_one_that_was_aborted_before_it_joined_is_nobody_s() -> None:
    gate = FixedBatching(4)
    assert gate.room(0.0, 0, 3) == 3
    gate.join(1)
    assert gate.room(1.0, 1, 1) == 1
    gate.join(0)
    assert gate.room(2.0, 1, 2) == 1


@pytest.mark.parametrize("batching", ["static", "dynamic"])
def test_forks_join_the_batch_of_their_leader(batching: str) -> None:
    engine = Engine(64, max_num_seqs=4, batching=make_batching(batching, 4, window_ms=1000))
    runner = watched(engine)
    leader, *forks = requests = [request(f"f{i}", range(6), 3 + i) for i in range(4)]
    events = list(engine.step(Add(leader, forks=tuple(forks))).events)  # a full batch
    events += engine.step(Add(request("late", [1], 2))).events
    assert (runner.steps[0], sorted(runner.steps[1])) == (["f0"], ["f0", "f1", "f2", "f3"])
    events += engine.run()
    engine.now = 9.0  # the window is over
    events += engine.run()
    assert runner.steps[-1] == ["late"]
    Streams(e for e in events if e.key != "late").check(requests)


def test_dynamic_collects_by_window_and_size() -> None:
    gate = FixedBatching(4, window_s=1.0)
    assert gate.room(0.0, 0, 0) == 0
    assert gate.next_wakeup() is None
    assert gate.room(5.0, 0, 1) == 0
    assert gate.next_wakeup() == 6.0
    assert gate.room(5.9, 0, 3) == 0
    assert gate.room(6.0, 0, 3) == 3  # the window has ended
    gate.join(3)
    assert gate.room(6.5, 3, 1) == 0  # it waits while the batch runs: its window runs too
    assert gate.next_wakeup() is None
    assert gate.room(7.0, 0, 1) == 0
    assert gate.next_wakeup() == 7.5
    assert gate.room(7.1, 0, 4) == 4  # full
    gate.join(4)
    assert gate.room(9.0, 0, 0) == 0
    assert gate.room(10.0, 0, 1) == 0  # nobody waited in between: a new window
    assert gate.next_wakeup() == 11.0


def test_a_static_batch_runs_to_its_longest_member() -> None:
    engine = Engine(16, max_num_seqs=2, batching=FixedBatching(2))
    runner = watched(engine)
    requests = [request("a", [1], 2), request("b", [2], 5), request("c", [3], 2)]
    events = list(engine.step(*map(Add, requests)).events)
    second = engine.step()
    assert Streams(list(events) + list(second.events)).finished.keys() == {"a"}  # told at once
    assert (second.load.num_running, second.load.num_waiting, second.load.num_free_pages) == (2, 1, 14)
    assert engine.step(Abort("a")).events[0] == SequenceAborted("a", False)
    engine.run()
    assert runner.steps == [["a", "b"], ["a", "b"], ["b", "a"], ["b", "a"], ["b", "a"], ["c"], ["c"]]


@pytest.mark.parametrize("batching", BATCHINGS)
def test_streams_are_right_under_every_batching(batching: str) -> None:
    engine = Engine(64, max_num_seqs=3, batching=make_batching(batching, 3, window_ms=0))
    requests = [request(f"r{i}", range(1 + 3 * i), 1 + 5 * (i % 4)) for i in range(9)]
    streams = Streams(engine.run(*map(Add, requests)))
    streams.check(requests)
    load = engine.core.load()
    assert (load.num_running, load.num_waiting, load.num_free_pages) == (0, 0, 64)


def test_the_same_key_may_come_again_while_its_old_row_is_padding() -> None:
    engine = Engine(16, max_num_seqs=2, batching=FixedBatching(2))
    first, long = request("a", [1], 1), request("b", [2], 12)
    engine.step(Add(first), Add(long))
    again = request("a", [1], 3)
    streams = Streams(engine.run(Add(again)))
    streams.check([again])


def test_a_batch_ends_when_its_last_running_member_is_aborted() -> None:
    engine = Engine(16, max_num_seqs=2, batching=FixedBatching(2))
    engine.step(Add(request("a", [1], 1)), Add(request("b", [2], 12)))
    assert engine.core.load().num_free_pages == 14
    engine.step(Abort("b"))
    assert engine.core.load().num_free_pages == 16


def test_a_running_member_grows_into_the_pages_of_a_finished_one_of_any_age() -> None:
    engine = Engine(3, max_num_seqs=2, max_num_batched_tokens=32, batching=FixedBatching(2))
    runner = watched(engine)
    old, young = request("old", range(4), 1), request("young", range(3), 9)
    streams = Streams(engine.run(Add(old), Add(young)))
    streams.check([old, young])
    assert runner.steps == [["old", "young"], ["young", "old"]] + [["young"]] * 7
    assert engine.core.load().num_free_pages == 3


def test_a_failed_engine_keeps_no_padding() -> None:
    engine = Engine(16, max_num_seqs=2, batching=FixedBatching(2))
    engine.step(Add(request("a", [1], 1)), Add(request("b", [2], 12)))

    class Broken:
        def execute(self, output: SchedulerOutput) -> RunnerOutput:
            raise RuntimeError("scripted")

    engine.core._runner = Broken()
    engine.step()
    assert engine.core.failure is not None
    assert engine.core.load().num_free_pages == 16


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"batching": "eager"}, "--batching"),
        ({"batch_size": 4}, "--batch-size"),
        ({"batching": "static", "batch_size": 100}, "--batch-size"),
        ({"batching": "static", "batch_window_ms": 5.0}, "--batch-window-ms"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(options: dict[str, object], flag: str) -> None:
    with pytest.raises(ConfigError, match=f"^{flag} is"):
        EngineConfig(**options)  # type: ignore[arg-type]


def test_workers_that_hand_over_take_only_continuous() -> None:
    EngineConfig().check_hand_offs()
    with pytest.raises(ConfigError, match="--batching is 'static'"):
        EngineConfig(batching="static").check_hand_offs()


@pytest.mark.parametrize("batching", BATCHINGS)
def test_embedded(batching: str) -> None:
    size = {} if batching == "continuous" else {"batch_size": 2}
    llm = LLM(runner="fake", num_pages=64, max_num_seqs=4, max_num_batched_tokens=64, batching=batching, **size)
    plain = LLM(runner="fake", num_pages=64, max_num_seqs=4, max_num_batched_tokens=64)
    prompts = [[1, 2, 3], [4], [5, 6]]
    assert [c.token_ids for c in llm.generate(prompts)] == [c.token_ids for c in plain.generate(prompts)]
