"""Chooses the implementation of each kernel by device. Only the torch reference exists so far; it runs anywhere."""

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
    """The kernels that fit a device."""
    del where  # every device has the reference only
    return _REFERENCE
