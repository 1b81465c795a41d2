"""Both attention kernels against the float64 reference."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import torch
from torch import Tensor

from pdserve.core.layout import FP8
from pdserve.engine.device import DevicePool
from pdserve.kernels.configs import AttentionConfig
from pdserve.kernels.gpu import attend
from pdserve.kernels.paged_attention import decode_attention
from pdserve.kernels.prefill_attention import prefill_attention
from pdserve.kernels.store_kv import store_kv
from tests.kernels.naive import Case, Inputs, naive_attention
from tests.kernels.triton_cases.device import is_gpu, launch, profile
from tests.kernels.triton_cases.pools import LAYER, e4m3, layout_of, make_inputs, tensors_of
from tests.kernels.triton_cases.report import Outcome, compare

LIMITS = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 3e-2}
GPU_FLOAT32_LIMIT = 4e-5  # a product of three TF32 ones there
DTYPES = (torch.float32, torch.float16)


def limit_of(dtype: torch.dtype) -> float:
    """Largest error that is accepted."""
    return GPU_FLOAT32_LIMIT if is_gpu() and dtype is torch.float32 else LIMITS[dtype]


def run(label: str, case: Case, dtype: torch.dtype, seed: int = 0, *, fp8: bool = False) -> Outcome:
    """The kernels that a batch would launch on a GPU."""
    inputs = make_inputs(case, dtype, seed, fp8=fp8)
    scale = case.k_dim**-0.5
    actual = launch(
        attend, *tensors_of(inputs), profile(),
        scale=scale, window=case.window, softcap=case.softcap, sinks=inputs.sinks,
    )  # fmt: skip
    expected = naive_attention(case, inputs, scale)
    for i, n in enumerate(case.kv_lens):
        if n == 0:
            expected[int(inputs.query_starts[i])] = 0.0
    name = str(dtype).removeprefix("torch.") + ("+fp8" if fp8 else "")
    return compare(f"{label} {name}", actual, expected, limit_of(dtype))


def decode_small() -> list[Outcome]:
    """Splits with parts of 256 tokens, a padded row, lengths at page borders, GQA of 3."""
    case = Case((1, 1, 1, 1), (300, 0, 16, 17), num_heads=6, num_kv_heads=2, k_dim=64, v_dim=64, page_size=16)
    return [run("decode", case, dtype) for dtype in DTYPES]


def decode_variants() -> list[Outcome]:
    """Window, softcap, sinks, and all of them; with and without splits."""
    wide = {"num_heads": 4, "num_kv_heads": 1, "k_dim": 64, "v_dim": 64, "page_size": 32}
    cases = {
        "window": Case((1, 1), (290, 33), window=40, **wide),
        "window over splits": Case((1, 1), (700, 40), window=600, **wide),
        "softcap": Case((1, 1), (290, 33), softcap=1.5, **wide),
        "sinks": Case((1, 1), (290, 33), sinks=True, **wide),
        "sinks, one split": Case((1, 1, 1), (64, 1, 0), sinks=True, **wide),
        "all": Case((1, 1), (300, 31), window=270, softcap=2.0, sinks=True, **wide),
    }
    return [run(f"decode {name}", case, dtype) for name, case in cases.items() for dtype in DTYPES]


def decode_shapes() -> list[Outcome]:
    """Head dims, groups and page sizes, among them pages smaller and larger than what a program reads at a time."""
    outcomes = []
    for k_dim, v_dim in ((80, 80), (128, 128), (192, 128), (256, 256), (24, 16)):
        for page_size, heads, kv_heads in ((16, 2, 2), (128, 8, 1)):
            case = Case((1, 1), (129, 128), heads, kv_heads, k_dim, v_dim, page_size)
            outcomes += [run(f"decode {k_dim}/{v_dim} page {page_size}", case, dtype) for dtype in DTYPES]
    many = Case((1,), (70,), 71, 1, 64, 64, 64)
    return [*outcomes, run("decode 71 heads on one", many, torch.float32)]


def decode_many_splits() -> list[Outcome]:
    """More parts than stage 2 reads at a time, most of them empty for the short sequence."""
    case = Case((1, 1), (640, 17), 2, 1, 64, 64, 32)
    inputs = make_inputs(case, torch.float32, 5)
    output = torch.full((2, 2, 64), float("nan"))
    config = AttentionConfig(32, 4, 2, min_split_tokens=32)
    launch(
        decode_attention, *tensors_of(inputs), output, scale=0.125, config=config, num_splits=32,
    )  # fmt: skip
    return [compare("decode 32 splits", output, naive_attention(case, inputs, 0.125), limit_of(torch.float32))]


def prefill_small() -> list[Outcome]:
    """A chunk with context, one that ends at a page border, and a decode in the same batch, GQA of 3."""
    case = Case((20, 1, 3), (53, 40, 16), num_heads=3, num_kv_heads=1, k_dim=64, v_dim=64, page_size=16)
    return [run("mixed", case, dtype) for dtype in DTYPES]


def prefill_variants() -> list[Outcome]:
    """Window, softcap, sinks, in mixed batches."""
    wide = {"num_heads": 2, "num_kv_heads": 1, "k_dim": 64, "v_dim": 64, "page_size": 32}
    cases = {
        "causal": Case((150,), (150,), **wide),
        "window": Case((90, 1), (200, 70), window=40, **wide),
        "window of one": Case((5, 3), (9, 3), window=1, **wide),
        "softcap": Case((40, 7), (64, 33), softcap=1.5, **wide),
        "sinks": Case((40, 7), (65, 7), sinks=True, **wide),
        "all": Case((40, 1, 7), (140, 90, 33), window=50, softcap=2.0, sinks=True, **wide),
    }
    return [run(f"prefill {name}", case, dtype) for name, case in cases.items() for dtype in DTYPES]


def prefill_shapes() -> list[Outcome]:
    """Head dims, groups and page sizes."""
    outcomes = []
    for k_dim, v_dim in ((80, 80), (128, 128), (192, 128), (256, 256), (24, 16)):
        for page_size, heads, kv_heads in ((16, 2, 2), (128, 7, 1)):
            case = Case((9, 2), (129, 34), heads, kv_heads, k_dim, v_dim, page_size)
            outcomes += [run(f"prefill {k_dim}/{v_dim} page {page_size}", case, dtype) for dtype in DTYPES]
    return outcomes


def prefill_many_sequences() -> list[Outcome]:
    """More sequences than a block compares at a time, and padded ones, without tokens, at the end."""
    num_new = (*([2] * 130), 0, 0)
    case = Case(num_new, tuple(2 * n for n in num_new), 2, 1, 16, 16, 16)
    inputs = make_inputs(case, torch.float32, 3)
    output = torch.full((260, 2, 16), float("nan"))
    launch(
        prefill_attention, *tensors_of(inputs), output, scale=0.25, config=AttentionConfig(16, 4, 2, block_m=64),
    )  # fmt: skip
    return [compare("prefill 132 sequences", output, naive_attention(case, inputs, 0.25), limit_of(torch.float32))]


def divided_work() -> list[Outcome]:
    """In a mixed batch each kernel writes the rows of its own sequences and no other."""
    case = Case((3, 1, 2), (20, 33, 2), 2, 1, 64, 64, 16)
    inputs = make_inputs(case, torch.float32, 7)
    expected = naive_attention(case, inputs, 0.125)
    config = AttentionConfig(32, 4, 2, min_split_tokens=32)
    outcomes = []
    for name, kernel, rows, options in (
        ("decode", decode_attention, [3], {"num_splits": 2}),
        ("decode, one split", decode_attention, [3], {"num_splits": 1}),
        ("prefill", prefill_attention, [0, 1, 2, 4, 5], {"skips_single": True}),
    ):
        output = torch.full((6, 2, 64), float("nan"))
        launch(kernel, *tensors_of(inputs), output, scale=0.125, config=config, **options)
        others = [row for row in range(6) if row not in rows]
        outcomes.append(compare(f"{name}, own rows", output[rows], expected[rows], limit_of(torch.float32)))
        outcomes.append(Outcome(f"{name}, other rows written", float((~output[others].isnan()).sum()), 0.0))
    return outcomes


def fp8() -> list[Outcome]:
    """KV of e4m3 numbers, float16 queries; scales are those of `store_kv`'s caller."""
    plain = Case((1, 1), (290, 33), 4, 2, 64, 64, 16)
    mixed = Case((11, 1), (40, 33), 4, 2, 128, 128, 32, window=30, sinks=True)
    wide = Case((9, 1), (40, 33), 2, 1, 256, 256, 16)
    cases = {"decode": plain, "mixed": mixed, "mixed, wide": wide}
    outcomes = [run(name, case, dtype, fp8=True) for name, case in cases.items() for dtype in DTYPES]
    inputs = make_inputs(plain, torch.float32, 1, fp8=True)
    output = torch.full((2, 4, 64), float("nan"))
    launch(
        decode_attention, *tensors_of(inputs), output,
        scale=0.125, config=AttentionConfig(32, 4, 2, min_split_tokens=64), num_splits=4,
        key_scale=0.5, value_scale=3.0,
    )  # fmt: skip
    expected = 3.0 * naive_attention(plain, inputs, 0.125 * 0.5)
    return [*outcomes, compare("decode scaled fp8", output, expected, 3 * limit_of(torch.float32))]


def fp8_pool() -> list[Outcome]:
    """As with --kv-cache-dtype fp8_e4m3: all tokens are stored in a pool of that type, and attended over there."""
    case = Case((21, 1, 16), (21, 1, 16), 4, 2, 128, 128, 16)
    outcomes = []
    for dtype in DTYPES:
        actual, expected = _over_fp8_pool(case, make_inputs(case, dtype, 2), dtype)
        outcomes.append(compare(f"fp8 pool {str(dtype).removeprefix('torch.')}", actual, expected, limit_of(dtype)))
    return outcomes


def fp8_damage() -> list[Outcome]:
    """A number that is not finite in the KV of a token makes NaN of each answer that depends on it, and of no other.

    Without that, a damaged activation would end as a token that looks right.
    """
    outcomes = []
    for name, case in {
        "decode": Case((1, 1, 1), (290, 33, 20), 4, 2, 64, 64, 16),
        "mixed": Case((5, 1, 3), (40, 33, 20), 4, 2, 64, 64, 16),
    }.items():
        inputs = make_inputs(case, torch.float16, 3)
        inputs.keys[0][2, 0, 5] = math.nan
        inputs.values[1][7, 1, 9] = math.inf
        actual, expected = _over_fp8_pool(case, inputs, torch.float16)
        assert 0 < int(expected.isnan().sum()) < expected.numel(), name
        differing = float((actual.isnan() != expected.isnan()).sum())
        outcomes.append(Outcome(f"fp8 damage {name}, NaN in the wrong places", differing, 0.0))
        sound = ~expected.isnan()
        outcomes.append(compare(f"fp8 damage {name}", actual[sound], expected[sound], limit_of(torch.float16)))
    return outcomes


def _over_fp8_pool(case: Case, inputs: Inputs, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Stores all tokens in a pool of e4m3 numbers and attends over it; the answers, and what they should be."""
    layout = replace(layout_of(case, dtype), dtype=FP8)
    pages = DevicePool(layout, inputs.key_pages.shape[0], torch.device("cpu")).views()[LAYER]
    at = [(table, torch.arange(n)) for table, n in zip(inputs.page_tables, case.kv_lens, strict=True)]
    slots = torch.cat([table[t // case.page_size] * case.page_size + t % case.page_size for table, t in at])
    launch(store_kv, *(torch.cat(x).to(dtype) for x in (inputs.keys, inputs.values)), *pages, slots)
    launched = (inputs.query, *pages, inputs.page_tables, inputs.query_starts, inputs.kv_lens, profile())
    keys, values = ([e4m3(x).float() for x in xs] for xs in (inputs.keys, inputs.values))
    expected = naive_attention(case, replace(inputs, keys=keys, values=values), 0.125)
    return launch(attend, *launched, scale=0.125), expected


def bfloat16() -> list[Outcome]:
    """One shape, with `tl.dot` patched, see `__main__`; on a GPU one of each configuration."""
    outcomes = []
    for dim in (64, 128, 256) if is_gpu() else (64,):
        case = Case((20, 1), (53, 40), num_heads=4, num_kv_heads=2, k_dim=dim, v_dim=dim, page_size=16)
        outcomes.append(run(f"mixed {dim}", case, torch.bfloat16))
    return outcomes


def random_batches() -> list[Outcome]:
    """Batches of any kind, lengths mostly within one token of a page border."""
    rng = random.Random(20)
    return [run(f"random {i}", _random_case(rng), DTYPES[i % 2], seed=i) for i in range(24)]


def _random_case(rng: random.Random) -> Case:
    page_size = rng.choice((16, 32, 64, 128))
    kv_heads, group = rng.choice(((1, 1), (1, 5), (2, 1), (2, 4), (1, 8), (3, 2)))
    num_new, kv_lens = [], []
    for _ in range(rng.randint(1, 3)):
        border = page_size * rng.randint(0, max(1, 160 // page_size)) + rng.randint(-1, 1)
        n = max(1, rng.choice((border, rng.randint(1, 180))))
        num_new.append(rng.choice((1, min(n, rng.randint(1, 30)))))
        kv_lens.append(n)
    dim = rng.choice((64, 96, 128))
    return Case(
        tuple(num_new), tuple(kv_lens), kv_heads * group, kv_heads, dim, dim, page_size,
        window=rng.choice((None, None, 1, 17, 64)), softcap=rng.choice((None, 3.0)), sinks=rng.random() < 0.3,
    )  # fmt: skip
