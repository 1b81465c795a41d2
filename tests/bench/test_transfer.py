"""`pdserve bench transfer`: every plane moves the right pages, and the report has what was asked for."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from pdserve.bench.transfer_methods import Case, PlaneMethod
from pdserve.bench.transfer_source import PLANES, TLS_PLANE, fill, make_pool
from pdserve.cli import __main__ as cli
from pdserve.cli.authority import Authority
from tests.support.certificates import flags as tls_flags
from tests.support.certificates import member


def test_quick_measures_every_plane_and_writes_the_raw_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # no column is cut
    path = tmp_path / "transfer.json"
    words = tls_flags(member(tmp_path / "tls", Authority.new()))
    assert cli.main(["bench", "transfer", "--quick", "--json", str(path), *words]) == 0
    cases = json.loads(path.read_text())["cases"]
    methods = {"memcpy", "bare sockets"} | {
        f"{name}, {mode}" for name in (*PLANES, TLS_PLANE) for mode in ("none", "host")
    }
    assert {case["method"] for case in cases} == methods
    assert {case["scattered"] for case in cases} == {False, True}
    assert all(len(case["gb_per_s"]) == 1 and case["gb_per_s"][0] > 0 for case in cases)
    assert "scattered" in capsys.readouterr().out


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
