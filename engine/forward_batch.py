"""ForwardBatch: one step as tensors. Sequences lie one after the other, without padding."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from pdserve.engine.step import SchedulerOutput


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """What a forward pass reads. All tensors are int64.

    Attributes:
        token_ids: `[num_tokens]`, new tokens of all sequences.
        positions: `[num_tokens]`, position of each within its sequence.
        slots: `[num_tokens]`, where each token's KV goes: `page * page_size + offset`.
        query_starts: `[num_seqs + 1]`, cumulative numbers of new tokens.
        kv_lens: `[num_seqs]`, tokens of each sequence, new ones included.
        page_tables: `[num_seqs, max_pages]`, padded with 0; padding is never read.
        sampled_rows: `[num_sampled]`, rows of `token_ids` after which a token is sampled.
        prompt_rows: `[num_prompt_positions]`, rows that predict prompt tokens whose log-probabilities are told.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    query_starts: Tensor
    kv_lens: Tensor
    page_tables: Tensor
    sampled_rows: Tensor
    prompt_rows: Tensor

    def to(self, where: torch.device) -> ForwardBatch:
        """The same on a device."""
        if where.type == "cpu":
            return self
        return ForwardBatch(**{f.name: getattr(self, f.name).to(where, non_blocking=True) for f in fields(self)})


def build_batch(output: SchedulerOutput, page_size: int) -> ForwardBatch:
    """Lays out a step.

    Args:
        output: The step; unchanged.
        page_size: Tokens per page.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts, kv_lens, tables, sampled = [0], [], [], []
    prompt: list[int] = []
    for seq in output.sequences:
        stop = seq.start + len(seq.token_ids)
        if seq.prompt is not None:
            before = len(token_ids) - seq.start - 1  # the row before a position predicts it
            prompt.extend(range(before + seq.prompt.first, before + seq.prompt.last + 1))
        token_ids.extend(seq.token_ids)
        positions.extend(range(seq.start, stop))
        slots.extend(seq.page_table[p // page_size] * page_size + p % page_size for p in range(seq.start, stop))
        starts.append(len(token_ids))
        kv_lens.append(stop)
        tables.append(seq.page_table[: -(-stop // page_size)])
        if seq.sampling is not None:
            sampled.append(len(token_ids) - 1)
    width = max(len(table) for table in tables)
    return ForwardBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        slots=torch.tensor(slots, dtype=torch.int64),
        query_starts=torch.tensor(starts, dtype=torch.int64),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int64),
        page_tables=torch.tensor([[*t, *([0] * (width - len(t)))] for t in tables], dtype=torch.int64),
        sampled_rows=torch.tensor(sampled, dtype=torch.int64),
        prompt_rows=torch.tensor(prompt, dtype=torch.int64),
    )
