"""`pdserve bench handoff`: what it takes from a request, the goal, the schedule, and one whole run over every plane."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.bench.handoff import table
from pdserve.bench.handoff_args import HandoffConfig
from pdserve.bench.handoff_measure import Budget, chosen_planes, schedule
from pdserve.bench.handoff_numbers import (
    Group,
    NotHandedOff,
    exposed_share,
    hidden_share,
    pull_share,
    rows,
    sample_of,
    second_token,
)
from pdserve.cli import __main__ as cli
from pdserve.client import Result, Timings, Usage

PAGE = 737_280
TIMINGS = Timings(
    transfer_exposed_s=0.008,
    transfer_pull_s=0.02,
    transfer_pull_hidden_s=0.015,
    transfer_bytes=9 * PAGE,
    transfer_last_pages=4,
    transfer_last_bytes=4 * (PAGE + 84),
    handoff_gap_s=0.025,
    tpot_s=0.021,
    e2e_s=2.0,
)


def answer(timings: Timings = TIMINGS, *, cached: int = 0, num_tokens: int = 6) -> Result:
    return Result(
        text="",
        token_ids=(1,) * num_tokens,
        finish_reason="length",
        stop_reason=None,
        usage=Usage(128, num_tokens, cached),
        timings=timings,
        request_id="r",
        model="m",
        seed=0,
    )


def test_a_request_says_what_its_hand_off_took() -> None:
    sample = sample_of(answer(), 128, 6)
    assert sample.page_bytes == PAGE, "what the plane adds is no part of a page"
    assert sample.itl_s == pytest.approx(0.02)  # 5 gaps of 21 ms in the mean, the first of 25
    assert second_token(sample) == pytest.approx(0.25)
    assert exposed_share(sample) == pytest.approx(0.004)
    assert (pull_share(sample), hidden_share(sample)) == (pytest.approx(0.01), pytest.approx(0.75))


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (answer(cached=16), "prefix cache"),
        (answer(num_tokens=5), "5 output tokens"),
        (answer(replace(TIMINGS, transfer_exposed_s=None)), "not handed"),
        (answer(replace(TIMINGS, transfer_last_pages=0)), "not handed"),
    ],
)
def test_another_request_is_refused(result: Result, says: str) -> None:
    with pytest.raises(NotHandedOff, match=says):
        sample_of(result, 128, 6)


def test_the_goal_is_that_of_each_requests_last_range() -> None:
    sample = sample_of(answer(), 128, 6)
    group = Group("tcp", [sample, replace(sample, exposed_s=0.5, last_pages=1)], {4: 0.004, 1: 0.001})
    assert group.allowed_s(sample) == pytest.approx(0.0102)
    assert group.rate(sample) == pytest.approx(4 * PAGE / 0.004)
    assert group.num_met == 1
    values = {row.name: row for row in rows([group])}
    assert values["tcp, 128 tokens: requests within it"].value == 1
    assert values["tcp, 128 tokens: manifest to VALID, median"].goal == "<= 8.2"  # of 10.2 and 6.3
    assert table([group]).row_count == 1


def test_long_prompts_are_sent_less_often_and_all_lengths_in_turn() -> None:
    config = HandoffConfig(prompt_len="4000,512,1024", repeats=8)
    assert [config.repeats_of(n) for n in (128, 512, 1024, 4000)] == [8, 8, 4, 3]
    assert schedule(config)[:4] == [512, 1024, 4000, 512] and len(schedule(config)) == 8 + 4 + 3
    assert HandoffConfig(repeats=2).repeats_of(4000) == 2


def test_time_allows_the_first_of_a_length_and_no_later_one_that_would_be_late() -> None:
    budget = Budget(10.0)
    assert budget.allows(4000, 50.0)
    budget.took(4000, 4.0)
    assert budget.allows(4000, 6.0) and not budget.allows(4000, 6.1)


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--planes", "pigeon"], "--planes: unknown pigeon; known: all, shm"),
        (["--prompt-len", "128,x"], "--prompt-len"),
        (["--prompt-len", "0"], "--prompt-len"),
        (["--output-len", "2"], "--output-len"),
        (["--up-flags", "'"], "--up-flags"),
    ],
)
def test_wrong_values_are_refused_by_the_flag(flags: list[str], names: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "handoff", *flags]) == 2
    assert names in capsys.readouterr().err


@pytest.mark.slow
def test_quick_measures_every_plane_on_real_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "handoff.json"
    flags = ["--quick", "--json", str(path), "--up-flags=--runner fake --max-num-batched-tokens 64"]
    assert cli.main(["bench", "handoff", *flags]) == 0, capsys.readouterr().err
    groups = json.loads(path.read_text())["groups"]
    assert [(g["plane"], g["num_prompt_tokens"]) for g in groups] == [
        (p, n) for p in chosen_planes("all") for n in (64, 200)
    ]
    for sample in (sample for group in groups for sample in group["samples"]):
        assert 0 < sample["exposed_s"] < sample["e2e_s"] and sample["backend_s"] > 0
        assert 0 <= sample["pull_hidden_s"] <= sample["pull_s"]
        assert 1 <= sample["last_pages"] <= 13
    assert "manifest" in capsys.readouterr().out
