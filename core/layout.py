"""KVLayout: where the KV of a token lies inside a page. This is also the wire format.

A page of all layers is one contiguous run of bytes. Layers with equal KV shape form a group; within a group:

    [page][kv_head][layer][K|V][token][head_dim]

so that any range of KV heads of a group is contiguous too. K and V may have different widths (MLA as plain attention).
All offsets are in elements unless the name says bytes, and are Python ints (no 32-bit limit).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from pdserve.core.errors import ConfigError, TransferError

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Types of weights, and of KV unless it is told apart."""

FP8 = "float8_e4m3fn"
KV_DTYPE_BYTES = {**DTYPE_BYTES, FP8: 1}
MAX_JSON_CHARS = 64 << 10
PAGE_SIZE, DTYPE = "page_size", "dtype"
CONVERSIONS = frozenset({PAGE_SIZE, DTYPE})
"""What this version can convert when KV arrives."""


@dataclass(frozen=True)
class LayerGroup:
    """Layers of equal KV shape.

    Attributes:
        layers: Model layer indices, ascending.
        num_kv_heads: KV heads per layer.
        k_dim: Elements of one key.
        v_dim: Elements of one value.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    k_dim: int
    v_dim: int

    def __post_init__(self) -> None:
        if not self.layers or list(self.layers) != sorted(set(self.layers)):
            raise ConfigError(f"KV layer group: layers {self.layers} must be ascending and distinct")
        for name in ("num_kv_heads", "k_dim", "v_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"KV layer group: {name} is {getattr(self, name)}; it must be at least 1")

    def page_elements(self, page_size: int) -> int:
        """Elements that one page holds for this group."""
        return self.num_kv_heads * len(self.layers) * (self.k_dim + self.v_dim) * page_size


@dataclass(frozen=True)
class KVLayout:
    """Shape, dtype and order of the KV of one model.

    Attributes:
        page_size: Tokens per page, >= 1.
        dtype: A key of `KV_DTYPE_BYTES`.
        groups: Layer groups in page order.
    """

    page_size: int
    dtype: str
    groups: tuple[LayerGroup, ...]

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ConfigError(f"page_size is {self.page_size}; it must be at least 1 token")
        if self.dtype not in KV_DTYPE_BYTES:
            raise ConfigError(f"KV dtype is {self.dtype!r}; it must be one of {', '.join(KV_DTYPE_BYTES)}")
        layers = [layer for g in self.groups for layer in g.layers]
        if not layers or len(layers) != len(set(layers)):
            raise ConfigError("KV layout: every layer belongs to exactly one group, and there is at least one")

    @classmethod
    def uniform(cls, *, num_layers: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: str) -> KVLayout:
        """Layout of a model whose layers all have the same KV shape."""
        group = LayerGroup(tuple(range(num_layers)), num_kv_heads, head_dim, head_dim)
        return cls(page_size, dtype, (group,))

    @cached_property
    def page_elements(self) -> int:
        """Elements of one page."""
        return sum(g.page_elements(self.page_size) for g in self.groups)

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.page_elements * KV_DTYPE_BYTES[self.dtype]

    @cached_property
    def group_offsets(self) -> tuple[int, ...]:
        """Element offset of each group within a page."""
        offsets, at = [], 0
        for g in self.groups:
            offsets.append(at)
            at += g.page_elements(self.page_size)
        return tuple(offsets)

    def num_pages(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def to_json(self) -> str:
        """Descriptor for peers."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> KVLayout:
        """Reads a peer's descriptor.

        Raises:
            TransferError: The text is not a layout.
        """
        if len(text) > MAX_JSON_CHARS:
            raise TransferError(f"peer sent a KV layout of {len(text)} characters", reason="BAD_LAYOUT")
        try:
            raw = json.loads(text)
            groups = tuple(
                LayerGroup(
                    tuple(_whole(layer) for layer in g["layers"]),
                    num_kv_heads=_whole(g["num_kv_heads"]),
                    k_dim=_whole(g["k_dim"]),
                    v_dim=_whole(g["v_dim"]),
                )
                for g in raw["groups"]
            )
            return cls(_whole(raw["page_size"]), raw["dtype"], groups)
        except (ValueError, KeyError, TypeError, RecursionError, ConfigError) as e:
            raise TransferError(f"peer sent a KV layout that cannot be read: {e}", reason="BAD_LAYOUT") from e


def _whole(value: object) -> int:
    """A number of JSON; 4.0 and true equal whole numbers, and are none: sizes are made of them."""
    if type(value) is not int:
        raise ValueError(f"{value!r} is no whole number")
    return value


def incompatibility(ours: KVLayout, theirs: KVLayout, converts: Collection[str] = ()) -> str | None:
    """Says why KV of one layout cannot be brought into the other.

    Args:
        ours: Of the worker that says it.
        theirs: Of its peer.
        converts: What the pair converts: `PAGE_SIZE`, `DTYPE`; names of a later version mean nothing here.

    Returns:
        A sentence for an operator, or None when pages can be copied, or converted as `converts` allows.
    """
    if PAGE_SIZE not in converts and ours.page_size != theirs.page_size:
        return (
            f"page_size differs: {ours.page_size} here, {theirs.page_size} there, and one of the two is of a version "
            "that does not convert it"
        )
    if ours.dtype != theirs.dtype and FP8 in (ours.dtype, theirs.dtype):
        return (
            f"dtype differs: {ours.dtype} here, {theirs.dtype} there; give both one --kv-cache-dtype: KV of 8 bits "
            "is not converted"
        )
    if DTYPE not in converts and ours.dtype != theirs.dtype:
        return (
            f"dtype differs: {ours.dtype} here, {theirs.dtype} there; give both one --dtype, or the decode worker "
            "--kv-convert-dtype"
        )
    if ours.groups != theirs.groups:
        return _difference(ours.groups, theirs.groups) + ": the workers serve different models or shards"
    return None


def _difference(ours: Sequence[LayerGroup], theirs: Sequence[LayerGroup]) -> str:
    """Which number is what on which side."""
    here, there = (sum(len(g.layers) for g in groups) for groups in (ours, theirs))
    if here != there:
        return f"number of layers differs: {here} here, {there} there"
    by_layer = {layer: g for g in theirs for layer in g.layers}
    for mine in ours:
        for layer in mine.layers:
            if (other := by_layer.get(layer)) is None:
                return f"layer {layer} is here and not there"
            for name in ("num_kv_heads", "k_dim", "v_dim"):
                if getattr(mine, name) != getattr(other, name):
                    return f"{name} of layer {layer} differs: {getattr(mine, name)} here, {getattr(other, name)} there"
    return "layers are grouped otherwise"
