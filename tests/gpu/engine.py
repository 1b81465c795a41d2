"""The engine on the GPU at hand: step times of a Llama-8B shape with and without CUDA graphs, and a hand-off of KV
pages between two processes. Random weights; nothing is downloaded.

    python -m tests.gpu.engine steps|pair [--cpu]      --cpu: the same code on tiny shapes, where there is no GPU

It needs torch, Triton and transformers, and none of the servers' other dependencies.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import multiprocessing
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor

if importlib.util.find_spec("xxhash") is None:  # any checksum will do here
    sys.modules["xxhash"] = stand_in = types.ModuleType("xxhash")
    stand_in.xxh3_64_intdigest = lambda data: int.from_bytes(  # type: ignore[attr-defined]
        hashlib.blake2b(data, digest_size=8).digest(), "big"
    )

from pdserve.core.request import Request
from pdserve.core.sampling import SamplingParams
from pdserve.engine.chunks import SchedulerLimits
from pdserve.engine.device import DevicePool
from pdserve.engine.engine_core import EngineCore
from pdserve.engine.graphs import CudaCapture
from pdserve.engine.kv_cache import PlainPool
from pdserve.engine.loader import LoadedModel, prepare_model
from pdserve.engine.models.lean import LeanModel
from pdserve.engine.models.linear import TorchLinear
from pdserve.engine.models.spec import NotLean, read_spec
from pdserve.engine.models.weights import WeightFiles
from pdserve.engine.page_pool import PagePool
from pdserve.engine.prefix_cache import PrefixCache
from pdserve.engine.runner import ModelRunner
from pdserve.engine.step import (
    Activate,
    Add,
    Command,
    Event,
    PagesReady,
    ReleaseLease,
    Reserve,
    Reserved,
    ScheduledSequence,
    SchedulerOutput,
    SequenceFailed,
    TokensSampled,
)

GREEDY = SamplingParams(temperature=0.0)
PAGE_SIZE, WAIT_S = 32, 100.0
LEAN_BYTES = 48 << 30
LLAMA_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
SMALL = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
}


def random_llama(shape: dict[str, Any], dtype: str, made_on: torch.device) -> Any:
    """The same weights in every process that makes them on the same kind of device."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**shape, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    with made_on:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    return model.eval()


# ---- steps ----------------------------------------------------------------------------------------------------------


def steps(where: torch.device, is_dry: bool) -> int:
    """Times of steps; fails when graphs give other tokens than launches."""
    shape, dtype = (SMALL, "float32") if is_dry else (LLAMA_8B, "bfloat16")
    batches, context = ((1, 3), 64) if is_dry else ((1, 8, 16, 64), 1024)
    model = random_llama(shape, dtype, where)
    loaded = prepare_model(model, dtype, "random")
    layout = loaded.layout(PAGE_SIZE)
    num_pages = batches[-1] * (context // PAGE_SIZE + 1)
    pool = DevicePool(layout, num_pages, where)

    def runner(of: LoadedModel) -> ModelRunner:
        return ModelRunner(of, layout, num_pages, PlainPool(layout, 1), device_pool=pool)

    first = runner(loaded)
    for at in range(batches[-1]):  # each context is computed, in one chunk
        first.execute(SchedulerOutput(0, (_row(at, 0, context, shape["vocab_size"]),), context))
    print(f"steps {dtype}, {shape['num_hidden_layers']} layers of {shape['hidden_size']}, context {context}")
    bad = 0
    for name, of in {"modules": loaded, **_lean(loaded, model, where)}.items():
        eager, graphs = runner(of), runner(of)
        began = time.perf_counter()
        # No wider than the batches: as many splits of the KV as without graphs, so that no token differs by rounding.
        graphs.use_graphs((lambda compute: compute) if is_dry else CudaCapture(where), batches[-1], context + 1)
        print(f"{name}: graphs captured in {time.perf_counter() - began:.1f} s")
        for batch in batches:
            rows = tuple(_row(at, context, 1, shape["vocab_size"]) for at in range(batch))
            bad += not _decodes(name, batch, eager, graphs, SchedulerOutput(1, rows, batch))
        chunk, _ = _timed(eager, SchedulerOutput(1, (_row(0, 0, context, shape["vocab_size"]),), context))
        print(f"prefill {name:7}  tokens {context}  {chunk:8.2f} ms")
    return 1 if bad else 0


def _decodes(name: str, batch: int, eager: ModelRunner, graphs: ModelRunner, output: SchedulerOutput) -> bool:
    (plain, theirs), (captured, ours) = (_timed(runner, output) for runner in (eager, graphs))
    equal = sum(a == b for a, b in zip(theirs, ours, strict=True))
    # A 16-bit tie may fall the other way; a wrong graph has hardly any token right.
    is_good = equal >= 0.75 * batch
    print(
        f"decode  {name:7}  batch {batch:4}  eager {plain:8.2f} ms  graphs {captured:8.2f} ms  "
        f"{plain / captured:5.2f} x  equal tokens {equal}/{batch}{'' if is_good else '  BAD'}"
    )
    return is_good


class _Weights:
    """Stands for the files of a model: its tensors, where they are."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def types(self) -> dict[str, str]:
        kinds = {torch.float32: "F32", torch.bfloat16: "BF16"}
        return {name: kinds[tensor.dtype] for name, tensor in self._tensors.items()}

    def rows(self, names: Sequence[str], dtype: torch.dtype) -> Tensor:
        parts = [self._tensors[name].to(dtype) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _lean(loaded: LoadedModel, model: Any, where: torch.device) -> dict[str, LoadedModel]:
    """The same weights by the lean definition, where there is room for them twice."""
    if where.type == "cuda" and torch.cuda.get_device_properties(where).total_memory < LEAN_BYTES:
        print(f"lean: not measured, the GPU has less than {LEAN_BYTES >> 30} GiB")
        return {}
    with tempfile.TemporaryDirectory() as name:
        model.config.save_pretrained(name)
        try:
            spec = read_spec(Path(name))
        except NotLean as e:
            print(f"lean: not measured, {e}")
            return {}
    weights = cast(WeightFiles, _Weights(model.state_dict()))
    lean = LeanModel(spec, weights, TorchLinear, getattr(torch, loaded.dtype), where)
    return {"lean": replace(loaded, model=lean)}


def _row(at: int, start: int, num: int, vocab_size: int) -> ScheduledSequence:
    width = -(-(start + num) // PAGE_SIZE)
    known = [(at * 31 + i * 17 + 5) % vocab_size for i in range(start + num)]
    table = [at * width + i for i in range(width)] if start else [at * (num // PAGE_SIZE + 1) + i for i in range(width)]
    return ScheduledSequence(str(at), start, known[start:], table, GREEDY, 0, known, len(known))


def _timed(runner: ModelRunner, output: SchedulerOutput, repeats: int = 15) -> tuple[float, list[int]]:
    """Median milliseconds of a step, its sampling and fence included, and its tokens."""
    runner.execute(output)
    times, tokens = [], list[int]()
    for _ in range(repeats):
        began = time.perf_counter()
        result = runner.execute(output)
        times.append(time.perf_counter() - began)
        tokens = [getattr(s, "token_id", -1) for s in result.sampled]
    return statistics.median(times) * 1000, tokens


# ---- pair -----------------------------------------------------------------------------------------------------------

NUM_TOKENS, NUM_PAGES, DIGEST = 24, 128, b"tests.gpu.engine" * 2
PROMPTS = [[(7 * i + 13 * j) % SMALL["vocab_size"] for j in range(n)] for i, n in enumerate((1, 31, 32, 33, 200, 417))]


def _worker(where: torch.device) -> tuple[EngineCore, Any]:
    """An engine with pages on the device, and its host pages."""
    from pdserve.kvtransfer.pool import KvPool

    loaded: LoadedModel = prepare_model(
        random_llama(SMALL, "float32", torch.device("cpu")).to(where), "float32", "random"
    )
    layout = loaded.layout(PAGE_SIZE)
    device, host, pages = DevicePool(layout, NUM_PAGES, where), KvPool(layout, NUM_PAGES), PagePool(NUM_PAGES)
    runner = ModelRunner(loaded, layout, NUM_PAGES, host, device_pool=device)
    if where.type == "cuda":
        runner.use_graphs(CudaCapture(where), 8, 1024)
    limits = SchedulerLimits(page_size=PAGE_SIZE, max_num_seqs=8, max_num_batched_tokens=96, max_model_len=1024)
    return EngineCore(limits, pages, runner, cache=PrefixCache(pages, PAGE_SIZE), staging=device.staging(host)), host


def _requests() -> list[Request]:
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return [Request(key=str(i), prompt_token_ids=tuple(p), sampling=sampling, eos_token_ids=frozenset(), arrival_s=0.0)
            for i, p in enumerate(PROMPTS)]  # fmt: skip


def _run(core: EngineCore, commands: list[Command]) -> list[Event]:
    """Events until nothing is left to compute."""
    events: list[Event] = []
    core.begin_step(commands)
    while (step := core.step(0.0)).num_tokens:
        events += step.events
        core.begin_step([])
    events += step.events
    if failed := [e for e in events if isinstance(e, SequenceFailed)]:
        raise RuntimeError(failed[0].message)
    core.check()
    return events


def _receive(conn: Connection) -> Any:
    if not conn.poll(WAIT_S):
        raise TimeoutError(f"nothing came from the other process within {WAIT_S:g} s")
    return conn.recv()


def prefill_process(where: torch.device, to_decode: Connection) -> None:
    """Computes the prompts, publishes their pages, and waits until they were read."""
    import xxhash

    from pdserve.kvtransfer.tcp_source import TcpPageSource
    from pdserve.kvtransfer.transport import SourcePageRef

    core, host = _worker(where)
    source = TcpPageSource(host, DIGEST)
    token = source.new_reader()
    events = _run(core, [Add(r, handoff=True, reserved=True) for r in _requests()])
    first = {e.key: e.token_ids[0] for e in events if isinstance(e, TokensSampled)}
    for key, token_id in first.items():
        refs = [
            SourcePageRef(ref.page_id, ref.generation, xxhash.xxh3_64_intdigest(host.page(ref.page_id)))
            for event in events
            if isinstance(event, PagesReady) and event.key == key
            for ref in event.pages
        ]
        source.publish(key, token, refs)
        to_decode.send((key, token_id, source.address, token, refs))
    _receive(to_decode)
    _run(core, [ReleaseLease(key) for key in first])
    source.close()


def decode_process(where: torch.device, from_prefill: Connection, result: Connection) -> None:
    """Reserves, pulls, and generates."""
    from pdserve.kvtransfer.tcp import TcpPageSink

    core, host = _worker(where)
    requests = _requests()
    places = {e.key: e.pages for e in _run(core, [Reserve(r, WAIT_S) for r in requests]) if isinstance(e, Reserved)}

    async def pull_all() -> list[Command]:
        sink, commands = TcpPageSink(host, DIGEST), list[Command]()
        for _ in requests:
            key, token_id, address, token, refs = _receive(from_prefill)
            await sink.pull(address, token, key, refs, [ref.page_id for ref in places[key]])
            commands.append(Activate(key, token_id))
        await sink.close()
        return commands

    commands = asyncio.run(pull_all())
    from_prefill.send("read")
    tokens = {c.key: [c.token_id] for c in commands if isinstance(c, Activate)}
    for event in _run(core, commands):
        if isinstance(event, TokensSampled):
            tokens[event.key] += event.token_ids
    result.send(tokens)


def pair(where: torch.device, is_dry: bool) -> int:
    """Prefill in one process and decode in another give the tokens of transformers' generate, in float32."""
    del is_dry
    spawn = multiprocessing.get_context("spawn")
    (here, there), (ours, theirs) = spawn.Pipe(), spawn.Pipe()
    processes = [
        spawn.Process(target=prefill_process, args=(where, here), daemon=True),
        spawn.Process(target=decode_process, args=(where, there, theirs), daemon=True),
    ]
    for process in processes:
        process.start()
    for conn in (here, there, theirs):
        conn.close()  # so that the end of a process is the end of its pipe
    model, bad = random_llama(SMALL, "float32", torch.device("cpu")).to(where), 0
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device=where)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
        )
        expected.append(out[0, len(prompt) :].tolist())
    try:
        tokens = _receive(ours)
    except EOFError:
        print("pair  BAD: a process ended before it had an answer; see above")
        return 1
    for i, wanted in enumerate(expected):
        is_good = tokens[str(i)] == wanted
        bad += not is_good
        print(f"pair  prompt of {len(PROMPTS[i]):4}  {'ok' if is_good else f'BAD: {tokens[str(i)]}, not {wanted}'}")
    for process in processes:
        process.join(WAIT_S)
        bad += process.exitcode != 0
    return 1 if bad else 0


def main(words: list[str]) -> int:
    is_dry = "--cpu" in words
    where = torch.device("cpu") if is_dry else torch.device("cuda", 0)
    part = {"steps": steps, "pair": pair}[words[0]]
    with torch.inference_mode():
        return part(where, is_dry)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
