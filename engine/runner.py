"""ModelRunner: computes the steps of a loaded model over pool memory.

Threads are torch's and the compiled kernels', their numbers set once per process by `engine.build`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.core.errors import EngineError
from pdserve.core.layout import KVLayout
from pdserve.engine.attention import PagedContext
from pdserve.engine.device import DevicePageCopies, DevicePool, host_pages
from pdserve.engine.forward_batch import ForwardBatch, build_batch
from pdserve.engine.graphs import Capture, DecodeGraphs, graph_sizes
from pdserve.engine.kv_cache import PoolMemory, layer_views
from pdserve.engine.loader import LoadedModel
from pdserve.engine.logits import LogitsProcessor
from pdserve.engine.page_copies import PageCopies
from pdserve.engine.sampler import prompt_logprobs, sample
from pdserve.engine.step import RunnerOutput, SchedulerOutput
from pdserve.kernels.dispatch import kernels_for


class ModelRunner:
    """Implements `engine.step.Runner` with one forward pass `[1, num_tokens]` per step.

    Args:
        loaded: The model.
        layout: Layout of the pages.
        num_pages: Pages in `memory`.
        memory: Pool memory; written in place.
        host: Memory of the host pool; None: nothing is swapped.
        processors: Edit the logits of the rows that ask for it, in this order.
        device_pool: Pages to compute in instead of `memory`, where the model is on a GPU.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        layout: KVLayout,
        num_pages: int,
        memory: PoolMemory,
        host: PoolMemory | None = None,
        processors: Sequence[LogitsProcessor] = (),
        device_pool: DevicePool | None = None,
    ) -> None:
        self._model = loaded.model
        self._where: torch.device = self._model.device
        self._page_size = layout.page_size
        self._copies: PageCopies | DevicePageCopies
        if device_pool is None:
            self._pages = layer_views(layout, num_pages, memory.buffer)
            self._copies = PageCopies(layout.page_bytes, memory.buffer, None if host is None else host.buffer)
        else:
            self._pages = device_pool.views()
            self._copies = DevicePageCopies(device_pool.pages, None if host is None else host_pages(layout, host))
        self._processors = processors
        self._kernels = kernels_for(self._where)
        self._graphs: DecodeGraphs | None = None

    def use_graphs(self, capture: Capture, max_num_seqs: int, max_model_len: int) -> None:
        """Computes steps of decodes alone by graphs from now on.

        Args:
            capture: Makes a graph.
            max_num_seqs: Sequences of a step, at most.
            max_model_len: Tokens of a sequence, at most.

        Raises:
            ConfigError: The model cannot be captured.
        """
        max_pages = -(-max_model_len // self._page_size)
        with torch.inference_mode():
            self._graphs = DecodeGraphs(
                lambda batch: self._logits(batch, batch.sampled_rows),
                capture,
                graph_sizes(max_num_seqs),
                max_pages,
                self._where,
            )

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """See `engine.step.Runner`."""
        output.require_pages(self._page_size)
        sampling = [s for s in output.sequences if s.sampling is not None]
        try:
            self._copies.apply(output.copies)
            if not output.sequences:
                return RunnerOutput(())
            with torch.inference_mode():
                logits = self._selected_logits(build_batch(output, self._page_size))
                tokens = iter(sample(logits[: len(sampling)], sampling, self._processors))
                prompts = prompt_logprobs(logits[len(sampling) :], output.sequences)
                if self._where.type == "cuda":
                    torch.cuda.current_stream(self._where).synchronize()  # the fence, even where nothing was sampled
        except (RuntimeError, ValueError, IndexError, MemoryError) as e:  # of torch and the kernels
            raise EngineError(f"the model failed in step {output.step}: {e}") from e
        return RunnerOutput(tuple(None if s.sampling is None else next(tokens) for s in output.sequences), prompts)

    def _selected_logits(self, batch: ForwardBatch) -> Tensor:
        """`[num_rows, vocab_size]` of the sampled rows, then those of prompt positions."""
        rows = torch.cat((batch.sampled_rows, batch.prompt_rows))
        if not len(rows):  # the head still runs on one row: not every model accepts an empty selection
            rows = torch.zeros(1, dtype=torch.int64)
        if self._graphs is not None and self._graphs.fits(batch):
            return self._graphs.run(batch)[rows.to(self._where)]
        return self._logits(batch.to(self._where), rows.to(self._where))

    def _logits(self, batch: ForwardBatch, rows: Tensor) -> Tensor:
        logits: Tensor = self._model(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=rows,
            pdserve=PagedContext(batch, self._pages, self._kernels),
        ).logits[0]
        return logits
