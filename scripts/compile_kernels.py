"""Compiles every Triton kernel for GPUs that need not be there and prints what each one takes.

    python scripts/compile_kernels.py [--arch sm_90 ...] [--kernel decode ...]

The production launch code runs, over meta tensors of real layouts, with a driver that only names an architecture: what
is compiled is what a GPU would compile, argument specialisation included, and launch code that reads a tensor's
contents on the host, which a CUDA graph would freeze, fails. Exit status 1 when a kernel spills on
sm_90, takes more shared memory than its architecture has, or does not compile.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from pdserve.core.layout import KVLayout
from pdserve.engine.kv_cache import LayerPages, layer_views
from pdserve.kernels.configs import Arch, Profile, decode_config
from pdserve.kernels.fused import rms_norm, rotate, silu_mul
from pdserve.kernels.gpu import attend
from pdserve.kernels.page_copy import copy_pages, gather_pages, scatter_pages
from pdserve.kernels.paged_attention import decode_attention
from pdserve.kernels.store_kv import store_kv

# Shared memory of the smallest device that uses the table: sm_80's also serves 8.6, 8.9 and 12.x.
TARGETS: dict[Arch, tuple[GPUTarget, int]] = {
    "sm_80": (GPUTarget("cuda", 80, 32), 99 * 1024),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 * 1024),
    "sm_100": (GPUTarget("cuda", 100, 32), 227 * 1024),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 * 1024),
}


class Driver:
    """What Triton asks a driver while it compiles, for a device that is not there."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        return str(self._target)  # Triton keeps compiled kernels by device

    def get_current_stream(self, device: object) -> int:
        del device
        return 0


@dataclass(frozen=True)
class Row:
    """What one compiled kernel takes."""

    label: str
    kernel: str
    registers: int
    spills: int
    shared_bytes: int
    warps: int
    instructions: str


def cases(arch: Arch) -> Iterator[tuple[str, Callable[[], object]]]:
    """Labelled calls of the launch code."""
    profile = Profile(arch, 100)
    for dtype in (torch.bfloat16, torch.float32):  # float16 has bfloat16's configurations
        for dim, group in ((64, 3), (128, 4), (256, 2)):
            yield f"attention {_short(dtype)} d{dim} gqa{group}", lambda a=(dtype, dim, group): _attend(profile, *a)
    bf16 = torch.bfloat16
    yield (
        "attention bf16 d128 gqa4 window softcap sinks",
        lambda: _attend(profile, bf16, 128, 4, window=4096, softcap=30.0, sinks=torch.zeros(8, dtype=bf16)),
    )
    for dim in (64, 128, 256):
        yield f"attention bf16 d{dim} gqa8 fp8 KV", lambda a=dim: _attend(profile, bf16, a, 8, fp8=True)
    if arch == "sm_90":  # no other configurations: once is enough
        yield "attention bf16 d80 mha page 128", lambda: _attend(profile, bf16, 80, 1, page_size=128)
        yield "decode bf16 d128 gqa4, one split", lambda: _decode_direct(arch)
        for fp8 in (False, True):  # pages smaller than a block, and what Gemma's layers ask for
            yield (
                f"attention bf16 d256 gqa2 page 16 window softcap{' fp8 KV' if fp8 else ''}",
                lambda a=fp8: _attend(profile, bf16, 256, 2, page_size=16, fp8=a, window=4096, softcap=50.0),
            )
    for dtype, fp8 in ((bf16, False), (torch.float32, False), (bf16, True)):
        yield f"store {_short(dtype)}{' fp8 KV' if fp8 else ''}", lambda a=(dtype, fp8): _store(*a)
    yield "pages u8", _pages
    for dtype in (bf16, torch.float32):
        yield f"fused {_short(dtype)}", lambda a=dtype: _fused(a)


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]


def _views(dtype: torch.dtype, dim: int, page_size: int, fp8: bool) -> LayerPages:
    layout = KVLayout.uniform(
        num_layers=2, num_kv_heads=2, head_dim=dim, page_size=page_size, dtype=str(dtype).removeprefix("torch.")
    )
    views = layer_views(layout, 2, memoryview(bytearray(2 * layout.page_bytes)))[1]
    stored = torch.float8_e4m3fn if fp8 else dtype
    return LayerPages(*(torch.empty_strided(v.shape, v.stride(), dtype=stored) for v in views))


def _attend(
    profile: Profile,
    dtype: torch.dtype,
    dim: int,
    group: int,
    *,
    page_size: int = 32,
    fp8: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    """A mixed batch: decode stage 1, stage 2 and prefill."""
    keys, values = _views(dtype, dim, page_size, fp8)
    query = torch.zeros(2 * group, 18, dim, dtype=dtype).transpose(0, 1)  # as transformers gives it
    tables, starts, lens = torch.zeros(2, 64, dtype=torch.int64), torch.tensor([0, 1, 18]), torch.tensor([2048, 2048])
    attend(query, keys, values, tables, starts, lens, profile, scale=0.1, window=window, softcap=softcap, sinks=sinks)


def _decode_direct(arch: Arch) -> None:
    keys, values = _views(torch.bfloat16, 128, 32, False)
    query = torch.zeros(16, 8, 128, dtype=torch.bfloat16)
    tables, starts = torch.zeros(16, 64, dtype=torch.int64), torch.arange(17)
    decode_attention(
        query, keys, values, tables, starts, torch.ones(16, dtype=torch.int64), torch.empty_like(query),
        scale=0.1, config=decode_config(arch, 128, 2), num_splits=1,
    )  # fmt: skip


def _store(dtype: torch.dtype, fp8: bool) -> None:
    new = torch.zeros(2, 16, 128, dtype=dtype).transpose(0, 1)
    store_kv(new, new, *_views(dtype, 128, 32, fp8), torch.zeros(16, dtype=torch.int64))


def _pages() -> None:
    pool, ids = torch.zeros(4, 65536, dtype=torch.uint8), torch.tensor([1, 0])
    gather_pages(pool, ids, pool[2:])
    scatter_pages(pool[2:], ids, pool)
    copy_pages(pool, ids, ids)


def _fused(dtype: torch.dtype) -> None:
    x, weight = torch.zeros(16, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype)
    rms_norm(x, weight, x, epsilon=1e-5)
    rms_norm(x, weight, x, epsilon=1e-5, residual=torch.zeros_like(x))
    rotate(x.view(16, 32, 128), torch.zeros(16, dtype=torch.int64), torch.zeros(64, 128))
    silu_mul(torch.zeros(16, 8192, dtype=dtype), x)


def _inspect(label: str, name: str, compiled: object) -> Row:
    asm, metadata = compiled.asm, compiled.metadata  # type: ignore[attr-defined]
    if "cubin" in asm:
        registers, spills = _cuda_resources(asm["cubin"])
        text = asm["ptx"]
        found = [n for n in ("wgmma", "tcgen05.mma", "mma.sync", "cp.async.bulk", "cp.async") if n in text]
    else:
        text = asm["amdgcn"]
        registers, spills = (
            max(map(int, re.findall(rf"\.{name}:\s+(\d+)", text))) for name in ("vgpr_count", "vgpr_spill_count")
        )
        found = ["mfma"] if "v_mfma" in text else []
    return Row(label, name, registers, spills, metadata.shared, metadata.num_warps, " ".join(found))


def _cuda_resources(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of stack and local memory (spills), per thread."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    registers, stack, local = (max(map(int, re.findall(rf"{key}:(\d+)", text))) for key in ("REG", "STACK", "LOCAL"))
    return registers, stack + local


def compile_all(arch: Arch, wanted: list[str]) -> list[Row]:
    """Compiles the cases of one architecture whose label contains a wanted word."""
    rows: list[Row] = []
    label = ""

    def launcher(kernel: JITFunction, grid: object) -> Callable[..., None]:
        def compile_only(*args: object, **options: object) -> None:
            compiled = kernel.warmup(*args, grid=grid, **options)
            rows.append(_inspect(label, kernel.fn.__name__.strip("_"), compiled))

        return compile_only

    torch.set_default_device("meta")
    triton.runtime.driver.set_active(Driver(TARGETS[arch][0]))
    JITFunction.__getitem__ = launcher
    for label, call in cases(arch):
        if not wanted or any(word in label for word in wanted):
            call()
    return rows


def faults(arch: Arch, row: Row) -> list[str]:
    """What is wrong with a kernel."""
    found = []
    if arch == "sm_90" and row.spills:
        found.append(f"spills {row.spills} bytes")
    if row.shared_bytes > TARGETS[arch][1]:
        found.append(f"needs {row.shared_bytes} of {TARGETS[arch][1]} bytes of shared memory")
    return found


def table(arch: Arch, wanted: list[str]) -> tuple[str, int]:
    """What to print for one architecture, and the number of faulty kernels."""
    began, bad = time.monotonic(), 0
    lines = [f"{arch}\n{'case':56}{'kernel':12}{'regs':>5}{'spill':>7}{'shared':>8}{'warps':>6}  instructions"]
    for row in compile_all(arch, wanted):
        wrong = faults(arch, row)
        bad += bool(wrong)
        lines.append(
            f"{row.label:56}{row.kernel:12}{row.registers:5}{row.spills:7}{row.shared_bytes:8}{row.warps:6}"
            f"  {row.instructions}{'  FAULT: ' + '; '.join(wrong) if wrong else ''}"
        )
    lines.append(f"{arch}: {time.monotonic() - began:.0f} s\n")
    return "\n".join(lines), bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", choices=list(TARGETS), default=list(TARGETS), help="default: all")
    parser.add_argument("--kernel", nargs="+", default=[], help="words of the cases' labels; default: all")
    options = parser.parse_args()
    bad = 0
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(len(options.arch), os.cpu_count() or 1), mp_context=spawn) as pool:
        for text, count in pool.map(table, options.arch, itertools.repeat(options.kernel)):
            print(text, flush=True)
            bad += count
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
