"""`pdserve bench kernels`: every contender computes the same thing, and the report has what was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdserve.cli import __main__ as cli


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_kernels")
def test_quick_times_every_contender_and_each_computes_the_same(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    assert cli.main(["bench", "kernels", "--quick", "--json", str(path)]) == 0
    timed = json.loads(path.read_text())["timed"]
    for one in timed:
        assert one["ms"] > 0
        assert one["error"] < (0.03 if "int8" in one["name"] else 1e-5), one
    names = {one["name"] for one in timed}
    assert {"pdserve", "pdserve int8", "torch", "oneDNN, packed", "FBGEMM int8", "SDPA over KV in a row"} <= names


@pytest.mark.parametrize("flags", [["--rows", "0"], ["--threads", "x"], ["--threads", "257"]])
def test_wrong_values_are_refused_by_the_flag(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "kernels", *flags]) == 2
    assert flags[0] in capsys.readouterr().err
