"""The fault suite over the planes of libraries, each in a process of its own."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import pytest

from pdserve.kvtransfer import nixl
from tests.support.own_process import run_cases
from tests.support.tools import missing

from .planes import LIBRARY_PLANE


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cases", ["test_plane_faults.py", "test_messages.py"])
@pytest.mark.parametrize(("name", "packages"), [("nixl", nixl.PACKAGES), ("mooncake", ["mooncake"])])
def test_the_fault_suite(name: str, packages: Sequence[str], cases: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not any(importlib.util.find_spec(package) for package in packages):
        missing(f"{name} is not installed (pip install 'pdserve[{name}]')")
    monkeypatch.setenv(LIBRARY_PLANE, name)
    run_cases(f"tests/kvtransfer/{cases}", "-k", name, timeout_s=800)
