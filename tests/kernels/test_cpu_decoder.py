"""All layers in one call: what is refused. Its bits are those of the kernels: tests/engine_model/test_lean.py."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch

from pdserve.kernels.cpu import decoder, library
from pdserve.kernels.cpu.decoder import CompiledDecoder, DecoderLayer, DecoderStep
from pdserve.kernels.cpu.linear import PackedLinear

pytestmark = pytest.mark.usefixtures("compiled_kernels")
HIDDEN, INNER, HEADS, KV_HEADS, DIM, PAGES, PAGE_SIZE = 12, 20, 4, 2, 6, 5, 4


def layer() -> DecoderLayer:
    return DecoderLayer(
        attention_norm=torch.ones(HIDDEN),
        query_norm=None,
        key_norm=None,
        mlp_norm=torch.ones(HIDDEN),
        window=None,
        qkv=PackedLinear.pack(torch.randn((HEADS + 2 * KV_HEADS) * DIM, HIDDEN)),
        out=PackedLinear.pack(torch.randn(HIDDEN, HEADS * DIM)),
        gate_up=PackedLinear.pack(torch.randn(2 * INNER, HIDDEN)),
        down=PackedLinear.pack(torch.randn(HIDDEN, INNER)),
    )


def pages() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(PAGES, KV_HEADS, PAGE_SIZE, DIM), torch.zeros(PAGES, KV_HEADS, PAGE_SIZE, DIM)


def make(*layers: DecoderLayer, memory: list[tuple[torch.Tensor, torch.Tensor]] | None = None) -> CompiledDecoder:
    memory = memory or [pages() for _ in layers]
    return CompiledDecoder(layers, memory, torch.ones(HIDDEN), num_heads=HEADS, epsilon=1e-6, scale=1.0)


def step(**other: list[int] | list[list[int]]) -> DecoderStep:
    """A prompt of three tokens in page 1."""
    given = {"page_tables": [[1]], "query_starts": [0, 3], "kv_lens": [3], "slots": [4, 5, 6], "rows": [2]}
    return DecoderStep(**{name: torch.tensor(value) for name, value in (given | other).items()})


def test_the_structures_have_the_compilers_sizes() -> None:
    assert ctypes.sizeof(decoder._Decoder) == library.load().pdserve_decoder_bytes()
    assert ctypes.sizeof(decoder._Layer) == library.load().pdserve_layer_bytes()


@pytest.mark.parametrize(
    "other",
    [
        {"rows": [3]},
        {"rows": [-1]},
        {"slots": [4, 5, PAGES * PAGE_SIZE]},
        {"slots": [4, -2, 6]},
        {"page_tables": [[PAGES]]},
        {"page_tables": [[-1]]},
        {"kv_lens": [2]},
        {"kv_lens": [PAGE_SIZE + 1]},
        {"query_starts": [0, 2]},
        {"query_starts": [1, 3]},
    ],
)
def test_what_does_not_exist_is_refused(other: dict[str, list[int]]) -> None:
    run = make(layer(), layer())
    assert run(torch.randn(3, HIDDEN), torch.ones(3, DIM), step()).isfinite().all()
    with pytest.raises(IndexError, match="does not exist"):
        run(torch.randn(3, HIDDEN), torch.ones(3, DIM), step(**other))


def test_shapes_that_do_not_fit_are_refused() -> None:
    run = make(layer())
    for hidden, rotation, said in (
        (torch.randn(3, HIDDEN + 1), torch.ones(3, DIM), step()),
        (torch.randn(3, HIDDEN).double(), torch.ones(3, DIM), step()),
        (torch.randn(HIDDEN, 3).T, torch.ones(3, DIM), step()),
        (torch.randn(3, HIDDEN), torch.ones(2, DIM), step()),
        (torch.randn(3, HIDDEN), torch.ones(3, DIM), step(slots=[4, 5])),
        (torch.randn(3, HIDDEN), torch.ones(3, DIM), step(kv_lens=[3, 3])),
        (torch.randn(3, HIDDEN), torch.ones(3, DIM), step(query_starts=[0, 3, 3])),
        (torch.randn(3, HIDDEN), torch.ones(3, DIM), step(rows=[[0, 1], [1, 2]])),
    ):
        with pytest.raises(ValueError, match="hidden states, rotation and step"):
            run(hidden, rotation, said)


def test_weights_and_pages_that_do_not_fit_are_refused() -> None:
    wide = PackedLinear.pack(torch.randn(HIDDEN, INNER + 1))
    keys, values = pages()
    wrong = PackedLinear.pack(torch.randn(2 * INNER, HIDDEN))  # gate and up alone may be it
    for one, memory in (
        (replace(layer(), down=wide), None),
        (replace(layer(), out=layer().down), None),
        (replace(layer(), qkv=wrong, gate_up=wrong), None),
        (replace(layer(), mlp_norm=torch.ones(HIDDEN + 1)), None),
        (replace(layer(), query_norm=torch.ones(DIM)), None),
        (replace(layer(), query_norm=torch.ones(DIM), key_norm=torch.ones(DIM + 1)), None),
        (replace(layer(), window=0), None),
        (layer(), [(keys, values[:, :1])]),
        (layer(), [(keys.half(), values.half())]),
        (layer(), [(keys[:, :, :0], values[:, :, :0])]),
        (layer(), [(keys[:, :0], values[:, :0])]),
    ):
        with pytest.raises(ValueError, match="weights and pages"):
            make(one, memory=memory)
    with pytest.raises(ValueError, match="weights and pages"):  # of other strides than the first
        make(layer(), layer(), memory=[pages(), (keys.mT.contiguous().mT, values)])
