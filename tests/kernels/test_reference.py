from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.kernels.dispatch import Kernels, kernels_for
from pdserve.kernels.reference import paged_attention, store_kv
from tests.kernels.naive import Case, Inputs, make_inputs, naive_attention, new_tokens

REFERENCE = Kernels(store_kv, paged_attention)
CHOSEN = kernels_for(torch.device("cpu"))
EACH = pytest.mark.parametrize("kernels", [REFERENCE, CHOSEN], ids=["reference", "chosen"])
SCALE = 0.31

CASES = {
    "one decode": Case((1,), (9,)),
    "one token in all": Case((1,), (1,)),
    "whole prompt": Case((7,), (7,)),
    "exact page": Case((4,), (8,)),
    "chunk with context": Case((5,), (14,)),
    "mixed batch": Case((1, 6, 1, 3), (5, 6, 13, 11)),
    "one KV head": Case((1, 5), (6, 9), num_kv_heads=1),
    "no grouping": Case((1, 5), (6, 9), num_kv_heads=4),
    "values narrower": Case((1, 5), (6, 9), k_dim=12, v_dim=6),
    "window": Case((1, 6, 1), (15, 13, 3), window=5),
    "window of one": Case((1, 3), (6, 7), window=1),
    "softcap": Case((1, 6), (9, 11), softcap=1.5),
    "sinks": Case((1, 6), (9, 11), sinks=True),
    "window, softcap and sinks": Case((1, 6, 2), (17, 13, 2), window=6, softcap=2.0, sinks=True),
    "page of one token": Case((1, 3), (4, 5), page_size=1),
}


def run(kernels: Kernels, case: Case, inputs: Inputs) -> torch.Tensor:
    kernels.store_kv(
        new_tokens(case, inputs.keys),
        new_tokens(case, inputs.values),
        inputs.key_pages,
        inputs.value_pages,
        inputs.slots,
    )
    return kernels.paged_attention(
        inputs.query,
        inputs.key_pages,
        inputs.value_pages,
        inputs.page_tables,
        inputs.query_starts,
        inputs.kv_lens,
        scale=SCALE,
        window=case.window,
        softcap=case.softcap,
        sinks=inputs.sinks,
    )


@EACH
@pytest.mark.parametrize("name", CASES)
def test_attention_equals_the_naive_one(kernels: Kernels, name: str) -> None:
    case = CASES[name]
    inputs = make_inputs(case)
    expected = naive_attention(case, inputs, SCALE)
    torch.testing.assert_close(run(kernels, case, inputs).double(), expected, atol=2e-6, rtol=1e-5)


@EACH
@settings(max_examples=40)
@given(
    lens=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=4),
    page_size=st.integers(1, 6),
    group=st.sampled_from([1, 3]),
    window=st.none() | st.integers(1, 12),
    softcap=st.none() | st.just(2.0),
    sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_attention_of_any_batch(
    kernels: Kernels,
    lens: list[tuple[int, int]],
    page_size: int,
    group: int,
    window: int | None,
    softcap: float | None,
    sinks: bool,
    seed: int,
) -> None:
    case = Case(
        tuple(new for new, _ in lens),
        tuple(new + old for new, old in lens),
        num_heads=2 * group,
        num_kv_heads=2,
        k_dim=4,
        v_dim=4,
        page_size=page_size,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
    inputs = make_inputs(case, seed)
    expected = naive_attention(case, inputs, SCALE)
    torch.testing.assert_close(run(kernels, case, inputs).double(), expected, atol=2e-6, rtol=1e-5)


@EACH
def test_store_writes_its_slots_and_nothing_else(kernels: Kernels) -> None:
    case = Case((2, 3), (6, 3))
    inputs = make_inputs(case)
    before = inputs.key_pages.clone()
    keys = new_tokens(case, inputs.keys)
    kernels.store_kv(keys, new_tokens(case, inputs.values), inputs.key_pages, inputs.value_pages, inputs.slots)
    for row, slot in enumerate(inputs.slots.tolist()):
        page, offset = divmod(slot, case.page_size)
        assert torch.equal(inputs.key_pages[page, :, offset], keys[row])
        inputs.key_pages[page, :, offset] = before[page, :, offset]
    assert torch.equal(inputs.key_pages.nan_to_num(-1.0), before.nan_to_num(-1.0))


@EACH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near(kernels: Kernels, dtype: torch.dtype) -> None:
    case = Case((1, 6), (9, 11), window=6, softcap=2.0, sinks=True)
    inputs = make_inputs(case)
    expected = naive_attention(case, inputs, SCALE)
    for name in ("query", "key_pages", "value_pages"):
        setattr(inputs, name, getattr(inputs, name).to(dtype))
    inputs.keys = [k.to(dtype) for k in inputs.keys]
    inputs.values = [v.to(dtype) for v in inputs.values]
    torch.testing.assert_close(run(kernels, case, inputs).double(), expected, atol=3e-2, rtol=3e-2)


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_padded_row_is_not_stored_and_a_slot_that_does_not_exist_is_refused(
    kernels: Kernels, dtype: torch.dtype
) -> None:
    keys, values = (torch.zeros(3, 2, 4, 8, dtype=dtype) for _ in range(2))
    rows = torch.ones(2, 2, 8, dtype=dtype)
    kernels.store_kv(rows, rows, keys, values, torch.tensor([-1, 5]))
    assert keys[1, :, 1].all() and keys.sum() == values.sum() == 16
    for slot in (-2, 12):
        with pytest.raises(IndexError, match="slots must be below 12"):
            kernels.store_kv(rows, rows, keys, values, torch.tensor([0, slot]))
    assert keys.sum() == values.sum() == 16


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "change",
    [
        {"page_tables": torch.full((2, 3), -1)},  # counted from the end it would be somebody's page
        {"page_tables": torch.full((2, 3), 99)},
        {"query_starts": torch.tensor([0, 1, 6])},  # the last row has no sequence
        {"query_starts": torch.tensor([1, 2, 7])},
        {"query_starts": torch.tensor([0, 8, 7])},
        {"kv_lens": torch.tensor([9, 5])},
        {"kv_lens": torch.tensor([13, 11])},
    ],
)
def test_pages_and_lengths_that_cannot_be_are_refused(
    kernels: Kernels, dtype: torch.dtype, change: dict[str, torch.Tensor]
) -> None:
    case = Case((1, 6), (9, 11))
    inputs = make_inputs(case)
    for name in ("query", "key_pages", "value_pages"):
        setattr(inputs, name, getattr(inputs, name).to(dtype))
    inputs.keys, inputs.values = ([t.to(dtype) for t in ts] for ts in (inputs.keys, inputs.values))
    for name, value in change.items():
        setattr(inputs, name, value)
    with pytest.raises(IndexError, match=r"page|lengths"):
        run(kernels, case, inputs)
