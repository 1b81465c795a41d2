"""How the contenders of `pdserve bench kernels` are timed: interleaved, in one process, one after the other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from pdserve.kernels.cpu import library

OURS = "pdserve"


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """One contender at one case.

    Attributes:
        case: What was computed.
        threads: Threads that computed it.
        name: The contender; `OURS` are our kernels, and the one that others are compared with.
        ms: Median time, milliseconds.
        flops: Additions and multiplications.
        read_bytes: Weights or KV that are read at least once.
        error: Norm of the difference to the exact result, by the norm of that; None: not compared.
    """

    case: str
    threads: int
    name: str
    ms: float
    flops: float
    read_bytes: float
    error: float | None


def use_threads(count: int) -> None:
    """Sets the threads of torch and of our kernels."""
    torch.set_num_threads(count)
    library.set_threads(count)


def medians_ms(contenders: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Times every contender once per round, in turn, each round in the other direction; the first call is not timed."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for call in contenders.values():
        call()
    for round_ in range(rounds):
        for name in list(contenders)[:: -1 if round_ % 2 else 1]:
            began = time.perf_counter()
            contenders[name]()
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(found) * 1000 for name, found in times.items()}


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Norm of the difference by the norm of `exact`."""
    return float((found.double() - exact.double()).norm() / exact.double().norm())
