"""ModelRunner: computes the steps of a loaded model over pool memory.

Threads are torch's, their number set once per process by `engine.build`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pdserve.core.errors import EngineError
from pdserve.core.layout import KVLayout
from pdserve.engine.attention import PagedContext
from pdserve.engine.forward_batch import build_batch
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
    """

    def __init__(
        self,
        loaded: LoadedModel,
        layout: KVLayout,
        num_pages: int,
        memory: PoolMemory,
        host: PoolMemory | None = None,
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self._model = loaded.model
        self._page_size = layout.page_size
        self._pages = layer_views(layout, num_pages, memory.buffer)
        self._copies = PageCopies(layout.page_bytes, memory.buffer, None if host is None else host.buffer)
        self._processors = processors
        self._kernels = kernels_for(self._model.device)

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """See `engine.step.Runner`."""
        output.require_pages(self._page_size)
        self._copies.apply(output.copies)
        if not output.sequences:
            return RunnerOutput(())
        batch = build_batch(output, self._page_size)
        context = PagedContext(batch, self._pages, self._kernels)
        sampling = [s for s in output.sequences if s.sampling is not None]
        try:
            with torch.inference_mode():
                rows = torch.cat((batch.sampled_rows, batch.prompt_rows))
                if not len(rows):  # the head still runs on one row: not every model accepts an empty selection
                    rows = torch.zeros(1, dtype=torch.int64)
                logits = self._model(
                    input_ids=batch.token_ids[None],
                    position_ids=batch.positions[None],
                    use_cache=False,
                    logits_to_keep=rows,
                    pdserve=context,
                ).logits[0]
                tokens = iter(sample(logits[: len(sampling)], sampling, self._processors))
                prompts = prompt_logprobs(logits[len(sampling) :], output.sequences)
        except RuntimeError as e:  # torch's only error type: shapes, memory
            raise EngineError(f"the model failed in step {output.step}: {e}") from e
        return RunnerOutput(tuple(None if s.sampling is None else next(tokens) for s in output.sequences), prompts)
