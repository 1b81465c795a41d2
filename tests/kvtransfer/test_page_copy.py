"""Pages are copied where they belong and nothing else is written, by the compiled code and without it."""

from __future__ import annotations

import ctypes
import platform
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.kvtransfer import page_copy
from pdserve.kvtransfer.page_copy import PageCopy
from tests.support.tools import missing

NUM_PAGES = 6
EDGE = 128


@pytest.fixture(scope="module", params=["compiled", "not compiled"])
def way(request: pytest.FixtureRequest) -> str:
    if request.param == "compiled" and page_copy._COMPILED is None:
        if platform.machine() != "x86_64" or sys.platform != "linux":
            pytest.skip("the compiled code is for Linux on x86-64")
        missing("the copying of KV pages is not compiled: install pdserve again")
    return str(request.param)


@given(
    st.lists(st.integers(0, NUM_PAGES - 1), min_size=1, max_size=NUM_PAGES, unique=True),
    st.permutations(range(NUM_PAGES)),
    st.sampled_from([1, 16, 63, 64, 200, 1024, 4097]),
    st.tuples(st.integers(0, 70), st.integers(0, 70)),
    st.booleans(),
    st.booleans(),
)
def test_pages_arrive_where_they_belong(
    way: str,
    into_ids: list[int],
    out_of_ids: list[int],
    page_bytes: int,
    offsets: tuple[int, int],
    past_caches: bool,
    briefly: bool,
) -> None:
    size = EDGE + NUM_PAGES * page_bytes + EDGE
    there = bytearray(i * 7 % 251 for i in range(size))
    here = bytearray(size)
    bases = [ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in (here, there)]
    to, of = (offset + EDGE - 71 for offset in offsets)
    expected = bytearray(size)
    first = len(into_ids) // 3
    for i in range(first, len(into_ids)):
        read, write = of + out_of_ids[i] * page_bytes, to + into_ids[i] * page_bytes
        expected[write : write + page_bytes] = there[read : read + page_bytes]
    pages = PageCopy(bases[0] + to, into_ids, bases[1] + of, out_of_ids[: len(into_ids)], page_bytes)
    with pytest.MonkeyPatch.context() as patch:
        if way == "not compiled":
            patch.setattr(page_copy, "_COMPILED", None)
            patch.setattr(page_copy, "_COMPILED_BRIEFLY", None)
        pages.copy(first, len(into_ids) - first, past_caches=past_caches, briefly=briefly)
    assert here == expected


def test_where_nothing_can_be_loaded_it_is_done_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(page_copy, "__file__", str(tmp_path / "page_copy.py"))
    assert page_copy._load(ctypes.CDLL) is None
    for suffix in page_copy.EXTENSION_SUFFIXES:
        (tmp_path / f"_copy{suffix}").write_bytes(b"not a library")
    assert page_copy._load(ctypes.CDLL) is None
