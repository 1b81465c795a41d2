"""The transport mooncake for real, in a process of its own: it brings C++ libraries that may clash with others."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from types import SimpleNamespace

import pytest

from pdserve.core.errors import ConfigError, TransferError
from pdserve.kvtransfer import mooncake
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.remote_reads import ReadState, RemotePool
from tests.support.own_process import run_cases
from tests.support.tools import missing

from .world import SMALL


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


def test_an_engine_that_does_not_start_fails_pulls_of_its_source_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """For another process at an address where one was before the reader opens another engine."""
    answers = [0, -1, 0]

    class Engine:
        def initialize(self, *_: object) -> int:
            return answers.pop(0)

        def get_rpc_port(self) -> int:
            return 1

    monkeypatch.setattr(mooncake, "load", lambda: SimpleNamespace(TransferEngine=Engine))
    library = mooncake.MooncakeLibrary(KvPool(SMALL, 2), host="127.0.0.1")
    before = RemotePool("mooncake", "before", "127.0.0.1:9", 1, 2, SMALL.page_bytes)
    library.begin(before, [])
    after = replace(before, instance="after")
    with pytest.raises(TransferError, match="the engine does not start") as e:
        library.begin(after, [])
    assert e.value.reason == "NO_ENGINE"
    assert library.begin(after, []).poll() is ReadState.DONE
    assert not answers, "it asked for no other engine"
    library.close()
