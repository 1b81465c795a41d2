"""`pdserve bench transfer`: every plane moves the right pages, and the report has what was asked for."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from pdserve.bench import transfer
from pdserve.bench.transfer_args import TransferConfig
from pdserve.bench.transfer_libraries import LIBRARIES
from pdserve.bench.transfer_methods import Case, Moved, PlaneMethod
from pdserve.bench.transfer_report import shares, tables
from pdserve.bench.transfer_source import PLANES, TLS_PLANE, fill, make_pool
from pdserve.cli import __main__ as cli
from pdserve.cli.authority import Authority
from pdserve.core.errors import TransferError
from pdserve.core.tls import TlsConfig
from tests.support.certificates import flags as tls_flags
from tests.support.certificates import member
from tests.support.tools import missing


def test_quick_measures_every_plane_of_its_own_and_writes_the_raw_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # no column is cut
    path = tmp_path / "transfer.json"
    words = ["--planes", ",".join((*PLANES, TLS_PLANE)), *tls_flags(member(tmp_path / "tls", Authority.new()))]
    assert cli.main(["bench", "transfer", "--quick", "--json", str(path), *words]) == 0
    cases = json.loads(path.read_text())["cases"]
    methods = {"memcpy", "bare sockets"} | {
        f"{name}, {mode}" for name in (*PLANES, TLS_PLANE) for mode in ("none", "host")
    }
    assert {case["method"] for case in cases} == methods
    assert {case["scattered"] for case in cases} == {False, True}
    assert all(len(case["gb_per_s"]) == 1 and case["gb_per_s"][0] > 0 for case in cases)
    assert "scattered" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("plane", LIBRARIES)
def test_a_library_is_measured_bare_and_under_pdserve(
    plane: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not LIBRARIES[plane].is_installed:
        missing(f"{plane} is not installed (pip install 'pdserve[{LIBRARIES[plane].transport}]')")
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "transfer.json"
    words = ["--planes", plane, "--page-kib", "64", "--total-mib", "1,16", "--repeats", "1", "--json", str(path)]
    assert cli.main(["bench", "transfer", *words]) == 0
    report = json.loads(path.read_text())
    measured = {case["method"] for case in report["cases"] if len(case["gb_per_s"]) == 1}
    assert measured == {"memcpy", "bare sockets", f"bare {plane}, none", f"bare {plane}, host", f"{plane}, host"}
    assert len(report["cases"]) == 4 * len(measured)
    assert any(f"{plane}, host ÷ bare {plane}, host" in row["name"] and row["value"] > 0 for row in report["rows"])
    assert "refuses these planes without checksums" in capsys.readouterr().out


class Scripted:
    """A method that takes one second, or fails."""

    def __init__(self, fails: bool = False, verified: Moved | None = None) -> None:
        self.fails, self.verified, self.closed = fails, verified, 0

    async def move(self, case: Case, seed: int) -> Moved:
        if self.fails and case.scattered:
            raise TransferError("it does not", reason="SCRIPTED")
        return Moved(1.0, 0.5, verified=self.verified)

    async def close(self) -> None:
        self.closed += 1


def measured_with(methods: dict[str, Scripted], monkeypatch: pytest.MonkeyPatch, **options: Any) -> transfer.Measured:
    makers = {name: (lambda made=made: made) for name, made in methods.items()}
    monkeypatch.setattr(transfer, "_methods", lambda *_: makers)
    config = TransferConfig(page_kib="64", total_mib="1,2", repeats=3, **options)
    return asyncio.run(transfer.measure(config, TlsConfig(), [], lambda text: None))


def test_a_method_that_fails_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    methods = {"memcpy": Scripted(), "shm, none": Scripted(fails=True)}
    measured = measured_with(methods, monkeypatch)
    counts = [{name: len(moves) for name, moves in runs.items()} for runs in measured.runs.values()]
    assert counts == [{"memcpy": 3, "shm, none": 3}, {"memcpy": 3}, {"memcpy": 3}, {"memcpy": 3}]
    assert measured.failures == ["shm, none failed: 1 MiB, pages of 64 KiB, scattered: it does not"]
    assert [made.closed for made in methods.values()] == [1, 1]
    rows = {row.name: row.value for row in shares(measured.runs)}
    assert rows == {
        "shm, none ÷ memcpy, median of the cases": 1.0,
        "shm, none ÷ memcpy, the worst case": 1.0,
    }
    assert [list(column.cells) for column in tables(measured.runs)[-1].columns[3:]] == [["1.00", "-", "-", "-"]]


def test_no_case_is_begun_when_the_minutes_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = measured_with({"memcpy": Scripted()}, monkeypatch, max_minutes=0.0)
    assert not measured.runs and len(measured.left_out) == 4


def test_what_is_verified_afterwards_is_compared_like_with_like(monkeypatch: pytest.MonkeyPatch) -> None:
    methods = {"bare mooncake": Scripted(verified=Moved(2.0, 0.7)), "mooncake, host": Scripted()}
    measured = measured_with(methods, monkeypatch)
    rows = {row.name.partition(",")[2]: row.value for row in shares(measured.runs)}
    assert rows[" host ÷ bare mooncake, host, median of the cases"] == 2.0
    assert rows[" host ÷ bare mooncake, none, median of the cases"] == 1.0
    titles = [(str(t.title), [str(column.header) for column in t.columns[3:]]) for t in tables(measured.runs)]
    names = ["bare mooncake, none", "bare mooncake, host", "mooncake, host"]
    compared = [f"mooncake, host ÷ bare mooncake, {integrity}" for integrity in ("host", "none")]
    assert titles == [("GB/s", names), ("processor seconds per GB, both processes", names), ("shares", compared)]


def test_the_help_names_every_plane() -> None:
    told = {f.name: f.metadata["help"] for f in fields(TransferConfig)}["planes"]
    assert {*PLANES, TLS_PLANE, *LIBRARIES} <= set(re.split(r"[ ,;]+", told.replace(":", " ")))


def test_a_library_that_is_not_installed_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["bench", "transfer", "--planes", "nixl-shm"]) == 2
    said = "--planes: nixl-shm is not installed: .venv/bin/pip install -c constraints.txt -e '.[server,bench,nixl]'"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("plane", PLANES)
def test_every_page_arrives_where_it_belongs(plane: str) -> None:
    case = Case(64 << 10, 8, scattered=True)
    pool, expected = make_pool(case.page_bytes, 16), make_pool(case.page_bytes, 16)
    fill(expected)

    async def move() -> None:
        method = PlaneMethod(plane, pool, "host", 60.0)
        try:
            await method.move(case, 0)
        finally:
            await method.close()

    asyncio.run(move())
    for source, target in zip(case.pages(0, 16), case.pages(1, 16), strict=True):
        assert pool.page(target)[:8] == expected.page(source)[:8]


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--planes", "tcp+tls"], "--planes: tcp+tls needs --tls-cert-file"),
        (["--planes", "pigeon"], "--planes: unknown pigeon"),
        (["--page-kib", "0"], "--page-kib"),
        (["--total-mib", "x"], "--total-mib"),
        (["--page-kib", "2048", "--total-mib", "1"], "--total-mib"),
    ],
)
def test_wrong_values_are_refused_by_the_flag(flags: list[str], names: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "transfer", *flags]) == 2
    assert names in capsys.readouterr().err
