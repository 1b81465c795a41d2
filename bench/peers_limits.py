"""What a machine can do, and how fast a model could be on it: `python -m pdserve.bench.peers_limits THREADS`.

Measured in a process of its own, on the cores of the comparison. The limit counts only what engines can hardly avoid:
every weight read once per step, and the multiplications of every token; attention, sampling and Python are free. The
head counts for every prompt token, of which the last would do: for long prompts the limit is a little low.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

TRIES = 7


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The machine.

    Attributes:
        read_bytes_per_s: Memory read by a matrix-vector product of a matrix far larger than the caches.
        gemm_flops_per_s: fp32 matrix product of the shape of a batch of prompts.
    """

    read_bytes_per_s: float
    gemm_flops_per_s: float


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one load asks for.

    Attributes:
        num_params: Weights that take part in matrix products.
        input_tokens: Prompt tokens of all requests.
        output_tokens: Generated tokens of all requests.
        concurrency: Sequences that decode together.
    """

    num_params: int
    input_tokens: int
    output_tokens: int
    concurrency: int


def best_tokens_per_s(limits: Limits, work: Work, bytes_per_weight: float = 4.0) -> float:
    """Output tokens per second that the machine allows.

    A step of B decodes takes the longer of reading the weights once and multiplying B rows; prompts multiply only.

    Args:
        limits: The machine.
        work: The load.
        bytes_per_weight: 4 for fp32.
    """
    flops_per_token = 2.0 * work.num_params
    read_s = work.num_params * bytes_per_weight / limits.read_bytes_per_s
    step_s = max(read_s, work.concurrency * flops_per_token / limits.gemm_flops_per_s)
    prompts_s = work.input_tokens * flops_per_token / limits.gemm_flops_per_s
    return work.output_tokens / (prompts_s + work.output_tokens / work.concurrency * step_s)


def measure(threads: int) -> Limits:
    """Measures this machine, the best of several tries each.

    Args:
        threads: Of torch.
    """
    import torch

    torch.set_num_threads(threads)
    matrix, vector = torch.ones(32768, 4096), torch.ones(4096)
    read_s = _best(lambda: torch.mv(matrix, vector))
    rows, weights = torch.rand(512, 1536), torch.rand(1536, 1536)
    gemm_s = _best(lambda: torch.mm(rows, weights))
    return Limits(
        read_bytes_per_s=matrix.numel() * 4 / read_s,
        gemm_flops_per_s=2.0 * rows.shape[0] * weights.shape[0] * weights.shape[1] / gemm_s,
    )


def _best(work: Callable[[], object]) -> float:
    times = []
    for _ in range(TRIES):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


if __name__ == "__main__":
    print(json.dumps(asdict(measure(int(sys.argv[1])))))
