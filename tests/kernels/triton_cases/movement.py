"""Kernels that move KV: exact."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels import reference
from pdserve.kernels.device_math import E4M3_UNIT, e4m3_bits, load_kv
from pdserve.kernels.page_copy import copy_pages, gather_pages, scatter_pages
from pdserve.kernels.store_kv import store_kv
from tests.kernels.naive import Case
from tests.kernels.triton_cases.device import launch
from tests.kernels.triton_cases.pools import as_fp8, e4m3, layout_of, poisoned_pages
from tests.kernels.triton_cases.report import Outcome, same


@triton.jit
def _encode(source, target, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(target + at, e4m3_bits(tl.load(source + at)))


@triton.jit
def _decode(source, target, N: tl.constexpr):
    at = tl.arange(0, N)
    like = tl.load(target + at)
    tl.store(target + at, load_kv(source + at, at < N, like, True))


def store() -> list[Outcome]:
    """Some rows padded; the rest of the pool, other layers included, stays as it was."""
    outcomes = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for page_size, heads, k_dim, v_dim in ((16, 3, 64, 64), (32, 1, 192, 128), (128, 70, 80, 80)):
            outcomes += _store(dtype, Case((), (), heads, heads, k_dim, v_dim, page_size))
    return outcomes


def store_small() -> list[Outcome]:
    """One shape."""
    return _store(torch.float16, Case((), (), 3, 3, 64, 64, 16))


def _new_tokens(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values as the model gives them (heads outermost), and slots; rows 1 and 5 are padded."""
    rng = torch.Generator().manual_seed(1)
    keys = torch.randn(case.num_kv_heads, 6, case.k_dim, generator=rng).to(dtype).transpose(0, 1)
    values = torch.randn(case.num_kv_heads, 6, case.v_dim, generator=rng).to(dtype).transpose(0, 1)
    size = case.page_size
    return keys, values, torch.tensor([2 * size - 1, -1, 3 * size, 0, 2 * size, -1])


def _store(dtype: torch.dtype, case: Case) -> list[Outcome]:
    layout = layout_of(case, dtype)
    keys, values, slots = _new_tokens(case, dtype)
    memory, views = poisoned_pages(layout, 4)
    launch(store_kv, keys, values, views.keys, views.values, slots)
    expected, expected_views = poisoned_pages(layout, 4)
    is_stored = slots >= 0
    reference.store_kv(keys[is_stored], values[is_stored], expected_views.keys, expected_views.values, slots[is_stored])
    actual, wanted = (torch.frombuffer(m, dtype=torch.uint8) for m in (memory, expected))
    return [same(f"store {str(dtype).removeprefix('torch.')} {case.k_dim}/{case.v_dim}", actual, wanted)]


def store_fp8() -> list[Outcome]:
    """Rounded as torch rounds, after the scale; large numbers become 448, and what is not finite NaN."""
    case = Case((), (), 2, 2, 64, 64, 16)
    layout = layout_of(case, torch.float16)
    keys, values, slots = _new_tokens(case, torch.float16)
    keys = keys * 300
    keys[2, 0, :3] = values[2, 1, -3:] = torch.tensor([math.nan, math.inf, -math.inf])
    _, views = poisoned_pages(layout, 4)
    views, expected = as_fp8(views, layout, 4), as_fp8(views, layout, 4)
    launch(store_kv, keys, values, views.keys, views.values, slots, key_scale=2.0, value_scale=0.25)
    is_stored = slots >= 0
    reference.store_kv(
        *(e4m3(x).view(torch.uint8) for x in (keys[is_stored] / 2.0, values[is_stored] / 0.25)),
        expected.keys.view(torch.uint8), expected.values.view(torch.uint8), slots[is_stored],
    )  # fmt: skip
    pairs = zip(("keys", "values"), views, expected, strict=True)
    return [
        same(f"store fp8 {n}", a.contiguous().view(torch.uint8), e.contiguous().view(torch.uint8)) for n, a, e in pairs
    ]


def fp8_bits() -> list[Outcome]:
    """All codes one way; numbers of every size, ties and the borders between them the other way."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    is_nan = (codes & 0x7F) == 0x7F
    outcomes = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        decoded = torch.zeros(256, dtype=dtype)
        launch(_decode[1,], codes, decoded, 256)
        exact = codes.view(torch.float8_e4m3fn).float() / E4M3_UNIT
        outcomes.append(same(f"decode to {dtype}", decoded[~is_nan].float() + 0.0, exact[~is_nan] + 0.0))
        outcomes.append(Outcome(f"NaN that is none as {dtype}", float((~decoded[is_nan].isnan()).sum()), 0.0))
    finite = codes[~is_nan].view(torch.float8_e4m3fn).float().sort().values
    between = (finite[1:] + finite[:-1]) / 2
    rng = torch.Generator().manual_seed(0)
    sizes = torch.exp2(torch.rand(2048, generator=rng) * 24 - 14) * torch.randn(2048, generator=rng).sign()
    extremes = torch.tensor([0.0, -0.0, 448.0, 464.0, 1e9, -1e30, 1e-30, math.inf, -math.inf, math.nan, -math.nan])
    numbers = torch.cat((finite, between, between.nextafter(torch.tensor(999.0)), sizes, extremes))
    numbers = torch.nn.functional.pad(numbers, (0, 4096 - len(numbers)))
    encoded = torch.zeros(4096, dtype=torch.uint8)
    launch(_encode[1,], numbers, encoded, 4096)
    return [*outcomes, same("encode", encoded, e4m3(numbers).view(torch.uint8))]


def pages() -> list[Outcome]:
    """Gather, scatter and copy, whole pages and a column range, with padding; rows of more than one block."""
    outcomes = []
    for dtype, width in ((torch.uint8, 9000), (torch.float16, 4100), (torch.bfloat16, 64), (torch.float32, 2049)):
        rng = torch.Generator().manual_seed(2)
        pool = torch.randint(0, 256, (7, width * dtype.itemsize), dtype=torch.uint8, generator=rng).view(dtype)
        ids, padded = torch.tensor([5, 0, 3]), torch.tensor([5, -1, 0, 3])
        name = str(dtype).removeprefix("torch.")

        staged = torch.zeros(4, width, dtype=dtype)
        launch(gather_pages, pool, padded, staged)
        outcomes.append(same(f"gather {name}", staged[[0, 2, 3]], pool[ids]))
        outcomes.append(same(f"gather {name}, padding", staged[1], torch.zeros(width, dtype=dtype)))

        part, target, wanted = slice(8, width // 2), pool.clone(), pool.clone()
        launch(scatter_pages, staged[:, part], torch.tensor([1, 2, -1, 6]), target[:, part])
        wanted[[1, 2, 6], part] = staged[[0, 1, 3], part]
        outcomes.append(same(f"scatter {name}", target, wanted))

        copied, wanted = pool.clone(), pool.clone()
        launch(copy_pages, copied, torch.tensor([5, 0, -1]), torch.tensor([1, 4, 2]))
        wanted[[1, 4]] = pool[[5, 0]]
        outcomes.append(same(f"copy {name}", copied, wanted))
    return outcomes
