"""What a GPU's engine does beside the GPU: graphs of padded batches and pages in another memory, on the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdserve import LLM, SamplingParams
from pdserve.core.errors import ConfigError
from pdserve.engine import device, graphs, runner
from pdserve.engine.build import build_core
from pdserve.engine.config import EngineConfig
from pdserve.engine.device import DevicePool, find_device
from pdserve.engine.graphs import graph_sizes
from pdserve.engine.kv_cache import PlainPool
from pdserve.engine.runner import ModelRunner
from pdserve.engine.step import ScheduledSequence, SchedulerOutput
from pdserve.kernels import reference
from pdserve.kernels.dispatch import Kernels
from tests.engine_model.models import FAMILIES, VOCAB_SIZE, make_model, save_model, served

GREEDY = SamplingParams(temperature=0.0, logprobs=1)
OPTIONS = {"page_size": 4, "num_pages": 64, "max_num_seqs": 6, "max_num_batched_tokens": 24, "dtype": "float32"}
PROMPTS = [[3 + i, *range(5, 5 + 3 * i)] for i in range(9)]


def paged_attention(
    query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, starts: Tensor, lens: Tensor, **options: object
) -> Tensor:
    """As the Triton kernel: zeros for a padded row."""
    if (num_live := int((lens > 0).sum())) == len(lens):
        return reference.paged_attention(query, keys, values, tables, starts, lens, **options)  # type: ignore[arg-type]
    assert starts.tolist() == list(range(len(lens) + 1)), "only decodes are padded"
    assert not lens[num_live:].any()
    output = query.new_zeros(query.shape[0], query.shape[1], values.shape[3])
    if num_live:
        live = (query[:num_live], keys, values, tables[:num_live], starts[: num_live + 1], lens[:num_live])
        output[:num_live] = reference.paged_attention(*live, **options)  # type: ignore[arg-type]
    return output


class StubCapture:
    """Graphs that compute anew on the memory that they saw."""

    def __init__(self, where: torch.device | None = None) -> None:
        self.sizes: list[int] = []
        self.replayed: list[int] = []

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        output = compute()
        self.sizes.append(len(output))

        def replay() -> Tensor:
            self.replayed.append(len(output))
            output.copy_(compute())
            return output

        return replay


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "kernels_for", lambda _: Kernels(reference.store_kv, paged_attention))


def decode(key: str, start: int, table: list[int], num: int = 1) -> ScheduledSequence:
    known = [(start + i * 7 + table[0]) % VOCAB_SIZE for i in range(start + num)]
    return ScheduledSequence(key, start, known[start:], table, GREEDY, 0, known, 1)


@pytest.mark.parametrize("name", ["llama", "gpt-oss: sinks, window, experts", "gemma4: wider heads in some layers"])
def test_padded_rows_change_no_result_and_write_no_page(name: str) -> None:
    loaded, num_pages = served(make_model(*FAMILIES[name])), 24
    layout = loaded.layout(4)
    pools = [PlainPool(layout, num_pages) for _ in range(2)]
    noise = torch.rand(num_pages * layout.page_elements, generator=torch.Generator().manual_seed(1))
    for pool in pools:
        pool.buffer[:] = noise.numpy().tobytes()
    eager, captured = (ModelRunner(loaded, layout, num_pages, pool) for pool in pools)
    capture = StubCapture()
    captured.use_graphs(capture, 6, 32)
    assert capture.sizes == [6, 4, 2, 1]
    assert pools[1].buffer == pools[0].buffer, "capturing wrote a page"
    rng = random.Random(5)
    for step in range(8):
        order = rng.sample(range(num_pages), num_pages)
        rows = []
        for i in range(rng.randint(1, 6)):
            start = rng.randint(0, 15)
            rows.append(decode(str(i), start, [order.pop() for _ in range(start // 4 + 1)]))
        output = SchedulerOutput(step, tuple(rows), len(rows))
        wanted, found = eager.execute(output), captured.execute(output)
        for theirs, ours in zip(wanted.sampled, found.sampled, strict=True):
            assert theirs.token_id == ours.token_id
            assert theirs.logprobs.chosen.logprob == pytest.approx(ours.logprobs.chosen.logprob, abs=1e-4)
        a, b = (torch.frombuffer(pool.buffer, dtype=torch.float32) for pool in pools)
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
        changed = (a != noise).nonzero().flatten() // layout.page_elements
        noise = a.clone()
        assert set(changed.tolist()) == {row.page_table[-1] for row in rows}
    assert all(n in (1, 2, 4, 6) for n in capture.replayed) and len(capture.replayed) == 8


def test_only_decodes_that_fit_are_graphs() -> None:
    loaded = served(make_model(*FAMILIES["llama"]))
    layout = loaded.layout(4)
    runs = ModelRunner(loaded, layout, 40, PlainPool(layout, 40))
    capture = StubCapture()
    runs.use_graphs(capture, 3, 16)

    def replays(*rows: ScheduledSequence) -> list[int]:
        before = len(capture.replayed)
        runs.execute(SchedulerOutput(1, rows, sum(len(row.token_ids) for row in rows)))
        return capture.replayed[before:]

    assert replays(decode("a", 3, [0])) == [1]
    assert replays(decode("a", 3, [0]), decode("b", 3, [1]), decode("c", 12, [2, 3, 4, 5])) == [3]
    assert replays(decode("a", 3, [0]), decode("b", 0, [1], 3)) == []
    assert replays(decode("a", 0, [1, 2], 5)) == []
    assert replays(*(decode(str(i), 3, [i]) for i in range(4))) == []
    assert replays(decode("a", 16, [0, 1, 2, 3, 4])) == []


def test_sizes_of_graphs() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(6) == [1, 2, 4, 6]
    assert graph_sizes(64) == [1, 2, 4, 8, 16, 32, 48, 64]
    assert graph_sizes(40) == [1, 2, 4, 8, 16, 32, 40]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    save_model("llama", directory)
    return directory


@pytest.mark.parametrize(
    "options", [{}, {"enforce_eager": True}, {"num_pages": 14, "swap_space_bytes": 1 << 20, "preemption_mode": "swap"}]
)
def test_an_engine_on_a_device_gives_the_tokens_of_the_cpu(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, object]
) -> None:
    made: list[StubCapture] = []
    monkeypatch.setattr(device, "find_device", lambda _: torch.device("cpu"))
    monkeypatch.setattr(graphs, "CudaCapture", lambda where: made.append(StubCapture(where)) or made[-1])
    sampling = [SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=9) for i in range(len(PROMPTS))]
    wanted = LLM(tiny, **OPTIONS).generate(PROMPTS, sampling)
    llm = LLM(tiny, device="cuda", **{**OPTIONS, **options})
    assert [c.token_ids for c in llm.generate(PROMPTS, sampling)] == [c.token_ids for c in wanted]
    assert bool(made) is not bool(options.get("enforce_eager"))
    assert all(capture.replayed for capture in made)


def fp8_kernels(pages_of: Callable[[Tensor], Tensor]) -> Kernels:
    """Rounds KV to e4m3 numbers; `pages_of` is the form in which the pages keep them."""

    def store(keys: Tensor, values: Tensor, key_pages: Tensor, value_pages: Tensor, slots: Tensor) -> None:
        rounded = (x.clamp(-448, 448).to(torch.float8_e4m3fn) for x in (keys, values))
        reference.store_kv(*(pages_of(x) for x in (*rounded, key_pages, value_pages)), slots)

    def attend(query: Tensor, keys: Tensor, values: Tensor, *others: Tensor, **options: object) -> Tensor:
        return paged_attention(query, keys.to(query.dtype), values.to(query.dtype), *others, **options)

    return Kernels(store, attend)


def test_kv_of_8_bits_takes_half_and_is_what_the_kernels_read(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "find_device", lambda _: torch.device("cpu"))
    options = {**OPTIONS, "device": "cuda", "enforce_eager": True, "dtype": "bfloat16"}
    greedy = SamplingParams(temperature=0.0, max_tokens=9)
    monkeypatch.setattr(runner, "kernels_for", lambda _: fp8_kernels(lambda x: x.bfloat16() if x.itemsize == 1 else x))
    wanted = LLM(tiny, **options).generate(PROMPTS, greedy)
    monkeypatch.setattr(runner, "kernels_for", lambda _: fp8_kernels(lambda x: x.view(torch.uint8)))
    found = LLM(tiny, kv_cache_dtype="fp8_e4m3", **options).generate(PROMPTS, greedy)
    assert [c.token_ids for c in found] == [c.token_ids for c in wanted]
    options |= {"num_pages": None, "kv_cache_memory_bytes": 1 << 17}
    sizes = [
        build_core(EngineConfig(model=str(tiny), kv_cache_dtype=kind, **options), PlainPool).num_pages
        for kind in ("auto", "fp8_e4m3")
    ]
    assert sizes[1] // 2 == sizes[0]


@pytest.mark.parametrize(
    ("others", "names"),
    [
        ({}, "it needs --device cuda"),
        ({"device": "cpu"}, "it needs --device cuda"),
        ({"device": "cuda", "runner": "fake"}, "--runner model"),
        ({"device": "cuda", "dtype": "float32"}, "--dtype is 'float32'"),
    ],
)
def test_kv_of_8_bits_is_refused_where_no_kernel_reads_it(others: dict[str, str], names: str) -> None:
    with pytest.raises(ConfigError, match=f"--kv-cache-dtype is 'fp8_e4m3'.*{names}"):
        EngineConfig(kv_cache_dtype="fp8_e4m3", **others)


def test_where_there_is_no_gpu_it_is_said_before_the_model_is_touched(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("it is the refusal of a machine without a GPU that is tested, and here is one")
    with pytest.raises(ConfigError, match="--device is 'cuda', but torch"):
        build_core(EngineConfig(model=str(tmp_path), device="cuda"), PlainPool)
    assert find_device("auto") == find_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="--enforce-eager needs --device cuda"):
        EngineConfig(enforce_eager=True)


def test_a_pool_in_device_memory_has_the_layout_of_one_in_host_memory() -> None:
    loaded = served(make_model(*FAMILIES["gemma4: wider heads in some layers"]))
    layout = loaded.layout(4)
    pool, memory = DevicePool(layout, 3, torch.device("cpu")), PlainPool(layout, 3)
    for at, views in enumerate(pool.views().values()):
        views.keys.fill_(at + 1)
        views.values.fill_(-at - 1)
    memory.buffer[:] = pool.pages.numpy().tobytes()
    for layer, views in runner.layer_views(layout, 3, memory.buffer).items():
        assert torch.equal(views.keys, pool.views()[layer].keys)
        assert torch.equal(views.values, pool.views()[layer].values)
