"""What two layouts may differ in, and what is said when they do."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pdserve.core.errors import TransferError
from pdserve.core.layout import CONVERSIONS, DTYPE, FP8, PAGE_SIZE, KVLayout, LayerGroup, incompatibility

OURS = KVLayout(16, "float32", (LayerGroup((0, 2), 2, 8, 8), LayerGroup((1,), 1, 8, 4)))


def groups(*groups: LayerGroup) -> KVLayout:
    return replace(OURS, groups=groups)


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        (replace(OURS, page_size=32), "page_size differs: 16 here, 32 there"),
        (replace(OURS, dtype="bfloat16"), "dtype differs: float32 here, bfloat16 there"),
        (groups(OURS.groups[0]), "number of layers differs: 3 here, 2 there"),
        (groups(LayerGroup((0, 2), 4, 8, 8), OURS.groups[1]), "num_kv_heads of layer 0 differs: 2 here, 4 there"),
        (groups(OURS.groups[0], LayerGroup((1,), 1, 16, 4)), "k_dim of layer 1 differs: 8 here, 16 there"),
        (groups(OURS.groups[0], LayerGroup((3,), 1, 8, 4)), "layer 1 is here and not there"),
        (groups(*reversed(OURS.groups)), "layers are grouped otherwise"),
    ],
)
def test_what_differs_is_named_with_both_numbers(theirs: KVLayout, says: str) -> None:
    fault = incompatibility(OURS, theirs)
    assert fault is not None and fault.startswith(says)


def test_only_what_both_convert_may_differ() -> None:
    both = replace(OURS, page_size=32, dtype="float16")
    assert incompatibility(OURS, OURS) is None
    assert incompatibility(OURS, both, CONVERSIONS) is None
    assert "dtype differs" in str(incompatibility(OURS, both, [PAGE_SIZE, "what a later version knows"]))
    assert "page_size differs" in str(incompatibility(OURS, both, [DTYPE]))
    assert "number of layers" in str(incompatibility(OURS, groups(OURS.groups[0]), CONVERSIONS))


def test_kv_of_8_bits_is_never_converted() -> None:
    narrow = replace(OURS, dtype=FP8)
    assert narrow.page_bytes * 4 == OURS.page_bytes
    assert "give both one --kv-cache-dtype" in str(incompatibility(OURS, narrow, CONVERSIONS))
    assert "give both one --kv-cache-dtype" in str(incompatibility(narrow, OURS, CONVERSIONS))
    assert incompatibility(narrow, replace(narrow, page_size=32), CONVERSIONS) is None


def test_a_layout_is_read_back_and_nonsense_is_not() -> None:
    assert KVLayout.from_json(OURS.to_json()) == OURS
    raw = json.loads(OURS.to_json())
    parts = ({"page_size": 16.5}, {"page_size": True}, {"page_size": 0}, {"dtype": []})
    odds: list[tuple[str, object]] = [("num_kv_heads", 2.0), ("k_dim", True), ("layers", [0.0])]
    odd = [{**raw["groups"][0], name: value} for name, value in odds]
    grouped = ({**raw, "groups": [group, *raw["groups"][1:]]} for group in odd)
    for wrong in ({}, [], *({**raw, **part} for part in parts), *grouped):
        with pytest.raises(TransferError):
            KVLayout.from_json(json.dumps(wrong))
