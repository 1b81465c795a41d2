"""DecodeGraphs: steps of decodes alone as CUDA graphs, one per padded number of sequences.

A graph replays the launches that it saw, on the memory that it saw: inputs are copied into static buffers, as wide as
the longest sequence may need, and kernels read lengths from them on the device. Padded rows have slot -1 (stored
nowhere) and length 0 (attends to nothing); nobody reads their logits.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from pdserve.core.errors import ConfigError
from pdserve.engine.forward_batch import ForwardBatch

Forward = Callable[[ForwardBatch], Tensor]
"""Logits `[num_tokens, vocab_size]` of all tokens of a batch."""
Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Takes a computation, returns what repeats it; the tensor is the same memory each time."""


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Padded numbers of sequences: 1, 2, 4, 8, then each multiple of 16 until all fit."""
    return sorted({n for n in (1, 2, 4, 8) if n < max_num_seqs} | set(range(16, max_num_seqs, 16)) | {max_num_seqs})


class DecodeGraphs:
    """Captures all sizes at once, largest first, so that the smaller ones find room in its memory.

    Args:
        forward: Computes a batch.
        capture: Makes a graph.
        sizes: Padded numbers of sequences, ascending.
        max_pages: Pages of the longest sequence.
        where: The device.
    """

    def __init__(
        self, forward: Forward, capture: Capture, sizes: Sequence[int], max_pages: int, where: torch.device
    ) -> None:
        self._sizes = sizes
        largest = sizes[-1]

        def buffer(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=where)

        self._tokens, self._positions, self._slots, self._lens = (buffer(largest) for _ in range(4))
        self._tables = buffer(largest, max_pages)
        self._starts = torch.arange(largest + 1, device=where)
        self._slots.fill_(-1)
        self._replays: dict[int, Callable[[], Tensor]] = {}
        for size in reversed(sizes):
            self._replays[size] = capture(partial(forward, self._static(size)))

    def fits(self, batch: ForwardBatch) -> bool:
        """True when every sequence has one new token and a graph is large enough."""
        num_seqs, num_pages = batch.page_tables.shape
        return (
            batch.token_ids.shape[0] == num_seqs <= self._sizes[-1] and num_pages <= self._tables.shape[1]
        )  # fmt: skip

    def run(self, batch: ForwardBatch) -> Tensor:
        """Logits `[num_seqs, vocab_size]` of a batch that fits; valid until the next call."""
        num_seqs, num_pages = batch.page_tables.shape
        size = self._sizes[bisect.bisect_left(self._sizes, num_seqs)]
        for static, values in (
            (self._tokens, batch.token_ids),
            (self._positions, batch.positions),
            (self._slots, batch.slots),
            (self._lens, batch.kv_lens),
        ):
            static[:num_seqs].copy_(values, non_blocking=True)
        self._tables[:num_seqs, :num_pages].copy_(batch.page_tables, non_blocking=True)
        self._slots[num_seqs:size].fill_(-1)
        self._lens[num_seqs:size].zero_()
        return self._replays[size]()[:num_seqs]

    def _static(self, size: int) -> ForwardBatch:
        return ForwardBatch(
            token_ids=self._tokens[:size],
            positions=self._positions[:size],
            slots=self._slots[:size],
            query_starts=self._starts[: size + 1],
            kv_lens=self._lens[:size],
            page_tables=self._tables[:size],
            sampled_rows=self._starts[:size],
            prompt_rows=self._starts[:0],
        )


class CudaCapture:
    """`Capture` by CUDA graphs that share one memory pool.

    Args:
        where: The GPU.
    """

    def __init__(self, where: torch.device) -> None:
        self._where = where
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """See `Capture`.

        Raises:
            ConfigError: The computation cannot be captured.
        """
        side = torch.cuda.Stream(self._where)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._where))
        with torch.cuda.stream(side):
            compute()  # compiles kernels and makes workspaces, which must not happen while capturing
        torch.cuda.synchronize(self._where)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                output = compute()
        except RuntimeError as e:
            what = (str(e).strip().splitlines() or [type(e).__name__])[0]
            raise ConfigError(f"this model's steps cannot be CUDA graphs ({what}); give --enforce-eager") from e

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay
