"""The transport nixl for real, in a process of its own: its C++ libraries clash with those of later imports."""

from __future__ import annotations

import importlib.util

import pytest

from pdserve.core.errors import ConfigError
from pdserve.kvtransfer import nixl
from tests.support.own_process import run_cases
from tests.support.tools import missing


def needs_nixl() -> None:
    if not any(importlib.util.find_spec(p) for p in nixl.PACKAGES):
        missing("nixl is not installed (pip install 'pdserve[nixl]')")


@pytest.mark.parametrize("plane", ["nixl-tcp", pytest.param("nixl-shm", marks=pytest.mark.slow)])
def test_nixl_moves_pages_and_keeps_what_it_may_still_write(plane: str) -> None:
    needs_nixl()
    run_cases("tests/kvtransfer/onesided_cases.py", "-k", plane)


def test_requests_and_aborts_over_nixl() -> None:
    needs_nixl()
    run_cases("tests/services/one_sided_cases.py", "-k", "nixl")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_pages_that_pass_a_stage_over_nixl() -> None:
    needs_nixl()
    run_cases("tests/services/one_sided_staging_cases.py", "-k", "nixl", timeout_s=250)


def test_nixl_that_is_not_installed_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "PACKAGES", ("no_such_package",))
    with pytest.raises(ConfigError, match=r"needs the package nixl-cu13: \.venv/bin/pip .*'\.\[server,nixl\]'"):
        nixl.load()
