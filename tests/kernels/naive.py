"""Attention in float64, one query and one head at a time: slow, obvious, shares nothing with the kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """Sequences whose last `num_new[i]` of `kv_lens[i]` tokens are new."""

    num_new: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    k_dim: int = 8
    v_dim: int = 8
    page_size: int = 4
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


@dataclass
class Inputs:
    """Tensors of a case. Pages lie in random order in a pool whose unused slots are NaN."""

    query: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    key_pages: Tensor
    value_pages: Tensor
    page_tables: Tensor
    query_starts: Tensor
    kv_lens: Tensor
    slots: Tensor
    sinks: Tensor | None


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Random tensors of a case; old KV is in the pages, new KV (of `keys`, `values`) is not."""
    rng = torch.Generator().manual_seed(seed)
    size = case.page_size
    keys = [torch.randn(n, case.num_kv_heads, case.k_dim, generator=rng) for n in case.kv_lens]
    values = [torch.randn(n, case.num_kv_heads, case.v_dim, generator=rng) for n in case.kv_lens]
    needed = [-(-n // size) for n in case.kv_lens]
    order = torch.randperm(sum(needed) + 3, generator=rng).tolist()
    # As in real pools: [page][kv_head][layer][K|V][token][dim], here the second of three layers.
    layer = size * (case.k_dim + case.v_dim)
    pool = torch.full((len(order), case.num_kv_heads, 3, layer), math.nan)[:, :, 1]
    key_pages = pool[..., : size * case.k_dim].unflatten(2, (size, case.k_dim))
    value_pages = pool[..., size * case.k_dim :].unflatten(2, (size, case.v_dim))
    tables = torch.full((len(needed), max(needed)), 10**9)
    slots = []
    for i, n in enumerate(case.kv_lens):
        pages = [order.pop() for _ in range(needed[i])]
        tables[i, : len(pages)] = torch.tensor(pages)
        at = [pages[t // size] * size + t % size for t in range(n)]
        old = torch.tensor(at[: n - case.num_new[i]], dtype=torch.int64)
        key_pages[old // size, :, old % size] = keys[i][: len(old)]
        value_pages[old // size, :, old % size] = values[i][: len(old)]
        slots += at[len(old) :]
    starts = torch.tensor([0, *case.num_new]).cumsum(0)
    query = torch.randn(int(starts[-1]), case.num_heads, case.k_dim, generator=rng)
    sinks = torch.randn(case.num_heads, generator=rng) if case.sinks else None
    kv_lens = torch.tensor(case.kv_lens)
    return Inputs(query, keys, values, key_pages, value_pages, tables, starts, kv_lens, torch.tensor(slots), sinks)


def new_tokens(case: Case, per_sequence: list[Tensor]) -> Tensor:
    """The rows of the new tokens, sequences one after the other."""
    return torch.cat([t[len(t) - n :] for t, n in zip(per_sequence, case.num_new, strict=True)])


def naive_attention(case: Case, inputs: Inputs, scale: float) -> Tensor:
    """`[num_tokens, num_heads, v_dim]` float64."""
    rows = []
    for i, num_new in enumerate(case.num_new):
        for j in range(num_new):
            position = case.kv_lens[i] - num_new + j
            query = inputs.query[int(inputs.query_starts[i]) + j].double()
            rows.append(torch.stack([_one(case, inputs, i, position, h, query[h], scale) for h in range(len(query))]))
    return torch.stack(rows)


def _one(case: Case, inputs: Inputs, i: int, position: int, head: int, query: Tensor, scale: float) -> Tensor:
    kv_head = head // (case.num_heads // case.num_kv_heads)
    first = 0 if case.window is None else max(0, position - case.window + 1)
    keys = inputs.keys[i][first : position + 1, kv_head].double()
    values = inputs.values[i][first : position + 1, kv_head].double()
    scores = (keys * query).sum(-1) * scale
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    weights = torch.exp(scores)
    total = weights.sum() + (0 if inputs.sinks is None else torch.exp(inputs.sinks[head].double()))
    return (weights[:, None] * values).sum(0) / total
