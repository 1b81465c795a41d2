"""The transport mooncake for real, in a process of its own: it brings C++ libraries that may clash with others."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.errors import ConfigError, TransferError
from pdserve.kvtransfer import mooncake
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.remote_reads import ReadState, RemotePool, Run
from tests.support.own_process import run_cases
from tests.support.tools import missing

from .world import SMALL


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "cases",
    [
        "tests/kvtransfer/onesided_cases.py",
        "tests/services/one_sided_cases.py",
        "tests/services/one_sided_staging_cases.py",
    ],
)
def test_mooncake_moves_pages_and_keeps_what_it_may_still_write(cases: str) -> None:
    if not importlib.util.find_spec("mooncake"):
        missing("mooncake is not installed (pip install 'pdserve[mooncake]')")
    run_cases(cases, "-k", "mooncake", timeout_s=250)


def test_mooncake_that_is_not_installed_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"\.venv/bin/pip install .*'\.\[server,mooncake\]'"):
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


class Engine:
    """Begins runs unless told not to, and ends those that it is told to."""

    def __init__(self, refused: set[int]) -> None:
        self.refused, self.begun = refused, dict[int, int]()
        self.told, self.over = dict[int, int](), set[int]()

    def batch_transfer_async_read(self, peer: str, local: list[int], remote: list[int], num_bytes: list[int]) -> int:
        if local[0] in self.refused:
            return 0
        self.begun[len(self.begun) + 1] = local[0]
        return len(self.begun)

    def transfer_check_status(self, batch: int) -> int:
        assert batch in self.begun and batch not in self.over, "asked for again after it had ended"
        if (code := self.told.get(batch, 0)) != 0:
            self.over.add(batch)
        return code


def until_none_is_being_begun(read: mooncake._MooncakeRead) -> ReadState:
    """Looks until the threads have begun what they were given."""
    state = read.poll()
    while state is ReadState.PENDING and read._submitting:
        state = read.poll()
    return state


@given(st.sets(st.integers(0, 199), max_size=1), st.sets(st.integers(0, 199), max_size=2), st.randoms())
@settings(max_examples=8, deadline=None)
def test_a_read_ends_when_all_that_was_begun_has_ended(refused: set[int], fail: set[int], random: Random) -> None:
    engine, threads = Engine(refused), ThreadPoolExecutor(1)
    read = mooncake._MooncakeRead(engine, "peer", [Run(i, i, 1) for i in range(200)], threads)
    state = until_none_is_being_begun(read)
    while open_ := sorted(set(engine.begun) - set(engine.told)):
        assert state is ReadState.PENDING and len(open_) <= mooncake.MAX_OUTSTANDING
        batch = random.choice(open_[: mooncake.LOOKED_AT])
        engine.told[batch] = -1 if engine.begun[batch] in fail else 1
        state = until_none_is_being_begun(read)
    failed = bool(refused) or any(local in fail for local in engine.begun.values())
    assert state is (ReadState.FAILED if failed else ReadState.DONE)
    assert failed or sorted(engine.begun.values()) == list(range(200))
    threads.shutdown()
