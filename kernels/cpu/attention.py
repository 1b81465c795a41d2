"""Attention over pages and the KV store, compiled: fp32 in ordinary strides; all else goes to the torch reference.

The structures are those of `csrc/attention.h` and `csrc/store_kv.h`.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

from pdserve.kernels import reference
from pdserve.kernels.cpu import library
from pdserve.kernels.cpu.arguments import are_indices, are_rows, require

_NO_MEMORY = -1


class _Attention(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "key_pages", "value_pages")),
        *((name, ctypes.c_void_p) for name in ("page_tables", "query_starts", "kv_lens", "sinks", "output")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_seqs", "max_pages", "num_pages")),
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "k_dim", "v_dim", "page_size")),
        *((name, ctypes.c_int64) for name in ("q_stride_token", "q_stride_head")),
        *((name, ctypes.c_int64) for name in ("k_stride_page", "k_stride_head", "k_stride_token")),
        *((name, ctypes.c_int64) for name in ("v_stride_page", "v_stride_head", "v_stride_token")),
        *((name, ctypes.c_int64) for name in ("table_stride", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


class _StoreKV(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("keys", "values", "key_pages", "value_pages", "slots")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_pages", "num_heads", "k_dim", "v_dim", "page_size")),
        *((name, ctypes.c_int64) for name in ("k_stride_token", "k_stride_head", "v_stride_token", "v_stride_head")),
        *((name, ctypes.c_int64) for name in ("key_page_stride", "key_page_stride_head", "key_page_stride_token")),
        *(
            (name, ctypes.c_int64)
            for name in ("value_page_stride", "value_page_stride_head", "value_page_stride_token")
        ),
    ]


def store_kv(keys: Tensor, values: Tensor, key_pages: Tensor, value_pages: Tensor, slots: Tensor) -> None:
    """As `reference.store_kv`.

    Raises:
        ValueError: Shapes do not fit together.
        IndexError: A slot does not exist; nothing was written.
    """
    if not are_rows(keys, values, key_pages, value_pages) or not are_indices(slots):
        return reference.store_kv(keys, values, key_pages, value_pages, slots)
    num_tokens, num_heads, k_dim = keys.shape
    v_dim = values.shape[2]
    num_pages, _, page_size, _ = key_pages.shape
    require(
        values.shape[:2] == keys.shape[:2]
        and key_pages.shape == (num_pages, num_heads, page_size, k_dim)
        and value_pages.shape == (num_pages, num_heads, page_size, v_dim)
        and slots.shape == (num_tokens,),
        "keys, values, pages and slots",
    )
    arguments = _StoreKV(
        keys.data_ptr(), values.data_ptr(), key_pages.data_ptr(), value_pages.data_ptr(), slots.data_ptr(),
        num_tokens, num_pages, num_heads, k_dim, v_dim, page_size,
        *keys.stride()[:2], *values.stride()[:2], *key_pages.stride()[:3], *value_pages.stride()[:3],
    )  # fmt: skip
    if library.load().pdserve_store_kv(ctypes.byref(arguments)):
        raise IndexError(f"slots must be below {num_pages * page_size}, those of the pool")
    return None


def paged_attention(
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
) -> Tensor:
    """As `reference.paged_attention`; a sequence's bits depend on that sequence alone.

    Raises:
        ValueError: Shapes do not fit together.
        IndexError: Lengths do not fit together, or a page does not exist.
    """
    if not (
        are_rows(query, key_pages, value_pages)
        and are_indices(page_tables, query_starts, kv_lens)
        and (sinks is None or are_rows(sinks))
    ):
        return reference.paged_attention(
            query, key_pages, value_pages, page_tables, query_starts, kv_lens,
            scale=scale, window=window, softcap=softcap, sinks=sinks,
        )  # fmt: skip
    num_tokens, num_heads, k_dim = query.shape
    num_pages, num_kv_heads, page_size, v_dim = value_pages.shape
    num_seqs, max_pages = page_tables.shape
    require(
        min(num_heads, num_kv_heads, page_size) > 0
        and key_pages.shape == (num_pages, num_kv_heads, page_size, k_dim)
        and num_heads % num_kv_heads == 0
        and query_starts.shape == (num_seqs + 1,)
        and kv_lens.shape == (num_seqs,)
        and (sinks is None or sinks.shape == (num_heads,))
        and (window is None or window > 0),
        "queries, pages, page tables and lengths",
    )
    output = query.new_empty(num_tokens, num_heads, v_dim)
    arguments = _Attention(
        query.data_ptr(), key_pages.data_ptr(), value_pages.data_ptr(),
        page_tables.data_ptr(), query_starts.data_ptr(), kv_lens.data_ptr(),
        None if sinks is None else sinks.data_ptr(), output.data_ptr(),
        num_tokens, num_seqs, max_pages, num_pages, num_heads, num_kv_heads, k_dim, v_dim, page_size,
        *query.stride()[:2], *key_pages.stride()[:3], *value_pages.stride()[:3],
        page_tables.stride(0), window or 0, scale, softcap or 0.0,
    )  # fmt: skip
    if status := library.load().pdserve_paged_attention(ctypes.byref(arguments)):
        if status == _NO_MEMORY:
            raise MemoryError("attention found no memory to work in")
        raise IndexError("lengths of sequences do not fit together, or a page table names a page that does not exist")
    return output
