"""Chooses the implementation of each kernel by device: Triton for GPUs, C for CPUs where it was built, else torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, device

from pdserve.kernels import reference, reference_fused
from pdserve.kernels.cpu import attention, library
from pdserve.kernels.cpu import fused as cpu_fused


class StoreKV(Protocol):
    """See `reference.store_kv`."""

    def __call__(self, keys: Tensor, values: Tensor, key_pages: Tensor, value_pages: Tensor, slots: Tensor) -> None: ...


class PagedAttention(Protocol):
    """See `reference.paged_attention`."""

    def __call__(
        self,
        query: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        page_tables: Tensor,
        query_starts: Tensor,
        kv_lens: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Kernels:
    """One implementation of each kernel."""

    store_kv: StoreKV
    paged_attention: PagedAttention


class RmsNorm(Protocol):
    """See `reference_fused.rms_norm`."""

    def __call__(
        self, x: Tensor, weight: Tensor, output: Tensor, *, epsilon: float, residual: Tensor | None = None
    ) -> None: ...


class Rotate(Protocol):
    """See `reference_fused.rotate`."""

    def __call__(self, x: Tensor, positions: Tensor, table: Tensor) -> None: ...


class SiluMul(Protocol):
    """See `reference_fused.silu_mul`."""

    def __call__(self, gate_up: Tensor, output: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class FusedKernels:
    """One implementation of each elementwise kernel of the lean path."""

    rms_norm: RmsNorm
    rotate: Rotate
    silu_mul: SiluMul


_REFERENCE = Kernels(reference.store_kv, reference.paged_attention)
_REFERENCE_FUSED = FusedKernels(reference_fused.rms_norm, reference_fused.rotate, reference_fused.silu_mul)


def kernels_for(where: device) -> Kernels:
    """The kernels that fit a device. Triton is imported only for a GPU ("cuda", which is also AMD's name in torch)."""
    if where.type == "cpu" and library.why_not() is None:
        return Kernels(attention.store_kv, attention.paged_attention)
    if where.type != "cuda":
        return _REFERENCE
    from pdserve.kernels import gpu

    return Kernels(gpu.store_kv, gpu.paged_attention)


def fused_for(where: device) -> FusedKernels:
    """The elementwise kernels that fit a device, chosen as in `kernels_for`."""
    if where.type == "cpu" and library.why_not() is None:
        return FusedKernels(cpu_fused.rms_norm, cpu_fused.rotate, cpu_fused.silu_mul)
    if where.type != "cuda":
        return _REFERENCE_FUSED
    from pdserve.kernels import fused

    return FusedKernels(fused.rms_norm, fused.rotate, fused.silu_mul)
