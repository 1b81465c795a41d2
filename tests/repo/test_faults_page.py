"""docs/faults.md: seventy rows in order, and every test that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "faults.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")] for line in PAGE.splitlines() if re.match(r"\| \d", line)
]
TEST = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


def test_every_fault_has_its_row() -> None:
    assert [int(row[0]) for row in ROWS] == list(range(1, 71))
    for number, thread, _, verdict, test in ROWS:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+(, [\w.-]+/[\w.-]+#\d+)*", thread), number
        assert re.match(r"\*\*(no|caught|open)\*\*", verdict), number
        assert TEST.search(test) or ("open" in verdict and test.strip() in ("-", "- |")), f"{number} has no test"


def test_every_test_that_is_named_exists() -> None:
    named = TEST.findall(PAGE)
    assert len(named) >= 70
    for path, name in named:
        text = (ROOT / "tests" / path).read_text()
        assert re.search(rf"^def {name}\(", text, re.MULTILINE), f"{path}::{name}"
