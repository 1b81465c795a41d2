"""`pdserve bench gil`: each mode streams every token of a tiny run, one message per step."""

from __future__ import annotations

import pytest

from pdserve.bench.gil import MODES, measure
from pdserve.bench.gil_engine import BusyRunner, Case, build_core, commands
from pdserve.cli import __main__ as cli


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_streams_once_per_step(mode: str) -> None:
    measured = measure(Case(num_streams=4, num_steps=5), mode)
    assert measured.step_ms > 0
    assert measured.messages_per_step == (None if mode == "alone" else 1.0)
    assert (measured.tokens_per_s is None) == (mode == "alone")


def test_a_run_is_one_step_of_prompts_and_then_decodes() -> None:
    case = Case(num_streams=4, num_steps=5)
    core = build_core(case)
    core.begin_step(commands(case))
    assert [core.step(0.0).num_tokens for _ in range(7)] == [64, 4, 4, 4, 4, 4, 0]
    core.check()


def test_the_share_of_python_decides_the_work() -> None:
    class Nothing:
        def execute(self, output):  # type: ignore[no-untyped-def]
            return output

    releasing, holding = BusyRunner(Nothing(), 10.0, 0.0), BusyRunner(Nothing(), 10.0, 1.0)
    assert releasing._loops == 0 < releasing._products and holding._products == 0 < holding._loops


def test_wrong_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "gil", "--python-share", "2"]) == 2
    assert "--python-share in [0, 1]" in capsys.readouterr().err
