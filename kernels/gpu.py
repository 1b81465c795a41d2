"""The Triton kernels behind the signatures of the reference; imported only when tensors live on a GPU."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from pdserve.kernels.configs import Profile, choose_splits, cuda_arch, decode_config, prefill_config
from pdserve.kernels.paged_attention import decode_attention
from pdserve.kernels.prefill_attention import prefill_attention
from pdserve.kernels.store_kv import store_kv as launch_store_kv


@cache
def profile_of(where: torch.device) -> Profile:
    """What the launch code needs to know of a GPU.

    Raises:
        ConfigError: The GPU is too old.
    """
    properties = torch.cuda.get_device_properties(where)
    if torch.version.hip is not None:
        return Profile("gfx942", properties.multi_processor_count)
    return Profile(cuda_arch(properties.major), properties.multi_processor_count)


def store_kv(keys: Tensor, values: Tensor, key_pages: Tensor, value_pages: Tensor, slots: Tensor) -> None:
    """As `reference.store_kv`; may be captured in a CUDA graph."""
    launch_store_kv(_rows(keys), _rows(values), key_pages, value_pages, slots)


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
    """As `reference.paged_attention`; may be captured in a CUDA graph.

    What is launched depends on shapes alone: as many tokens as sequences is a decode batch (one new token each), a
    single sequence is prefill, all else is both, where each kernel leaves the other's sequences alone. Padded rows of
    a decode batch have length 0 or 1 and any page table.
    """
    return attend(
        _rows(query), key_pages, value_pages, page_tables, query_starts, kv_lens, profile_of(query.device),
        scale=scale, window=window, softcap=softcap, sinks=sinks,
    )  # fmt: skip


def _rows(tensor: Tensor) -> Tensor:
    """The tensor with its last dimension contiguous, as the kernels read it; copied only where it is not."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def attend(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_tables: Tensor,
    query_starts: Tensor,
    kv_lens: Tensor,
    profile: Profile,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`paged_attention` with the launch configurations of a given device."""
    num_tokens, num_seqs, num_kv_heads = query.shape[0], kv_lens.shape[0], key_pages.shape[1]
    output = query.new_empty(num_tokens, query.shape[1], value_pages.shape[3])
    tensors = (query, key_pages, value_pages, page_tables, query_starts, kv_lens, output)
    widest = max(key_pages.shape[3], value_pages.shape[3])
    is_decode = num_tokens == num_seqs
    if is_decode or num_seqs > 1:
        config = decode_config(profile.arch, widest, query.element_size())
        max_tokens = page_tables.shape[1] * key_pages.shape[2]
        splits = choose_splits(profile.num_cores, num_seqs * num_kv_heads, max_tokens, config.min_split_tokens)
        decode_attention(
            *tensors, scale=scale, config=config, num_splits=splits, window=window, softcap=softcap, sinks=sinks
        )
    if not is_decode:
        is_fp8 = key_pages.element_size() == 1
        config = prefill_config(profile.arch, widest, query.element_size(), is_fp8_kv=is_fp8)
        prefill_attention(
            *tensors, scale=scale, config=config,
            skips_single=num_seqs > 1, window=window, softcap=softcap, sinks=sinks,
        )  # fmt: skip
    return output
