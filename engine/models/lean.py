"""The lean definition: Llama, Qwen2, Qwen3 and Mistral without modules, from weight files alone.

Query, key and value are one linear, gate and up another. What a part adds to the residual stream is summed by the norm
that follows it: `hidden += delta; normed = norm(hidden)` is one kernel.

Where everything is compiled for the CPU, all layers are one call (`kernels.cpu.decoder`), with the same bits. On a GPU
its kernels are Triton's and its linears torch's, and its steps can be captured: shapes alone say what is launched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pdserve.engine.attention import AttentionContext, AttentionOptions, PagedContext
from pdserve.engine.kv_cache import LayerPages
from pdserve.engine.models.linear import Linear, MakeLinear, TorchLinear
from pdserve.engine.models.spec import LeanSpec, NotLean
from pdserve.engine.models.weights import WeightFiles
from pdserve.kernels.cpu.attention import paged_attention as compiled_attention
from pdserve.kernels.cpu.attention import store_kv as compiled_store
from pdserve.kernels.cpu.decoder import CompiledDecoder, DecoderLayer, DecoderStep
from pdserve.kernels.cpu.linear import PackedLinear
from pdserve.kernels.dispatch import fused_for

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_CPU = torch.device("cpu")


class Logits(NamedTuple):
    """What a call of the model gives, as transformers' models do.

    Attributes:
        logits: `[1, num_rows, vocab_size]`.
    """

    logits: Tensor


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    options: AttentionOptions
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class _Rotation(NamedTuple):
    """Cosines and sines of the tokens' angles, a row of `table` for each token: tables of all positions would be large
    for models that know many.
    """

    rows: Tensor
    table: Tensor


class LeanModel:
    """A causal LM that is called as transformers' ones are, with our attention.

    Args:
        spec: The model.
        files: Its weights.
        make_linear: Makes the linears.
        dtype: Of weights and activations.
        where: Device of the weights.

    Attributes:
        device: Where it runs.

    Raises:
        NotLean: The weights are not those of the specification.
        RuntimeError: The device has no memory for them.
    """

    def __init__(
        self,
        spec: LeanSpec,
        files: WeightFiles,
        make_linear: MakeLinear,
        dtype: torch.dtype = torch.float32,
        where: torch.device = _CPU,
    ) -> None:
        def rows(*names: str) -> Tensor:
            return files.rows(names, dtype).to(where)

        _check_files(spec, files)
        self.device = where
        self._spec = spec
        self._kernels = fused_for(where)
        self._inv_freq = inverse_frequencies(spec.rope, spec.head_dim).to(where)
        self._layers = [_load_layer(spec, rows, make_linear, i) for i in range(spec.num_layers)]
        self._norm = rows("model.norm.weight")
        embedding = rows(_EMBEDDING)
        self._head = make_linear(embedding if spec.tied else rows(_HEAD), None)
        self._embed = self._head.rows if spec.tied else TorchLinear(embedding, None).rows
        self._compiled: tuple[Mapping[int, LayerPages], CompiledDecoder | None] | None = None

    def __call__(
        self,
        *,
        input_ids: Tensor,
        position_ids: Tensor,
        logits_to_keep: Tensor,
        pdserve: AttentionContext,
        use_cache: bool = False,
    ) -> Logits:
        """One pass.

        Args:
            input_ids: `[1, num_tokens]`.
            position_ids: `[1, num_tokens]`.
            logits_to_keep: `[num_rows]`, the tokens whose logits are wanted.
            pdserve: Stores and reads KV.
            use_cache: False: transformers' models would keep one of their own.
        """
        hidden = self._embed(input_ids[0])
        rotation = self._rotation(position_ids[0])
        if isinstance(pdserve, PagedContext) and (decoder := self._compiled_for(pdserve)) is not None:
            batch = pdserve.batch
            step = DecoderStep(batch.page_tables, batch.query_starts, batch.kv_lens, batch.slots, logits_to_keep)
            return Logits(self._head(decoder(hidden.contiguous(), rotation.table, step))[None])
        delta: Tensor | None = None
        for at, layer in enumerate(self._layers):
            attended = self._attend(at, layer, self._add_norm(hidden, delta, layer.attention_norm), rotation, pdserve)
            if at == len(self._layers) - 1:  # what follows is asked for in some rows only
                attended, hidden = attended[logits_to_keep], hidden[logits_to_keep]
            gate_up = layer.gate_up(self._add_norm(hidden, layer.out(attended), layer.mlp_norm))
            gated = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
            self._kernels.silu_mul(gate_up, gated)
            delta = layer.down(gated)
        return Logits(self._head(self._add_norm(hidden, delta, self._norm))[None])

    def _compiled_for(self, context: PagedContext) -> CompiledDecoder | None:
        """The layers over these pages, compiled; None: other kernels are given, or not all is compiled and fp32."""
        given = context.kernels
        if given.store_kv is not compiled_store or given.paged_attention is not compiled_attention:
            return None
        known = self._compiled
        if known is None or known[0] is not context.pages:
            known = self._compiled = context.pages, self._compile(context.pages)
        return known[1]

    def _compile(self, pages: Mapping[int, LayerPages]) -> CompiledDecoder | None:
        layers = [layer for one in self._layers if (layer := _decoder_layer(one)) is not None]
        memory = [pages[at] for at in range(len(self._layers))]
        if len(layers) < len(self._layers) or any(t.dtype is not torch.float32 for both in memory for t in both):
            return None
        return CompiledDecoder(
            layers,
            memory,
            self._norm,
            num_heads=self._spec.num_heads,
            epsilon=self._spec.norm_eps,
            scale=self._layers[0].options.scale,
        )

    def _attend(self, at: int, layer: _Layer, normed: Tensor, rotation: _Rotation, context: AttentionContext) -> Tensor:
        num_heads, num_tokens = self._spec.num_heads, normed.shape[0]
        heads = layer.qkv(normed).view(num_tokens, -1, self._spec.head_dim)
        num_rotated = num_heads + self._spec.num_kv_heads
        query, key, value = heads[:, :num_heads], heads[:, num_heads:num_rotated], heads[:, num_rotated:]
        if layer.query_norm is not None and layer.key_norm is not None:
            self._norm_heads(query, layer.query_norm)
            self._norm_heads(key, layer.key_norm)
        self._kernels.rotate(heads[:, :num_rotated], rotation.rows, rotation.table)
        return context.attend(at, query, key, value, layer.options).reshape(num_tokens, -1)

    def _add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """The norm of the sum, which replaces `hidden`."""
        normed = torch.empty_like(hidden)
        if delta is None:
            self._kernels.rms_norm(hidden, weight, normed, epsilon=self._spec.norm_eps)
        else:
            self._kernels.rms_norm(delta, weight, normed, epsilon=self._spec.norm_eps, residual=hidden)
        return normed

    def _norm_heads(self, heads: Tensor, weight: Tensor) -> None:
        """Norms each of `[num_tokens, num_heads, head_dim]`, in place."""
        rows = heads.reshape(-1, heads.shape[2])
        heads.copy_(self._add_norm(rows, None, weight).view(heads.shape))

    def _rotation(self, positions: Tensor) -> _Rotation:
        angles = positions[:, None].float() * self._inv_freq
        rows = torch.arange(len(positions), device=positions.device)
        return _Rotation(rows, torch.cat((angles.cos(), angles.sin()), dim=1))


def inverse_frequencies(rope: Mapping[str, Any], head_dim: int) -> Tensor:
    """Angle per position of each pair of values, `[head_dim / 2]` float32, in the order of float32 operations of
    transformers: a last bit would be a thousandth of a turn at the end of a long prompt.

    Args:
        rope: Parameters of a type that `LeanSpec` knows.
        head_dim: Values of a head.
    """
    base: float = rope["rope_theta"]
    freqs: Tensor = 1.0 / (base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope["rope_type"] == "linear":
        return freqs.div(rope["factor"])
    if rope["rope_type"] == "default":
        return freqs
    # llama3: waves longer than the context of the training are stretched, short ones stay, those between are mixed.
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    context = rope["original_max_position_embeddings"]
    lengths = 2 * math.pi / freqs
    stretched = torch.where(lengths > context / low, freqs / factor, freqs)
    share = (context / lengths - low) / (high - low)
    mixed = (1 - share) * stretched / factor + share * stretched
    between = (lengths >= context / high) & (lengths <= context / low)
    return torch.where(between, mixed, stretched)


def _load_layer(spec: LeanSpec, read: Callable[..., Tensor], make: MakeLinear, at: int) -> _Layer:
    prefix = f"model.layers.{at}."

    def rows(*names: str) -> Tensor:
        return read(*(prefix + name for name in names))

    def linear(biased: bool, *names: str) -> Linear:
        bias = rows(*(f"{name}.bias" for name in names)) if biased else None
        return make(rows(*(f"{name}.weight" for name in names)), bias)

    return _Layer(
        attention_norm=rows("input_layernorm.weight"),
        qkv=linear(spec.qkv_bias, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        query_norm=rows("self_attn.q_norm.weight") if spec.qk_norm else None,
        key_norm=rows("self_attn.k_norm.weight") if spec.qk_norm else None,
        options=AttentionOptions(spec.head_dim**-0.5, spec.windows[at], None, None),
        out=linear(spec.out_bias, "self_attn.o_proj"),
        mlp_norm=rows("post_attention_layernorm.weight"),
        gate_up=linear(False, "mlp.gate_proj", "mlp.up_proj"),
        down=linear(False, "mlp.down_proj"),
    )


def _decoder_layer(layer: _Layer) -> DecoderLayer | None:
    """The same for `CompiledDecoder`; None: its linears are not compiled."""
    qkv, out, gate_up, down = layer.qkv, layer.out, layer.gate_up, layer.down
    if not (
        isinstance(qkv, PackedLinear)
        and isinstance(out, PackedLinear)
        and isinstance(gate_up, PackedLinear)
        and isinstance(down, PackedLinear)
    ):
        return None
    return DecoderLayer(
        attention_norm=layer.attention_norm,
        query_norm=layer.query_norm,
        key_norm=layer.key_norm,
        mlp_norm=layer.mlp_norm,
        window=layer.options.window,
        qkv=qkv,
        out=out,
        gate_up=gate_up,
        down=down,
    )


def _check_files(spec: LeanSpec, files: WeightFiles) -> None:
    expected, found = _expected_shapes(spec), files.shapes()
    repeated = spec.tied and found.pop(_HEAD, None) is not None  # some writers do that
    different = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
    if different:
        raise NotLean(
            f"{len(different)} of its weights are missing, unknown or of another shape than its configuration says, "
            f"among them {different[0]}"
        )
    if unread := set(files.types().values()) - {"F32", "F16", "BF16"}:
        raise NotLean(f"its weights are of type {', '.join(sorted(unread))}")
    if repeated and not files.are_equal(_HEAD, _EMBEDDING):  # then transformers does not tie them
        raise NotLean("its configuration says that the head is the embedding, but its files have another one")


def _expected_shapes(spec: LeanSpec) -> dict[str, tuple[int, ...]]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        _EMBEDDING: (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not spec.tied:
        shapes[_HEAD] = (spec.vocab_size, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.o_proj.weight": (hidden, query),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    for name, rows in (("q", query), ("k", kv), ("v", kv)):
        layer[f"self_attn.{name}_proj.weight"] = (rows, hidden)
        if spec.qkv_bias:
            layer[f"self_attn.{name}_proj.bias"] = (rows,)
    if spec.out_bias:
        layer["self_attn.o_proj.bias"] = (hidden,)
    if spec.qk_norm:
        layer |= {"self_attn.q_norm.weight": (spec.head_dim,), "self_attn.k_norm.weight": (spec.head_dim,)}
    for at in range(spec.num_layers):
        shapes |= {f"model.layers.{at}.{name}": shape for name, shape in layer.items()}
    return shapes
