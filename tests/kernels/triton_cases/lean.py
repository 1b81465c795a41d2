"""The lean definition over Triton's kernels, beside transformers' model in float64."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor

from pdserve.core.layout import KVLayout, LayerGroup
from pdserve.engine.attention import PagedContext
from pdserve.engine.device import DevicePool
from pdserve.engine.forward_batch import build_batch
from pdserve.engine.models import lean as definition
from pdserve.engine.models.linear import TorchLinear
from pdserve.engine.models.spec import LeanSpec, read_spec
from pdserve.engine.models.weights import WeightFiles
from pdserve.engine.step import ScheduledSequence, SchedulerOutput
from pdserve.kernels import fused, gpu
from pdserve.kernels.dispatch import FusedKernels, Kernels
from tests.kernels.triton_cases.device import is_gpu, profile, where
from tests.kernels.triton_cases.pools import NAMES
from tests.kernels.triton_cases.report import Outcome, compare

PAGE_SIZE, VOCAB_SIZE = 16, 50
PAGES = ((3, 0), (1, 2))
STEPS = ((17, 5), (1, 1), (2, 1))  # chunks of both sequences, decodes alone, a chunk beside a decode
LIMITS = {torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 3e-1}  # of the spread of the logits


def lean() -> list[Outcome]:
    """Llama in each type; Qwen3, whose queries and keys are normalised."""
    kinds = [("LlamaConfig", torch.float32), ("Qwen3Config", torch.float32), ("LlamaConfig", torch.float16)]
    return [_lean(*kind) for kind in [*kinds, *([("LlamaConfig", torch.bfloat16)] if is_gpu() else [])]]


def _lean(kind: str, dtype: torch.dtype) -> Outcome:
    torch.manual_seed(6)
    config = getattr(transformers, kind)(
        **{"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64},
        **{"initializer_range": 0.2, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
    )
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter) * 0.3)
    triton = FusedKernels(fused.rms_norm, fused.rotate, fused.silu_mul)
    with tempfile.TemporaryDirectory() as name, patch.object(definition, "fused_for", lambda where: triton):
        model.save_pretrained(name)
        spec = read_spec(Path(name))
        with WeightFiles(Path(name)) as files:
            ours = definition.LeanModel(spec, files, TorchLinear, dtype, where())
    known = [
        [(at * 31 + i * 17 + 5) % VOCAB_SIZE for i in range(sum(sizes))]
        for at, sizes in enumerate(zip(*STEPS, strict=True))
    ]
    expected = torch.cat([model.double()(torch.tensor([tokens])).logits[0] for tokens in known])
    actual = _over_pages(ours, spec, known, dtype)
    spread = expected.std()
    name = f"lean {kind.removesuffix('Config')} {NAMES[dtype]}"
    return compare(name, actual.double() / spread, expected / spread, LIMITS[dtype])


def _over_pages(model: definition.LeanModel, spec: LeanSpec, known: list[list[int]], dtype: torch.dtype) -> Tensor:
    """Logits of all tokens of the first sequence, then of the second."""
    group = LayerGroup(tuple(range(spec.num_layers)), spec.num_kv_heads, spec.head_dim, spec.head_dim)
    layout = KVLayout(PAGE_SIZE, NAMES[dtype], (group,))
    pages = DevicePool(layout, 4, where()).views()
    kernels = Kernels(gpu.store_kv, lambda *tensors, **options: gpu.attend(*tensors, profile(), **options))
    rows: tuple[list[Tensor], list[Tensor]] = ([], [])
    done = [0, 0]
    for sizes in STEPS:
        sequences = tuple(
            ScheduledSequence(str(i), done[i], known[i][done[i] : done[i] + n], PAGES[i], None, 0, known[i], 0)
            for i, n in enumerate(sizes)
        )
        batch = build_batch(SchedulerOutput(0, sequences, sum(sizes)), PAGE_SIZE).to(where())
        logits = model(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None],
            logits_to_keep=torch.arange(sum(sizes), device=where()),
            pdserve=PagedContext(batch, pages, kernels),
        ).logits[0]
        for i, part in enumerate(torch.split(logits.cpu(), list(sizes))):
            rows[i].append(part)
            done[i] += sizes[i]
    return torch.cat((*rows[0], *rows[1]))
