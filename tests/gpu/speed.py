"""Speeds of the attention kernels on the GPU at hand, as ratios measured in one run; each call is a CUDA graph.

Decode: bytes of KV read per second by the bandwidth of a large copy. Prefill: torch's flash attention over contiguous
KV divided by ours over pages (1.0: as fast). The caches are cleared before each call.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable

import torch
import triton
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from pdserve.core.layout import KVLayout
from pdserve.engine.kv_cache import layer_views
from pdserve.kernels.gpu import paged_attention

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, NUM_LAYERS = 32, 8, 128, 32, 2  # Llama-8B's attention
LAYOUT = KVLayout.uniform(
    num_layers=NUM_LAYERS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, page_size=PAGE_SIZE, dtype="bfloat16"
)
CUDA = torch.device("cuda", 0)
BF16 = torch.bfloat16


def median_ms(call: Callable[[], object], repeats: int = 11) -> float:
    """Median time of one call, replayed from a graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    flush = torch.empty(256 << 20, dtype=torch.int8, device=CUDA)
    times = []
    for _ in range(repeats):
        flush.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def copy_gb_s() -> float:
    """Bytes read and written per second by a copy of 1 GiB."""
    source = torch.zeros(1 << 30, dtype=torch.int8, device=CUDA)
    target = torch.empty_like(source)
    return 2 * source.numel() / median_ms(lambda: target.copy_(source)) / 1e6


def make_pages(num_pages: int) -> tuple[Tensor, Tensor]:
    """Random KV of the last layer, in a pool of the real layout."""
    flat = torch.empty(num_pages * LAYOUT.page_elements, dtype=BF16, device=CUDA).normal_()
    host = layer_views(LAYOUT, 1, memoryview(bytearray(LAYOUT.page_bytes)))[NUM_LAYERS - 1]
    keys, values = (flat.as_strided((num_pages, *v.shape[1:]), v.stride(), v.storage_offset()) for v in host)
    return keys, values


def decode_row(batch: int, context: int, copy: float) -> str:
    """One line of the table."""
    pages = context // PAGE_SIZE
    needed = batch * pages * LAYOUT.page_bytes
    torch.cuda.empty_cache()  # what earlier lines used counts as taken
    name = f"decode  batch {batch:4}  context {context:6}"
    if needed > 0.8 * torch.cuda.mem_get_info()[0]:
        return f"{name}  needs {needed / 1e9:.0f} GB: left out"
    keys, values = make_pages(batch * pages)
    tables = torch.randperm(batch * pages, device=CUDA).view(batch, pages)
    query = torch.randn(batch, NUM_HEADS, HEAD_DIM, dtype=BF16, device=CUDA)
    starts, lens = torch.arange(batch + 1, device=CUDA), torch.full((batch,), context, device=CUDA)
    ms = median_ms(lambda: paged_attention(query, keys, values, tables, starts, lens, scale=HEAD_DIM**-0.5))
    speed = needed / NUM_LAYERS / ms / 1e6
    return f"{name}  {ms:8.3f} ms  {speed:7.0f} GB/s  {speed / copy:5.2f} of copy"


def prefill_row(num_tokens: int, context: int) -> str:
    """One line of the table: a chunk after `context` tokens; torch's kernel is timed for whole prompts only."""
    total = num_tokens + context
    keys, values = make_pages(total // PAGE_SIZE)
    table = torch.randperm(total // PAGE_SIZE, device=CUDA)[None]
    query = torch.randn(num_tokens, NUM_HEADS, HEAD_DIM, dtype=BF16, device=CUDA)
    starts, lens = torch.tensor([0, num_tokens], device=CUDA), torch.tensor([total], device=CUDA)
    ms = median_ms(lambda: paged_attention(query, keys, values, table, starts, lens, scale=HEAD_DIM**-0.5), 7)
    flops = 4 * NUM_HEADS * HEAD_DIM * num_tokens * (context + num_tokens / 2)
    line = f"prefill tokens {num_tokens:6}  context {context:6}  {ms:8.3f} ms  {flops / ms / 1e9:7.0f} TFLOP/s"
    if context:
        return line
    flat = query.transpose(0, 1)[None].contiguous()
    key, value = (torch.randn(1, NUM_KV_HEADS, total, HEAD_DIM, dtype=BF16, device=CUDA) for _ in range(2))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        theirs = median_ms(lambda: F.scaled_dot_product_attention(flat, key, value, is_causal=True, enable_gqa=True), 7)
    return f"{line}  {theirs / ms:5.2f} of torch"


def main() -> None:
    name = torch.cuda.get_device_name()
    copy = copy_gb_s()
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}, copy {copy:.0f} GB/s")
    print(f"bfloat16, {NUM_HEADS} heads on {NUM_KV_HEADS}, head dim {HEAD_DIM}, pages of {PAGE_SIZE} in random order")
    # Each at once: what was measured before the limit of time is told.
    for context, batch in itertools.product((1024, 8192, 32_768), (1, 16, 64, 256)):
        print(decode_row(batch, context, copy), flush=True)
    for num_tokens, context in ((1024, 0), (4096, 0), (16_384, 0), (2048, 30_720)):
        print(prefill_row(num_tokens, context), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
