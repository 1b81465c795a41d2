"""All layers of a decoder in one compiled call. The structures are those of `csrc/decoder.h`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from pdserve.kernels.cpu import library
from pdserve.kernels.cpu.arguments import are_indices, are_rows, require
from pdserve.kernels.cpu.linear import PackedLinear

_NO_MEMORY = -1


class _Packed(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weights", "scales", "bias")),
        *((name, ctypes.c_int64) for name in ("in", "out")),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("attention_norm", "query_norm", "key_norm", "mlp_norm")),
        *((name, ctypes.c_void_p) for name in ("key_pages", "value_pages")),
        ("window", ctypes.c_int64),
        *((name, _Packed) for name in ("qkv", "out", "gate_up", "down")),
    ]


class _Decoder(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("layers", "norm", "rotation", "positions")),
        *((name, ctypes.c_void_p) for name in ("page_tables", "query_starts", "kv_lens", "slots", "rows")),
        *((name, ctypes.c_void_p) for name in ("hidden", "answer", "normed", "kept", "delta", "heads", "attended")),
        *((name, ctypes.c_void_p) for name in ("gate_up", "gated", "workspace")),
        *((name, ctypes.c_int64) for name in ("num_layers", "num_tokens", "num_rows", "num_seqs", "max_pages")),
        *((name, ctypes.c_int64) for name in ("table_stride", "num_pages", "page_size", "num_heads", "num_kv_heads")),
        *((name, ctypes.c_int64) for name in ("head_dim", "hidden_size", "intermediate_size")),
        *((name, ctypes.c_int64) for name in ("k_stride_page", "k_stride_head", "k_stride_token")),
        *((name, ctypes.c_int64) for name in ("v_stride_page", "v_stride_head", "v_stride_token")),
        *((name, ctypes.c_float) for name in ("epsilon", "scale")),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """Weights of a layer.

    Attributes:
        attention_norm: `[hidden]`.
        query_norm: `[head_dim]`, or None.
        key_norm: `[head_dim]`, or None, as `query_norm`.
        mlp_norm: `[hidden]`.
        window: Tokens that a token sees, itself included; None: all.
        qkv: To `(num_heads + 2 num_kv_heads) head_dim`.
        out: From `num_heads head_dim`.
        gate_up: To twice the intermediate size.
        down: From it.
    """

    attention_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    mlp_norm: Tensor
    window: int | None
    qkv: PackedLinear
    out: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True)
class DecoderStep:
    """What one pass reads, all int64; see `reference.paged_attention` and `reference.store_kv`.

    Attributes:
        page_tables: `[num_seqs, max_pages]`.
        query_starts: `[num_seqs + 1]`.
        kv_lens: `[num_seqs]`.
        slots: `[num_tokens]`.
        rows: `[num_rows]`, the tokens whose answer is wanted.
    """

    page_tables: Tensor
    query_starts: Tensor
    kv_lens: Tensor
    slots: Tensor
    rows: Tensor


class CompiledDecoder:
    """The layers over the pages of one pool.

    Args:
        layers: Weights.
        pages: Of each layer `[num_pages, num_kv_heads, page_size, head_dim]` of keys and of values, in strides that all
            layers share.
        norm: `[hidden]`, after the last layer.
        num_heads: Query heads.
        epsilon: Of every norm.
        scale: Of the scores.

    Raises:
        ValueError: Shapes, types or strides do not fit together.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        pages: Sequence[tuple[Tensor, Tensor]],
        norm: Tensor,
        *,
        num_heads: int,
        epsilon: float,
        scale: float,
    ) -> None:
        self._norm, self._kept = norm, (tuple(layers), tuple(pages))  # C keeps addresses of their memory
        keys, values = pages[0]
        self._num_pages, self._num_kv_heads, self._page_size, self._head_dim = keys.shape
        self._num_heads = num_heads
        self._strides = (*keys.stride()[:3], *values.stride()[:3])
        self._hidden_size, self._intermediate_size = norm.shape[0], layers[0].down.num_in
        for layer, (k, v) in zip(layers, pages, strict=True):
            self._check(layer, k, v)
        self._layers = (_Layer * len(layers))(*(_layer(*both) for both in zip(layers, pages, strict=True)))
        linears = [f for layer in layers for f in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        self._workspace_per_row = max(f.workspace_per_row for f in linears)
        strides = (f"{of}_stride_{along}" for of in "kv" for along in ("page", "head", "token"))
        self._sizes = {
            **dict(zip(strides, self._strides, strict=True)),
            "num_layers": len(layers),
            "num_pages": self._num_pages,
            "page_size": self._page_size,
            "num_heads": num_heads,
            "num_kv_heads": self._num_kv_heads,
            "head_dim": self._head_dim,
            "hidden_size": self._hidden_size,
            "intermediate_size": self._intermediate_size,
            "epsilon": epsilon,
            "scale": scale,
        }
        self._function = library.load().pdserve_decoder

    def __call__(self, hidden: Tensor, rotation: Tensor, step: DecoderStep) -> Tensor:
        """One pass.

        Args:
            hidden: `[num_tokens, hidden]`, embeddings; overwritten.
            rotation: `[num_tokens, head_dim]`, cosines and sines of each token's angles.
            step: The step.

        Returns:
            `[num_rows, hidden]`, normed.

        Raises:
            ValueError: Shapes do not fit together.
            IndexError: Lengths do not fit together, or a page, slot or row does not exist.
            MemoryError: Attention found no memory to work in.
        """
        num_tokens, num_rows = hidden.shape[0], step.rows.shape[0]
        num_seqs, max_pages = step.page_tables.shape
        indices = step.page_tables, step.query_starts, step.kv_lens, step.slots, step.rows
        require(
            are_rows(hidden, rotation)
            and are_indices(*indices)
            and hidden.is_contiguous()
            and rotation.is_contiguous()
            and step.rows.dim() == 1
            and hidden.shape == (num_tokens, self._hidden_size)
            and rotation.shape == (num_tokens, self._head_dim)
            and step.query_starts.shape == (num_seqs + 1,)
            and step.kv_lens.shape == (num_seqs,)
            and step.slots.shape == (num_tokens,),
            "hidden states, rotation and step",
        )
        answer = hidden.new_empty(num_rows, self._hidden_size)
        most, heads = max(num_tokens, num_rows), self._num_heads + 2 * self._num_kv_heads
        widths = {
            **dict.fromkeys(("normed", "kept", "delta"), self._hidden_size),
            "heads": heads * self._head_dim,
            "attended": self._num_heads * self._head_dim,
            "gate_up": 2 * self._intermediate_size,
            "gated": self._intermediate_size,
        }
        scratch = {name: hidden.new_empty(most * width) for name, width in widths.items()}
        scratch["workspace"] = hidden.new_empty(most * self._workspace_per_row, dtype=torch.uint8)
        tensors = {"norm": self._norm, "rotation": rotation, "positions": torch.arange(num_tokens)}
        tensors |= {"hidden": hidden, "answer": answer, **scratch}
        tensors |= {f.name: getattr(step, f.name) for f in fields(step)}
        arguments = _Decoder(
            layers=ctypes.addressof(self._layers),
            **{name: tensor.data_ptr() for name, tensor in tensors.items()},
            num_tokens=num_tokens,
            num_rows=num_rows,
            num_seqs=num_seqs,
            max_pages=max_pages,
            table_stride=step.page_tables.stride(0),
            **self._sizes,
        )
        if status := self._function(ctypes.byref(arguments)):
            if status == _NO_MEMORY:
                raise MemoryError("attention found no memory to work in")
            raise IndexError("lengths of sequences do not fit together, or a page, slot or row does not exist")
        return answer

    def _check(self, layer: DecoderLayer, keys: Tensor, values: Tensor) -> None:
        shape = (self._num_pages, self._num_kv_heads, self._page_size, self._head_dim)
        hidden, inner, heads = self._hidden_size, self._intermediate_size, self._num_heads
        norms = [layer.attention_norm, layer.mlp_norm, self._norm]
        head_norms = [n for n in (layer.query_norm, layer.key_norm) if n is not None]
        sizes = (
            (layer.qkv, hidden, (heads + 2 * self._num_kv_heads) * self._head_dim),
            (layer.out, heads * self._head_dim, hidden),
            (layer.gate_up, hidden, 2 * inner),
            (layer.down, inner, hidden),
        )
        require(
            are_rows(keys, values, *norms, *head_norms)
            and keys.shape == values.shape == shape
            and (*keys.stride()[:3], *values.stride()[:3]) == self._strides
            and all(n.shape == (hidden,) for n in norms)
            and all(n.shape == (self._head_dim,) for n in head_norms)
            and len(head_norms) in (0, 2)
            and all((f.num_in, f.num_out) == (num_in, num_out) for f, num_in, num_out in sizes)
            and (layer.window is None or layer.window > 0)
            and min(heads, self._num_kv_heads, self._page_size, self._head_dim) > 0
            and heads % self._num_kv_heads == 0
            and self._head_dim % 2 == 0,
            "weights and pages",
        )


def _layer(layer: DecoderLayer, pages: tuple[Tensor, Tensor]) -> _Layer:
    def pointer(weight: Tensor | None) -> int | None:
        return None if weight is None else weight.data_ptr()

    return _Layer(
        *map(pointer, (layer.attention_norm, layer.query_norm, layer.key_norm, layer.mlp_norm, *pages)),
        layer.window or 0,
        *(_Packed(*f.pointers, f.num_in, f.num_out) for f in (layer.qkv, layer.out, layer.gate_up, layer.down)),
    )
