"""Torch reference of attention and the KV store: the oracle of the other implementations, and what serves where there
are none: without compiled kernels, and on a CPU for types other than fp32.

Page views come from the KV layout: keys `[num_pages, num_kv_heads, page_size, k_dim]`, values
`[num_pages, num_kv_heads, page_size, v_dim]`, strided, never contiguous. All indices are 64-bit.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F


def store_kv(keys: Tensor, values: Tensor, key_pages: Tensor, value_pages: Tensor, slots: Tensor) -> None:
    """Writes the KV of new tokens into their slots; mutates the pages.

    Args:
        keys: `[num_tokens, num_kv_heads, k_dim]`.
        values: `[num_tokens, num_kv_heads, v_dim]`.
        key_pages: Key view of one layer.
        value_pages: Value view of one layer.
        slots: `[num_tokens]` int64, `page * page_size + offset`, distinct; -1: the row is not stored.

    Raises:
        IndexError: A slot does not exist; nothing was written.
    """
    num_pages, _, page_size, _ = key_pages.shape
    if len(slots) and not -1 <= int(slots.min()) <= int(slots.max()) < num_pages * page_size:
        raise IndexError(f"slots must be below {num_pages * page_size}, those of the pool")
    is_stored = slots >= 0
    pages, offsets = slots[is_stored] // page_size, slots[is_stored] % page_size
    key_pages[pages, :, offsets] = keys[is_stored]
    value_pages[pages, :, offsets] = values[is_stored]


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
    """Causal attention of the new tokens of each sequence over all of its tokens.

    The new tokens are the last ones of their sequence, and their KV is stored already. Query head h reads KV head
    `h // (num_heads // num_kv_heads)`.

    Args:
        query: `[num_tokens, num_heads, k_dim]`, sequences one after the other.
        key_pages: Key view of one layer.
        value_pages: Value view of one layer.
        page_tables: `[num_seqs, max_pages]` int64; entries past a sequence's pages are not read.
        query_starts: `[num_seqs + 1]` int64, cumulative numbers of new tokens.
        kv_lens: `[num_seqs]` int64, tokens per sequence, new ones included.
        scale: Factor on query-key products.
        window: A token sees itself and the `window - 1` tokens before it; None: all before it.
        softcap: Scores become `softcap * tanh(score / softcap)`; None: unchanged.
        sinks: `[num_heads]` logits that take part in the softmax and contribute nothing; None: none.

    Returns:
        `[num_tokens, num_heads, v_dim]`.

    Raises:
        IndexError: Lengths do not fit together, or a page does not exist.
    """
    page_size = key_pages.shape[2]
    starts, lens = query_starts.tolist(), kv_lens.tolist()
    _check_lengths(starts, lens, query.shape[0], page_tables.shape[1] * page_size)
    output = query.new_empty(query.shape[0], query.shape[1], value_pages.shape[3])
    for i, kv_len in enumerate(lens):
        start, stop = starts[i], starts[i + 1]
        num_new = stop - start
        if num_new == 0:
            continue
        first_seen = 0 if window is None else max(0, kv_len - num_new - window + 1)
        first_page = first_seen // page_size
        table = page_tables[i, first_page : -(-kv_len // page_size)]
        num_keys = kv_len - first_page * page_size
        if not 0 <= int(table.min()) <= int(table.max()) < key_pages.shape[0]:
            raise IndexError(f"page table {i} names a page that does not exist; the pool has {key_pages.shape[0]}")
        keys = _gather(key_pages, table, num_keys)
        values = _gather(value_pages, table, num_keys)
        mask = _mask(num_new, num_keys, window, query.device)
        queries = query[start:stop]
        if softcap is None and sinks is None:
            output[start:stop] = _sdpa(queries, keys, values, mask, scale)
        else:
            output[start:stop] = _explicit(queries, keys, values, mask, scale, softcap, sinks)
    return output


def _check_lengths(starts: list[int], lens: list[int], num_tokens: int, max_len: int) -> None:
    """Refuses sequences that are not all of the new tokens, or longer than their page tables."""
    fit = len(starts) == len(lens) + 1 and starts[0] == 0 and starts[-1] == num_tokens
    if not fit or any(not 0 <= b - a <= n <= max_len for (a, b), n in zip(pairwise(starts), lens, strict=True)):
        raise IndexError(f"lengths of sequences do not fit together: new tokens from {starts}, tokens in all {lens}")


def _gather(pages: Tensor, table: Tensor, num_keys: int) -> Tensor:
    """`[num_kv_heads, num_keys, dim]` of the pages of one sequence."""
    # One copy: advanced indexing of the second axis of the strided view gives contiguous heads.
    gathered = pages.transpose(0, 1)[:, table]
    return gathered.reshape(gathered.shape[0], -1, gathered.shape[3])[:, :num_keys]


def _mask(num_new: int, num_keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """`[num_new, num_keys]` bool, True where a query sees a key; None when every query sees every key."""
    if num_new == 1 and (window is None or num_keys <= window):
        return None
    queries = torch.arange(num_keys - num_new, num_keys, device=device)[:, None]
    keys = torch.arange(num_keys, device=device)[None, :]
    mask = keys <= queries
    return mask if window is None else mask & (keys > queries - window)


def _sdpa(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    num_new, num_heads, _ = query.shape
    num_kv_heads = keys.shape[0]
    if num_new == 1:
        # The heads that share a KV head become rows of one product.
        grouped = query.reshape(num_kv_heads, num_heads // num_kv_heads, -1)
        out = F.scaled_dot_product_attention(grouped[None], keys[None], values[None], attn_mask=mask, scale=scale)
        return out.reshape(1, num_heads, -1)
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=mask,
        scale=scale,
        enable_gqa=num_kv_heads != num_heads,
    )
    return out[0].transpose(0, 1)


def _explicit(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    num_new, num_heads, _ = query.shape
    num_kv_heads = keys.shape[0]
    grouped = query.reshape(num_new, num_kv_heads, num_heads // num_kv_heads, -1).permute(1, 2, 0, 3)
    scores = torch.matmul(grouped, keys[:, None].transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        column = sinks.float().reshape(num_kv_heads, -1, 1, 1).expand(-1, -1, num_new, 1)
        weights = torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    out = torch.matmul(weights.to(values.dtype), values[:, None])
    return out.permute(2, 0, 1, 3).reshape(num_new, num_heads, -1)
