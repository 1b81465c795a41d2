"""What the SDK accepts, what it refuses by itself, and that its names are the protocol's."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import pdserve
from pdserve import StructuredOutputs
from pdserve import client as sdk
from pdserve.client import Client, InvalidRequest, RequestOptions
from pdserve.client.convert import generate_request
from pdserve.v1 import common_pb2

REQUEST_NAMES = {"model", "request_id", "timeout_s", "tenant", "priority", "cache_salt"}


def test_every_sampling_parameter_of_the_protocol_is_a_keyword() -> None:
    assert set(RequestOptions.__annotations__) - REQUEST_NAMES == set(
        common_pb2.SamplingParams.DESCRIPTOR.fields_by_name
    )


def test_every_keyword_arrives() -> None:
    values: dict[str, Any] = {
        "n": 2,
        "temperature": -1,
        "top_p": 0.5,
        "top_k": np.int64(3),
        "min_p": 0.25,
        "presence_penalty": 1,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.5,
        "seed": 2**64 - 1,
        "stop": ["a", "b"],
        "stop_token_ids": (1, 2),
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "max_tokens": -5,
        "min_tokens": 1,
        "logit_bias": {5: 1.5},
        "allowed_token_ids": [7],
        "bad_words": ["c"],
        "logprobs": 0,
        "prompt_logprobs": 1,
        "skip_special_tokens": False,
        "structured_outputs": {"regex": "a+"},
        "echo": True,
    }
    sampling = generate_request(prompt="x", options=values).sampling  # type: ignore[arg-type]
    assert {f.name for f, _ in sampling.ListFields()} == set(values)
    assert sampling.max_tokens == -5 and sampling.temperature == -1 and sampling.logit_bias[5] == 1.5
    assert sampling.structured_outputs.regex == "a+" and list(sampling.stop) == ["a", "b"]


def test_nothing_given_sends_nothing() -> None:
    request = generate_request(prompt_token_ids=[0], options={"temperature": None, "stop": None})
    assert not request.HasField("sampling") and request.model == "" and len(request.request_id) == 32


def test_takes_the_embedded_engines_form_too() -> None:
    for form in ({"choice": ["a", "b"]}, {"json": {"type": "object"}}, {"json_object": True}):
        messages = [
            generate_request(prompt="x", options={"structured_outputs": value}).sampling
            for value in (form, StructuredOutputs(**form))  # type: ignore[arg-type]
        ]
        assert messages[0] == messages[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": "x", "options": {"max_token": 1}}, "'max_token'; did you mean max_tokens"),
        ({"prompt": "x", "options": {"zzz": 1}}, "unknown keyword 'zzz'$"),
        ({"prompt": "x", "options": {"temperature": "hot"}}, "temperature must be a number, not str"),
        ({"prompt": "x", "options": {"max_tokens": 1.5}}, "max_tokens must be int, not float"),
        ({"prompt": "x", "options": {"seed": True}}, "seed must be int, not bool"),
        ({"prompt": "x", "options": {"ignore_eos": 1}}, "ignore_eos must be bool"),
        ({"prompt": "x", "options": {"stop_token_ids": "12"}}, "stop_token_ids must be a sequence"),
        ({"prompt": "x", "options": {"logit_bias": [1]}}, "logit_bias must be a mapping"),
        ({"prompt": "x", "options": {"structured_outputs": {"nonsense": "y"}}}, "structured_outputs"),
        ({"prompt": [1, 2], "options": {}}, "token ids go in prompt_token_ids"),
        ({"options": {}}, "exactly one"),
        ({"prompt": "x", "prompt_token_ids": [1], "options": {}}, "exactly one"),
        ({"prompt_token_ids": [1.0], "options": {}}, "prompt_token_ids must be int"),
        ({"messages": [{"role": "user"}], "options": {}}, r"messages\[0\]"),
        ({"messages": [{"role": "user", "content": 3}], "options": {}}, r"messages\[0\]\['content'\] must be str"),
    ],
)
def test_wrong_types_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        generate_request(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_token_ids": [-1], "options": {}}, "'prompt_token_ids'"),
        ({"prompt": "x", "options": {"top_k": -1}}, "'top_k'"),
        ({"prompt": "x", "options": {"seed": 2**64}}, "'seed'"),
        ({"prompt": "\ud800", "options": {}}, "'prompt'.*not valid Unicode"),
        ({"prompt": "x", "options": {"stop": ["\ud800"]}}, "'stop'.*not valid Unicode"),
        ({"prompt": "x", "options": {"logit_bias": {-1: 0.0}}}, "'logit_bias'"),
    ],
)
def test_what_cannot_be_sent_is_an_invalid_request(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        generate_request(**arguments)
    assert caught.value.status == "INVALID_ARGUMENT"


@pytest.mark.parametrize("address", ["localhost", "http://localhost:1", ":1", "h:0", "h:x", []])
def test_bad_addresses(address: Any) -> None:
    with pytest.raises(ValueError, match="address"):
        Client(address)


def test_public_names_exist() -> None:
    assert sorted(sdk.__all__) == sdk.__all__ and all(hasattr(sdk, name) for name in sdk.__all__)
    assert pdserve.Client is Client and set(pdserve.__all__) <= set(dir(pdserve))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = pdserve.nonsense  # type: ignore[attr-defined]


def test_the_client_is_light_and_the_process_ends_by_itself() -> None:
    code = (
        "import sys, json, pdserve; c = pdserve.Client('127.0.0.1:1'); s = c.stream('x')\n"
        "try: next(s)\nexcept Exception as e: pass\n"
        "print(json.dumps(sorted({'.'.join(m.split('.')[:n]) for m in sys.modules for n in (1, 2)})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(json.loads(done.stdout))
    assert not loaded & {"torch", "redis", "numpy", "transformers", "rich", "pdserve.core", "pdserve.engine"}
    assert done.stderr == ""
