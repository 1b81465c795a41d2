"""Linears over packed weights, against float64."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdserve.kernels.cpu import library, linear
from pdserve.kernels.cpu.linear import PackedLinear

pytestmark = pytest.mark.usefixtures("compiled_kernels")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    yield
    library.set_threads(1)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = x.double() @ weight.double().T
    return product if bias is None else product + bias.double()


def close(got: Tensor, expected: Tensor, atol: float = 1e-6) -> None:
    torch.testing.assert_close(got.double(), expected, atol=atol * (1 + float(expected.abs().max())), rtol=1e-5)


@settings(max_examples=40)
@given(
    num_rows=st.sampled_from([0, 1, 2, 5, 6, 7, 11, 13, 40, 193, 400]),
    num_in=st.integers(1, 40) | st.sampled_from([64, 255, 256, 257, 576, 640]),
    num_out=st.integers(1, 40) | st.sampled_from([96, 200]),
    has_bias=st.booleans(),
    is_int8=st.booleans(),
    threads=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 1000),
)
def test_product(
    num_rows: int, num_in: int, num_out: int, has_bias: bool, is_int8: bool, threads: int, seed: int
) -> None:
    torch.manual_seed(seed)
    library.set_threads(threads)
    weight = torch.randn(num_out, num_in)
    bias = torch.randn(num_out, 2)[:, 1] if has_bias else None
    x = torch.randn(num_rows, num_in + 3)[:, :num_in]
    packed = PackedLinear.pack_int8(weight, bias) if is_int8 else PackedLinear.pack(weight, bias)
    if is_int8:
        weight = packed.rows(torch.arange(num_out))
    if num_rows:
        close(packed(x), exact(x, weight, bias), atol=1e-4 if is_int8 else 1e-6)
    assert packed(x).shape == (num_rows, num_out)


@pytest.mark.parametrize("pack", [PackedLinear.pack, PackedLinear.pack_int8])
def test_a_rows_bits_depend_on_nothing_else(pack: Callable[[Tensor, Tensor], PackedLinear]) -> None:
    torch.manual_seed(0)
    packed, x = pack(torch.randn(300, 700), torch.randn(300)), torch.randn(250, 700)
    whole = packed(x)
    for threads in (1, 2, 5):
        library.set_threads(threads)
        assert torch.equal(packed(x), whole)
        for first, last in ((0, 1), (17, 19), (100, 108), (40, 250)):
            assert torch.equal(packed(x[first:last]), whole[first:last])


@pytest.mark.parametrize("pack", [PackedLinear.pack, PackedLinear.pack_int8])
def test_a_parameter_that_gets_other_data_takes_no_memory_away(pack: Callable[[Tensor, Tensor], PackedLinear]) -> None:
    """As `module.to(dtype)` does to a bias that the module shares."""
    bias = torch.nn.Parameter(torch.randn(50))
    packed, x = pack(torch.randn(50, 20), bias), torch.randn(3, 20)
    before = packed(x)
    bias.data = torch.zeros(50)
    others = [torch.full((50,), torch.nan) for _ in range(100)]  # would lie where the bias was
    assert torch.equal(packed(x), before)
    assert others


def test_what_lies_elsewhere_is_refused() -> None:
    packed, elsewhere = PackedLinear.pack(torch.randn(4, 4)), torch.empty(4, device="meta")
    with pytest.raises(ValueError, match="on the CPU"):
        packed(elsewhere)
    with pytest.raises(ValueError, match="on the CPU"):
        PackedLinear.pack(torch.randn(4, 4), elsewhere)


def test_rows_are_the_weights() -> None:
    weight = torch.randn(37, 20)
    indices = torch.tensor([36, 0, 16, 15, 0])
    assert torch.equal(PackedLinear.pack(weight).rows(indices), weight[indices])


def test_int8_weights_are_within_half_a_step() -> None:
    weight = torch.randn(37, 200)
    weight[3] = 0
    rows = PackedLinear.pack_int8(weight).rows(torch.arange(37))
    step = torch.nn.functional.pad(weight, (0, 56)).unflatten(1, (-1, 64)).abs().amax(dim=2) / 127
    assert bool(((rows - weight).abs() <= 0.501 * step.repeat_interleave(64, dim=1)[:, :200]).all())
    assert not rows[3].any()


@pytest.mark.parametrize("damage", [float("nan"), float("inf"), -float("inf")])
def test_int8_weights_hide_no_damage(damage: float) -> None:
    weight = torch.randn(40, 200)
    weight[17, 150] = damage
    got = PackedLinear.pack_int8(weight)(torch.randn(5, 200))
    assert not got[:, 17].isfinite().any()
    assert got[:, torch.arange(40) != 17].isfinite().all()


@pytest.mark.parametrize("pack", [PackedLinear.pack, PackedLinear.pack_int8])
def test_weights_within_a_larger_matrix(pack: Callable[[Tensor], PackedLinear]) -> None:
    whole, x = torch.randn(90, 330), torch.randn(4, 200)
    for part in (whole[7:77, 11:211], torch.randn(200, 70).T):
        assert torch.equal(pack(part)(x), pack(part.contiguous())(x))


def test_int8_rounds_each_64_activations_by_themselves() -> None:
    weight, x = torch.eye(128), torch.ones(7, 128)
    x[:, 0] = 1e6
    got = PackedLinear.pack_int8(weight)(x)
    assert float((got[:, 64:] - 1).abs().max()) < 1e-4
    assert float((got[:, 1:64] - 1).abs().max()) < 1e6 / 65000


def test_int8_sums_do_not_overflow() -> None:
    weight, x = torch.full((17, 640), -3.0), torch.full((9, 640), 5.0)
    close(PackedLinear.pack_int8(weight)(x), exact(x, weight, None))


@pytest.mark.parametrize("damage", [float("nan"), float("inf"), -float("inf")])
def test_int8_hides_no_damage(damage: float) -> None:
    x = torch.randn(8, 200)
    x[3, 150] = damage
    got = PackedLinear.pack_int8(torch.randn(20, 200))(x)
    assert not got[3].isfinite().any()
    assert got[torch.arange(8) != 3].isfinite().all()


@pytest.mark.parametrize("pack", [PackedLinear.pack, PackedLinear.pack_int8])
def test_calls_from_several_threads_at_once(pack: Callable[[Tensor], PackedLinear]) -> None:
    library.set_threads(2)
    packed = pack(torch.randn(400, 300))
    inputs = [torch.randn(rows, 300) for rows in (1, 2, 9, 30) * 4]
    expected = [packed(x) for x in inputs]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(5):
            assert all(map(torch.equal, threads.map(packed, inputs), expected))


def test_shapes_of_more_and_of_one_dimension() -> None:
    weight, x = torch.randn(10, 6), torch.randn(2, 3, 6)
    packed = PackedLinear.pack(weight)
    close(packed(x), exact(x, weight, None))
    close(packed(x[0, 0]), exact(x[0, 0], weight, None))
    close(packed(x.transpose(0, 1)), exact(x.transpose(0, 1), weight, None))


def test_what_does_not_fit_is_refused() -> None:
    packed = PackedLinear.pack(torch.randn(10, 6))
    with pytest.raises(ValueError, match="over 6 float32 got 7"):
        packed(torch.randn(2, 7))
    with pytest.raises(ValueError, match="float64"):
        packed(torch.randn(2, 6, dtype=torch.float64))
    with pytest.raises(ValueError, match="float16"):
        PackedLinear.pack(torch.randn(10, 6).half())
    with pytest.raises(ValueError, match="bias"):
        PackedLinear.pack(torch.randn(10, 6), torch.randn(6))
    with pytest.raises(ValueError, match=r"float32 \(0, 6\)"):
        PackedLinear.pack(torch.randn(0, 6))
    with pytest.raises(ValueError, match=r"float32 \(10, 0\)"):
        PackedLinear.pack_int8(torch.randn(10, 0))
    for row in (-1, 10, 16):
        with pytest.raises(IndexError, match="rows must be below 10"):
            packed.rows(torch.tensor([0, row]))
    assert packed.rows(torch.tensor([], dtype=torch.int64)).shape == (0, 6)


def test_the_structure_has_the_compilers_size() -> None:
    assert ctypes.sizeof(linear._Linear) == library.load().pdserve_linear_bytes()
