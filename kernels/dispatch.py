"""Chooses the implementation of each kernel by device: Triton for GPUs, the torch reference for all else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, device

from pdserve.kernels import reference


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


_REFERENCE = Kernels(reference.store_kv, reference.paged_attention)


def kernels_for(where: device) -> Kernels:
    """The kernels that fit a device. Triton is imported only for a GPU ("cuda", which is also AMD's name in torch)."""
    if where.type != "cuda":
        return _REFERENCE
    from pdserve.kernels import gpu

    return Kernels(gpu.store_kv, gpu.paged_attention)
