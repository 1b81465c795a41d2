"""Wrong types of sampling parameters: refused by name before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields

import numpy as np
import pytest

from pdserve.core import sampling_proto
from pdserve.core.errors import PdserveError, RequestError
from pdserve.core.sampling import SamplingParams
from pdserve.core.sampling_proto import sampling_from_proto, sampling_to_proto
from pdserve.core.structured import StructuredOutputs
from pdserve.v1 import common_pb2

_VALUES: list[object] = [
    *(None, "", "x", b"x", "\ud800", object(), True, -1, 1.5, 2**40, 10**30, -(10**400), math.nan, math.inf),
    *([], [1], [-1], [1.5], [None], [True], ["a"], [""], ["\ud800"], [2**40], [10**400]),
    *({}, {1: 2}, {1: "x"}, {1: None}, {1: math.nan}, {1: 10**400}, {"a": 1}, {True: 1.0}, {1.5: 1.0}, {2**40: 1}),
]


@pytest.mark.parametrize("name", [f.name for f in fields(SamplingParams)])
def test_any_value_is_taken_or_refused_with_the_fields_name(name: str) -> None:
    for value in _VALUES:
        try:
            params = SamplingParams(**{name: value})  # type: ignore[arg-type]
        except PdserveError as e:
            assert f"'{name}" in str(e) and len(str(e)) < 500, (value, str(e))
            continue
        plain = getattr(params, name)
        assert plain is None or type(plain) in (bool, int, float, tuple, dict), (value, plain)
        hash(tuple(sorted(plain.items())) if isinstance(plain, dict) else plain)


@pytest.mark.parametrize("field", ["json", "regex", "grammar", "choice", "json_object"])
@pytest.mark.parametrize("value", [5, b"a", object(), ["\ud800"], [1, 2], "\ud800", 1.5])
def test_a_form_of_a_wrong_type_is_refused_with_its_name(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=rf"structured_outputs\.{field}"):
        StructuredOutputs(**{field: value})  # type: ignore[arg-type]


def test_one_string_is_not_taken_for_a_choice_of_letters() -> None:
    with pytest.raises(RequestError, match=r"structured_outputs\.choice"):
        StructuredOutputs(choice="yes")  # type: ignore[arg-type]


def test_numpy_numbers_are_numbers_and_cross_the_wire() -> None:
    given = SamplingParams(
        top_k=np.int64(5),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        stop_token_ids=np.array([1, 2]),  # type: ignore[arg-type]
        logit_bias={np.int32(3): np.float64(1.5)},  # type: ignore[dict-item]
    )
    assert given == SamplingParams(top_k=5, temperature=0.5, stop_token_ids=(1, 2), logit_bias={3: 1.5})
    assert sampling_from_proto(sampling_to_proto(given)) == given


@pytest.mark.parametrize("name", ["stop", "stop_token_ids", "allowed_token_ids", "bad_words", "logit_bias"])
def test_too_many_parts_are_refused_before_they_are_read(name: str) -> None:
    class Counted:
        def __len__(self) -> int:
            return 10**6

        def __iter__(self) -> Iterator[object]:
            raise AssertionError("was read")

    with pytest.raises(RequestError, match=f"'{name}' is '1000000 entries'; it must be at most"):
        SamplingParams(**{name: Counted()})  # type: ignore[arg-type]


def test_a_message_of_too_many_parts_is_refused_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(value: float) -> float:
        raise AssertionError("was read")

    monkeypatch.setattr(sampling_proto, "_shortest", read)
    message = common_pb2.SamplingParams(logit_bias=dict.fromkeys(range(2000), 1.0))
    with pytest.raises(RequestError, match="'logit_bias' is '2000 entries'; it must be at most 1024"):
        sampling_from_proto(message)
