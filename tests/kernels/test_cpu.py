"""The compiled kernels: what the tests of the chosen kernels do not reach. All of it needs a C compiler at install."""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdserve.kernels import reference
from pdserve.kernels.cpu import attention, fused, library
from pdserve.kernels.cpu.linear import PackedLinear
from tests.kernels.naive import Case, Inputs, make_inputs, new_tokens

pytestmark = pytest.mark.usefixtures("compiled_kernels")

SCALE = 0.17


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    yield
    library.set_threads(1)


def stored(case: Case, seed: int = 0) -> Inputs:
    inputs = make_inputs(case, seed)
    attention.store_kv(
        new_tokens(case, inputs.keys),
        new_tokens(case, inputs.values),
        inputs.key_pages,
        inputs.value_pages,
        inputs.slots,
    )
    return inputs


def attend(case: Case, inputs: Inputs) -> Tensor:
    return attention.paged_attention(
        inputs.query, inputs.key_pages, inputs.value_pages, inputs.page_tables, inputs.query_starts, inputs.kv_lens,
        scale=SCALE, window=case.window, softcap=case.softcap, sinks=inputs.sinks,
    )  # fmt: skip


def exact(case: Case, inputs: Inputs) -> Tensor:
    """The naive attention, whole sequences at a time: float64, from the tensors that the pages were filled with."""
    group, rows = case.num_heads // case.num_kv_heads, []
    for i, (num_new, kv_len) in enumerate(zip(case.num_new, case.kv_lens, strict=True)):
        start = int(inputs.query_starts[i])
        query = inputs.query[start : start + num_new].double()
        keys, values = (t[i].double().repeat_interleave(group, dim=1) for t in (inputs.keys, inputs.values))
        scores = torch.einsum("qhd,khd->hqk", query, keys) * SCALE
        if case.softcap is not None:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        ago = torch.arange(kv_len - num_new, kv_len)[:, None] - torch.arange(kv_len)
        scores = scores.masked_fill((ago < 0) | (ago >= (case.window or kv_len)), -math.inf)
        if inputs.sinks is not None:
            column = inputs.sinks.double()[:, None, None].expand(-1, num_new, 1)
            scores = torch.cat((scores, column), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., :kv_len]
        rows.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(rows)


LENGTHS = st.tuples(
    st.sampled_from([0, 1, 1, 1, 2, 5, 17, 70, 130]), st.sampled_from([0, 1, 15, 16, 17, 127, 128, 129, 300])
).filter(any)


@settings(max_examples=40)
@given(
    lens=st.lists(LENGTHS, min_size=1, max_size=4).filter(lambda lens: any(new for new, _ in lens)),
    page_size=st.sampled_from([1, 3, 16, 32, 160]),
    group=st.sampled_from([1, 2, 3, 4, 7, 14]),
    num_kv_heads=st.sampled_from([1, 2, 3]),
    dims=st.sampled_from([(8, 8), (64, 64), (20, 12), (4, 33), (80, 80), (24, 16)]),
    window=st.sampled_from([None, None, 1, 7, 100, 140]),
    softcap=st.sampled_from([None, 1.5, 50.0]),
    sinks=st.booleans(),
    threads=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 1000),
)
def test_attention_of_any_batch_across_parts_and_tiles(
    lens: list[tuple[int, int]],
    page_size: int,
    group: int,
    num_kv_heads: int,
    dims: tuple[int, int],
    window: int | None,
    softcap: float | None,
    sinks: bool,
    threads: int,
    seed: int,
) -> None:
    num_new, old = zip(*lens, strict=True)
    case = Case(
        num_new, tuple(n + o for n, o in zip(num_new, old, strict=True)), group * num_kv_heads, num_kv_heads, *dims,
        page_size, window, softcap, sinks,
    )  # fmt: skip
    library.set_threads(threads)
    inputs = stored(case, seed)
    torch.testing.assert_close(attend(case, inputs).double(), exact(case, inputs), atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("case", [
    Case((1,), (1000,), page_size=16, k_dim=64, v_dim=64),
    Case((1, 1, 90), (700, 3, 400), page_size=16, k_dim=64, v_dim=64, window=500),
])  # fmt: skip
def test_bits_depend_on_nothing_but_the_sequence(case: Case) -> None:
    inputs = stored(case)
    alone = attend(case, inputs)
    for threads in (2, 3, 7):
        library.set_threads(threads)
        assert torch.equal(attend(case, inputs), alone)
    library.set_threads(2)
    for i in range(len(case.kv_lens)):
        start, stop = inputs.query_starts[i : i + 2].tolist()
        one = replace(
            inputs,
            query=inputs.query[start:stop],
            page_tables=inputs.page_tables[i : i + 1],
            query_starts=torch.tensor([0, stop - start]),
            kv_lens=inputs.kv_lens[i : i + 1],
        )
        assert torch.equal(attend(case, one), alone[start:stop])


def test_a_chunk_boundary_changes_no_bits() -> None:
    whole = Case((100,), (230,), page_size=16, k_dim=64, v_dim=64)
    inputs = stored(whole)
    expected = attend(whole, inputs)
    parts = []
    for first, last in ((0, 37), (37, 100)):
        chunk = replace(
            inputs,
            query=inputs.query[first:last],
            query_starts=torch.tensor([0, last - first]),
            kv_lens=torch.tensor([130 + last]),
        )
        parts.append(attend(whole, chunk))
    assert torch.equal(torch.cat(parts), expected)


def test_large_scores_and_a_huge_sink() -> None:
    case = Case((1, 4), (40, 33), k_dim=16, sinks=True)
    inputs = stored(case)
    inputs.query *= 300
    assert inputs.sinks is not None
    inputs.sinks[0] = 1e4
    got = attend(case, inputs)
    torch.testing.assert_close(got.double(), exact(case, inputs), atol=2e-4, rtol=1e-4)
    assert not got[:, 0].any()


def test_a_nan_in_a_key_is_not_hidden() -> None:
    case = Case((1, 5), (20, 20))
    inputs = stored(case)
    for i in range(2):
        inputs.key_pages[inputs.page_tables[i, 0], 0, 1, 3] = math.nan
    got = attend(case, inputs)
    assert got[:, :2].isnan().all()
    assert got[:, 2:].isfinite().all()


def test_no_sequences_and_no_tokens() -> None:
    case = Case((1,), (5,))
    inputs = stored(case)
    nothing = replace(
        inputs,
        query=inputs.query[:0],
        page_tables=inputs.page_tables[:0],
        query_starts=torch.tensor([0]),
        kv_lens=inputs.kv_lens[:0],
    )
    assert attend(case, nothing).shape == (0, 4, 8)
    attention.store_kv(
        inputs.query[:0, :2],
        inputs.query[:0, :2],
        inputs.key_pages,
        inputs.value_pages,
        torch.zeros(0, dtype=torch.int64),
    )


def test_strided_queries_and_tables_and_other_strides_than_the_kernels_read() -> None:
    case = Case((1, 6), (19, 11), window=9)
    inputs = stored(case)
    expected = attend(case, inputs)
    wide = torch.full((7, 6, 8), math.nan)
    wide[:, 1:5] = inputs.query
    tables = torch.full((2, inputs.page_tables.shape[1] + 3), 10**9)
    tables[:, :-3] = inputs.page_tables
    assert torch.equal(attend(case, replace(inputs, query=wide[:, 1:5], page_tables=tables)), expected)
    transposed = inputs.query.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(attend(case, replace(inputs, query=transposed)), expected)


@pytest.mark.parametrize(
    "change",
    [
        {"kv_lens": torch.tensor([9, 12])},  # the first sequence has more pages than its table
        {"kv_lens": torch.tensor([0, 8])},
        {"query_starts": torch.tensor([0, 1, 8])},
        {"query_starts": torch.tensor([-1, 1, 7])},
        {"query_starts": torch.tensor([0, 1, 5])},  # rows that no sequence has would stay unwritten
        {"query_starts": torch.tensor([1, 2, 7])},
        {"query_starts": torch.tensor([0, 2, 1])},
        {"page_tables": torch.full((2, 2), -1)},
        {"page_tables": torch.full((2, 2), 7)},
    ],
)
def test_what_does_not_exist_is_refused(change: dict[str, Tensor]) -> None:
    case = Case((1, 6), (8, 8))
    inputs = stored(case)
    assert inputs.key_pages.shape[0] == 7
    with pytest.raises(IndexError, match="page"):
        attend(case, replace(inputs, **change))


def test_shapes_and_slots_that_do_not_fit_are_refused() -> None:
    case = Case((1,), (8,))
    inputs = stored(case)
    with pytest.raises(ValueError, match="fit together"):
        attend(case, replace(inputs, query=inputs.query[:, :3]))
    with pytest.raises(ValueError, match="fit together"):
        attend(case, replace(inputs, query=inputs.query[..., :4]))
    with pytest.raises(ValueError, match="fit together"):
        attend(case, replace(inputs, query_starts=inputs.query_starts[:1]))
    row = inputs.query[:, :2]
    with pytest.raises(ValueError, match="fit together"):
        attention.store_kv(row, row, inputs.key_pages, inputs.value_pages, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(IndexError, match="slots must be below 20"):
        attention.store_kv(row, row, inputs.key_pages, inputs.value_pages, torch.tensor([20]))
    with pytest.raises(IndexError, match="positions must be below 4"):
        fused.rotate(inputs.query, torch.tensor([4]), torch.zeros(4, 8))


def test_other_types_go_to_the_reference() -> None:
    case = Case((1, 6), (9, 11))
    inputs = stored(case)
    half = replace(
        inputs, query=inputs.query.half(), key_pages=inputs.key_pages.half(), value_pages=inputs.value_pages.half()
    )
    arguments = (half.query, half.key_pages, half.value_pages, half.page_tables, half.query_starts, half.kv_lens)
    assert torch.equal(attend(case, half), reference.paged_attention(*arguments, scale=SCALE))


def test_without_a_library_it_says_what_builds_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    library.load.cache_clear()
    try:
        assert library.why_not() == (
            "they are not built: on Linux and x86-64, put a C compiler on PATH and install pdserve again"
        )
    finally:
        library.load.cache_clear()


def test_a_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    library.load.cache_clear()
    monkeypatch.setattr(library, "_ABI", -1)
    try:
        assert "install pdserve again" in (library.why_not() or "")
    finally:
        monkeypatch.undo()
        library.load.cache_clear()
    assert library.why_not() is None


def test_a_processor_without_avx2_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class OfAnotherProcessor:
        pdserve_abi = staticmethod(lambda: library._ABI)
        pdserve_supported = staticmethod(lambda: 0)

    library.load.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", lambda path: OfAnotherProcessor)
    try:
        assert library.why_not() == "this processor has no AVX2 and FMA"
    finally:
        library.load.cache_clear()


def test_the_structures_have_the_compilers_sizes() -> None:
    assert ctypes.sizeof(attention._Attention) == library.load().pdserve_attention_bytes()
    assert ctypes.sizeof(attention._StoreKV) == library.load().pdserve_store_kv_bytes()


def work() -> Callable[[], list[Tensor]]:
    """Computes, with every kernel that uses threads, what one thread computes here."""
    case = Case((1, 1, 90), (900, 3, 200), page_size=16, k_dim=64, v_dim=64)
    inputs = stored(case)
    torch.manual_seed(0)
    linear, x = PackedLinear.pack(torch.randn(300, 200), torch.randn(300)), torch.randn(40, 600)

    def compute() -> list[Tensor]:
        gated, normed = torch.empty(40, 300), torch.empty_like(x)
        fused.silu_mul(x, gated)
        fused.rms_norm(x, x[0], normed, epsilon=1e-5)
        return [attend(case, inputs), linear(x[:, :200]), gated, normed]

    return compute


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_engines_of_one_process_compute_at_once_while_the_number_of_threads_changes() -> None:
    compute = work()
    expected, done = compute(), threading.Event()

    def repeat() -> bool:
        try:
            return all(equal(compute(), expected) for _ in range(60))
        finally:
            done.set()

    with ThreadPoolExecutor(3) as callers:
        results = [callers.submit(repeat) for _ in range(3)]
        while not done.is_set():
            for threads in (4, 1, 2, 3):
                library.set_threads(threads)
        assert all(result.result(60) for result in results)


def test_a_forked_process_computes_alone_and_with_threads_of_its_own() -> None:
    compute = work()
    expected = compute()
    library.set_threads(3)

    def child() -> None:
        assert equal(compute(), expected)
        library.set_threads(2)
        assert equal(compute(), expected)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    process.kill()
    assert process.exitcode == 0
    assert equal(compute(), expected)


@pytest.mark.parametrize("count", [0, 257])
def test_a_number_of_threads_that_cannot_be_is_refused_and_changes_nothing(count: int) -> None:
    library.set_threads(2)
    with pytest.raises(RuntimeError, match=f"cannot start {count} threads"):
        library.set_threads(count)
    compute = work()
    assert equal(compute(), compute())


def test_heads_that_are_none_are_refused() -> None:
    case = Case((1,), (8,))
    inputs = stored(case)
    with pytest.raises(ValueError, match="fit together"):
        attend(case, replace(inputs, query=inputs.query[:, :0]))
    with pytest.raises(ValueError, match="fit together"):
        attend(case, replace(inputs, key_pages=inputs.key_pages[:, :0], value_pages=inputs.value_pages[:, :0]))
