"""Attention of one step of SmolLM2-135M: ours over pages beside torch's SDPA and FlexAttention.

All layers' KV lies in one pool, pages in random order; a call attends in every layer. The libraries' kernels get KV of
equal lengths in a row, which no pool has: what gathering would take is shown by "pages gathered, SDPA".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from pdserve.bench.kernels_timing import OURS, Timed, medians_ms, relative_error, use_threads
from pdserve.core.layout import KVLayout
from pdserve.engine.kv_cache import LayerPages, views_of
from pdserve.kernels import reference
from pdserve.kernels.cpu.attention import paged_attention

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 9, 3, 64, 16
SCALE = HEAD_DIM**-0.5
FLEX = "FlexAttention over KV in a row"


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences of one length.

    Attributes:
        num_seqs: Sequences.
        num_new: New tokens of each: 1, or all.
        length: Tokens of each.
        has_flex: FlexAttention takes part.
    """

    num_seqs: int
    num_new: int
    length: int
    has_flex: bool = False

    @property
    def name(self) -> str:
        """For the table."""
        kind = "decode" if self.num_new == 1 else "prefill"
        return f"{kind}, {self.num_seqs} x {self.length} tokens"


CASES = (
    Case(1, 1, 256), Case(8, 1, 256, has_flex=True), Case(32, 1, 256), Case(8, 1, 1024),
    Case(1, 128, 128), Case(1, 512, 512, has_flex=True),
)  # fmt: skip
QUICK_CASES = (Case(2, 1, 64), Case(1, 32, 32))


@dataclass(frozen=True, slots=True)
class _Inputs:
    case: Case
    query: Tensor
    pages: dict[int, LayerPages]
    tables: Tensor
    starts: Tensor
    lens: Tensor
    rows: list[tuple[Tensor, Tensor]]
    """Per layer keys and values in a row, `[num_seqs, num_kv_heads, length, head_dim]`."""


def measure(
    num_layers: int,
    cases: tuple[Case, ...],
    threads: tuple[int, ...],
    rounds: int,
    has_flex: bool,
    say: Callable[[str], None],
) -> tuple[list[Timed], list[str]]:
    """Times every contender at every case; arguments and result as in `kernels_linears.measure`."""
    found: list[Timed] = []
    missing: list[str] = []
    with torch.inference_mode():
        for case in cases:
            inputs = _inputs(case, num_layers)
            for num in threads:
                say(f"attention: {case.name}, {num} threads")
                use_threads(num)
                contenders = _contenders(inputs)
                if has_flex and case.has_flex and num == 1:
                    try:
                        contenders[FLEX] = _flex(inputs)
                    except RuntimeError as e:  # so torch's compiler says that there is no C++ compiler
                        missing.append(f"{FLEX} is left out: {(str(e).strip().splitlines() or [type(e).__name__])[0]}")
                found += _measure(inputs, contenders, num, rounds)
    return found, missing


def _inputs(case: Case, num_layers: int) -> _Inputs:
    layout = KVLayout.uniform(
        num_layers=num_layers, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, page_size=PAGE_SIZE, dtype="float32"
    )
    per_seq = layout.num_pages(case.length)
    flat = torch.randn(case.num_seqs * per_seq * layout.page_elements)
    pages = views_of(layout, flat)
    tables = torch.randperm(case.num_seqs * per_seq).view(case.num_seqs, per_seq)
    return _Inputs(
        case,
        torch.randn(case.num_seqs * case.num_new, NUM_HEADS, HEAD_DIM),
        pages,
        tables,
        torch.arange(case.num_seqs + 1) * case.num_new,
        torch.full((case.num_seqs,), case.length),
        [(_gathered(keys, tables), _gathered(values, tables)) for keys, values in pages.values()],
    )


def _gathered(pages: Tensor, tables: Tensor) -> Tensor:
    return pages[tables].transpose(1, 2).flatten(2, 3).contiguous()


def _contenders(inputs: _Inputs) -> dict[str, Callable[[], Tensor]]:
    arguments = (inputs.tables, inputs.starts, inputs.lens)

    def paged(kernel: Callable[..., Tensor]) -> Tensor:
        return [kernel(inputs.query, *pages, *arguments, scale=SCALE) for pages in inputs.pages.values()][-1]

    def gathered() -> Tensor:
        return [
            _sdpa(inputs, _gathered(keys, inputs.tables), _gathered(values, inputs.tables))
            for keys, values in inputs.pages.values()
        ][-1]

    return {
        OURS: partial(paged, paged_attention),
        "SDPA over KV in a row": lambda: [_sdpa(inputs, *layer) for layer in inputs.rows][-1],
        "pages gathered, SDPA": gathered,
        "pdserve's torch reference": partial(paged, reference.paged_attention),
    }


def _sdpa(inputs: _Inputs, keys: Tensor, values: Tensor) -> Tensor:
    """A decode's grouped heads are rows of one product: that is faster than repeating its keys."""
    if inputs.case.num_new == 1:
        query = inputs.query.view(-1, NUM_KV_HEADS, NUM_HEADS // NUM_KV_HEADS, HEAD_DIM)
        return F.scaled_dot_product_attention(query, keys, values, scale=SCALE).view(-1, NUM_HEADS, HEAD_DIM)
    query = inputs.query.view(inputs.case.num_seqs, -1, NUM_HEADS, HEAD_DIM).transpose(1, 2)
    out = F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=SCALE, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)


def _flex(inputs: _Inputs) -> Callable[[], Tensor]:
    """Compiles it for this case, and lets it answer once."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    case = inputs.case
    compiled = torch.compile(flex_attention, dynamic=False)
    mask = None
    if case.num_new > 1:
        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, case.num_new, case.length, device="cpu")
    query = inputs.query.view(case.num_seqs, -1, NUM_HEADS, HEAD_DIM).transpose(1, 2).contiguous()

    def call() -> Tensor:
        outs = [compiled(query, *layer, block_mask=mask, scale=SCALE, enable_gqa=True) for layer in inputs.rows]
        last: Tensor = outs[-1]
        return last.transpose(1, 2).flatten(0, 1)

    call()
    return call


def _measure(inputs: _Inputs, contenders: dict[str, Callable[[], Tensor]], threads: int, rounds: int) -> list[Timed]:
    case, num_layers = inputs.case, len(inputs.rows)
    seen = case.length if case.num_new == 1 else (case.length + 1) / 2  # keys per query, on average
    tokens = case.num_seqs * case.num_new
    exact = _sdpa_float64(inputs)
    times = medians_ms(contenders, rounds)
    return [
        Timed(
            case=case.name,
            threads=threads,
            name=name,
            ms=times[name],
            flops=4.0 * HEAD_DIM * NUM_HEADS * tokens * seen * num_layers,
            read_bytes=8.0 * HEAD_DIM * NUM_KV_HEADS * case.num_seqs * case.length * num_layers,
            error=relative_error(call(), exact),
        )
        for name, call in contenders.items()
    ]


def _sdpa_float64(inputs: _Inputs) -> Tensor:
    """The last layer's answer."""
    case = inputs.case
    keys, values = (t.double().repeat_interleave(NUM_HEADS // NUM_KV_HEADS, dim=1) for t in inputs.rows[-1])
    query = inputs.query.double().view(case.num_seqs, -1, NUM_HEADS, HEAD_DIM).transpose(1, 2)
    scores = query @ keys.transpose(2, 3) * SCALE
    if case.num_new > 1:
        scores += torch.full_like(scores, float("-inf")).triu(1)
    answer: Tensor = scores.softmax(-1) @ values
    return answer.transpose(1, 2).flatten(0, 1)
