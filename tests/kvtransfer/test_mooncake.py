"""The transport mooncake for real, in a process of its own: it brings C++ libraries that may clash with others."""

from __future__ import annotations

import importlib.util

import pytest

from pdserve.core.errors import ConfigError
from pdserve.kvtransfer import mooncake
from tests.support.own_process import run_cases
from tests.support.tools import missing


@pytest.mark.slow
@pytest.mark.parametrize("cases", ["tests/kvtransfer/onesided_cases.py", "tests/services/one_sided_cases.py"])
def test_mooncake_moves_pages_and_keeps_what_it_may_still_write(cases: str) -> None:
    if not importlib.util.find_spec("mooncake"):
        missing("mooncake is not installed (pip install 'pdserve[mooncake]')")
    run_cases(cases, "-k", "mooncake")


def test_mooncake_that_is_not_installed_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'pdserve\[mooncake\]'"):
        mooncake.load()
