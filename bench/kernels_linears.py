"""Linears of one step of SmolLM2-135M: ours over packed weights beside what torch ships of oneDNN, MKL and FBGEMM.

Random weights of the model's shapes. A call runs all linears of a step, each weight from memory. Packing is not timed.

| contender | weights | activations |
| --- | --- | --- |
| pdserve | fp32, packed | fp32 |
| torch | fp32 as they are | fp32 |
| oneDNN, packed; MKL, packed | fp32, packed for that many rows, as torch.compile does | fp32 |
| pdserve int8 | int8, a scale for each 64 | 16 bits, a scale for each 64 |
| FBGEMM int8; oneDNN int8 | int8, a scale per output (torch's dynamic quantised linear) | 7 bits, one scale |
| oneDNN int8, inputs given | int8, a scale per output | 8 bits, made beforehand: what it takes less is not counted |
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from pdserve.bench.kernels_timing import OURS, Timed, medians_ms, relative_error, use_threads
from pdserve.kernels.cpu.linear import PackedLinear

HIDDEN, QKV, GATE_UP, INTERMEDIATE, VOCABULARY = 576, 960, 3072, 1536, 49152
NUM_LAYERS = 30
MAX_HEAD_ROWS = 32
"""A step needs the head for the last token of each sequence alone."""
OURS_INT8 = f"{OURS} int8"
Linear = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to compute a linear.

    Attributes:
        pack: Makes one from `[out, in]` weights and the number of rows that it will be called with.
        weight_bytes: Bytes of one weight.
        for_rows: It is packed for one number of rows.
    """

    pack: Callable[[Tensor, int], Linear]
    weight_bytes: int
    for_rows: bool = False


def _onednn(weight: Tensor, rows: int) -> Linear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def _mkl(weight: Tensor, rows: int) -> Linear:
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, rows)
    return lambda x: torch.ops.mkl._mkl_linear(x, packed, weight, None, rows)


def _dynamic(weight: Tensor, rows: int, *, engine: str) -> Linear:
    del rows
    scales = _scales(weight)
    zeros = torch.zeros(len(scales), dtype=torch.int64)
    before, torch.backends.quantized.engine = torch.backends.quantized.engine, engine
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated, and still all that torch has of FBGEMM
            quantised = torch.quantize_per_channel(weight, scales.double(), zeros, 0, torch.qint8)
        packed = torch.ops.quantized.linear_prepack(quantised, None)
    finally:
        torch.backends.quantized.engine = before
    return lambda x: torch.ops.quantized.linear_dynamic(x, packed, True)


def _given(weight: Tensor, rows: int) -> Linear:
    """Its inputs are quantised once: the input of every call is the same tensor."""
    del rows
    scales = _scales(weight)
    values = (weight / scales[:, None]).round().to(torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(values, None)
    zeros = torch.zeros(len(scales), dtype=torch.int32)
    known: list[tuple[Tensor, Tensor, float]] = []

    def call(x: Tensor) -> Tensor:
        if not known or known[0][0] is not x:
            step = float(x.abs().max()) / 127
            known[:] = [(x, ((x / step).round() + 128).to(torch.uint8), step)]
        _, rounded, step = known[0]
        return torch.ops.onednn.qlinear_pointwise(  # type: ignore[no-any-return]
            rounded, step, 128, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )

    return call


def _scales(weight: Tensor) -> Tensor:
    return weight.abs().amax(dim=1) / 127


CONTENDERS: Mapping[str, Contender] = {
    OURS: Contender(lambda weight, rows: PackedLinear.pack(weight), 4),
    "torch": Contender(lambda weight, rows: partial(F.linear, weight=weight), 4),
    "oneDNN, packed": Contender(_onednn, 4, for_rows=True),
    "MKL, packed": Contender(_mkl, 4, for_rows=True),
    OURS_INT8: Contender(lambda weight, rows: PackedLinear.pack_int8(weight), 1),
    "FBGEMM int8": Contender(partial(_dynamic, engine="fbgemm"), 1),
    "oneDNN int8": Contender(partial(_dynamic, engine="onednn"), 1),
    "oneDNN int8, inputs given": Contender(_given, 1),
}


def measure(
    num_layers: int, rows: tuple[int, ...], threads: tuple[int, ...], rounds: int, say: Callable[[str], None]
) -> tuple[list[Timed], list[str]]:
    """Times every contender at every number of rows and threads.

    Args:
        num_layers: Layers; the head comes beside them.
        rows: Numbers of rows.
        threads: Numbers of threads.
        rounds: Timed runs.
        say: Told what is being done.

    Returns:
        The times, and a line for each contender that this torch does not have.
    """
    found: list[Timed] = []
    with torch.inference_mode():
        say("linears: weights")
        weights = list(_weights(num_layers))
        fixed, missing = _pack(weights, 0, for_rows=False, say=say)
        for count in rows:
            packed, also_missing = _pack(weights, count, for_rows=True, say=say)
            missing |= also_missing
            for num in threads:
                say(f"linears: {count} rows, {num} threads")
                found += _measure(weights, fixed | packed, count, num, rounds)
    return found, [f"{name} is left out: {why}" for name, why in missing.items()]


def _weights(num_layers: int) -> Iterator[Tensor]:
    layer = [(QKV, HIDDEN), (HIDDEN, HIDDEN), (GATE_UP, HIDDEN), (HIDDEN, INTERMEDIATE)]
    for shape in [*layer * num_layers, (VOCABULARY, HIDDEN)]:
        yield torch.randn(shape) * 0.04


def _pack(
    weights: list[Tensor], rows: int, *, for_rows: bool, say: Callable[[str], None]
) -> tuple[dict[str, list[Linear]], dict[str, str]]:
    found, missing = {}, {}
    for name, contender in CONTENDERS.items():
        if contender.for_rows != for_rows:
            continue
        say(f"linears: packing for {name}")
        try:
            *layers, head = weights
            found[name] = [contender.pack(weight, rows) for weight in layers]
            found[name].append(contender.pack(head, min(rows, MAX_HEAD_ROWS)))
            found[name][0](torch.randn(rows or 1, weights[0].shape[1]))
        except (RuntimeError, AttributeError, NotImplementedError) as e:  # how torch says that it was built without it
            found.pop(name, None)
            missing[name] = (str(e).strip().splitlines() or [type(e).__name__])[0]
    return found, missing


def _measure(
    weights: list[Tensor], packed: Mapping[str, list[Linear]], rows: int, threads: int, rounds: int
) -> list[Timed]:
    use_threads(threads)
    hidden, intermediate = torch.randn(rows, HIDDEN), torch.randn(rows, INTERMEDIATE)
    inputs = [intermediate if weight.shape[1] == INTERMEDIATE else hidden for weight in weights]
    inputs[-1] = hidden[:MAX_HEAD_ROWS]

    def step(linears: list[Linear]) -> None:
        for x, linear in zip(inputs, linears, strict=True):
            linear(x)

    probe = 2  # gate and up of the first layer
    exact = hidden.double() @ weights[probe].double().T
    size = sum(weight.numel() for weight in weights)
    flops = sum(2.0 * len(x) * weight.numel() for x, weight in zip(inputs, weights, strict=True))
    times = medians_ms({name: partial(step, linears) for name, linears in packed.items()}, rounds)
    return [
        Timed(
            case=f"linears, {rows} row{'s' if rows > 1 else ''}",
            threads=threads,
            name=name,
            ms=times[name],
            flops=flops,
            read_bytes=float(CONTENDERS[name].weight_bytes * size),
            error=relative_error(packed[name][probe](hidden), exact),
        )
        for name in CONTENDERS
        if name in packed
    ]
