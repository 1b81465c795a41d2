"""Nothing wrong that a router submits reaches the engine; sampling parameters survive the wire."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdserve.core.errors import PdserveError, RequestError
from pdserve.core.hashing import token_digest
from pdserve.core.sampling import SamplingParams
from pdserve.core.sampling_proto import sampling_from_proto, sampling_to_proto
from pdserve.core.submission import ModelLimits, check_part, read_request
from pdserve.v1 import common_pb2, worker_pb2

LIMITS = ModelLimits(max_model_len=8, vocab_size=100, eos_token_ids=frozenset({99}))


def _submit() -> worker_pb2.Submit:
    return worker_pb2.Submit(
        fence=common_pb2.Fence(request_id="r", attempt=2, phase=1, owner_epoch=7),
        reservation_id="res",
        transfer_id="t",
        part=common_pb2.ROLE_PREFILL,
        prefill=worker_pb2.Peer(worker_id="p", incarnation="aa"),
        decode=worker_pb2.Peer(worker_id="d", incarnation="bb"),
        prompt_token_ids=[1, 2, 3],
        emitted_token_ids=[4],
        prompt_digest=token_digest([1, 2, 3, 4]),
        sampling=common_pb2.SamplingParams(seed=5, max_tokens=4, temperature=0.7),
        priority=-1,
    )


def test_a_right_submission_becomes_a_request() -> None:
    request = read_request(_submit(), LIMITS)
    assert (request.key, request.prompt_token_ids, request.emitted_token_ids) == ("r/7/2", (1, 2, 3), (4,))
    assert (request.priority, request.arrival_s, request.eos_token_ids) == (-1, 7e-6, {99})
    assert request.sampling == SamplingParams(seed=5, max_tokens=4, temperature=0.7)


WRONG: list[tuple[str, Callable[[worker_pb2.Submit], object]]] = [
    ("EMPTY_PROMPT", lambda m: m.ClearField("prompt_token_ids")),
    ("BAD_TOKEN_ID", lambda m: m.prompt_token_ids.append(100)),
    ("BAD_TOKEN_ID", lambda m: m.emitted_token_ids.append(2**32 - 1)),
    ("PROMPT_TOO_LONG", lambda m: m.prompt_token_ids.extend([1] * 4)),
    ("BAD_PROMPT_DIGEST", lambda m: m.prompt_token_ids.append(1)),
    ("BAD_SUBMIT", lambda m: m.sampling.ClearField("seed")),
    ("BAD_SUBMIT", lambda m: m.sampling.ClearField("max_tokens")),
    ("BAD_SUBMIT", lambda m: m.sampling.MergeFrom(common_pb2.SamplingParams(max_tokens=1))),
    ("BAD_PARAMETER", lambda m: m.sampling.MergeFrom(common_pb2.SamplingParams(top_p=0))),
    ("MAX_TOKENS_TOO_LARGE", lambda m: m.sampling.MergeFrom(common_pb2.SamplingParams(max_tokens=6))),
]


@pytest.mark.parametrize(("reason", "spoil"), WRONG)
def test_a_wrong_submission_is_refused(reason: str, spoil: Callable[[worker_pb2.Submit], object]) -> None:
    message = _submit()
    spoil(message)
    with pytest.raises(RequestError) as e:
        read_request(message, LIMITS)
    assert e.value.reason == reason


@pytest.mark.parametrize(
    ("reason", "spoil"),
    [
        ("WRONG_PART", lambda m: setattr(m, "part", common_pb2.ROLE_DECODE)),
        ("WRONG_PART", lambda m: setattr(m, "part", common_pb2.ROLE_UNSPECIFIED)),
        ("WRONG_INCARNATION", lambda m: setattr(m.prefill, "incarnation", "bb")),
        ("WRONG_INCARNATION", lambda m: m.ClearField("prefill")),
        ("BAD_SUBMIT", lambda m: m.ClearField("transfer_id")),
    ],
)
def test_a_submission_for_another_worker_is_refused(reason: str, spoil: Callable[[worker_pb2.Submit], object]) -> None:
    message = _submit()
    check_part(message, [common_pb2.ROLE_PREFILL], "aa")
    spoil(message)
    with pytest.raises(PdserveError) as e:
        check_part(message, [common_pb2.ROLE_PREFILL], "aa")
    assert e.value.reason == reason


def test_sampling_survives_the_wire() -> None:
    params = SamplingParams(
        temperature=0.7,
        top_p=0.95,
        top_k=40,
        min_p=0.05,
        seed=2**64 - 1,
        stop=("a", "b"),
        stop_token_ids=(1, 2),
        include_stop_str_in_output=True,
        ignore_eos=True,
        max_tokens=3,
        min_tokens=2,
        logprobs=0,
        skip_special_tokens=False,
        presence_penalty=0.3,
        frequency_penalty=-0.7,
        repetition_penalty=1.1,
        logit_bias={7: 0.1, 8: -100.0},
        allowed_token_ids=(7, 8),
        bad_words=("x", " y"),
        prompt_logprobs=3,
        echo=True,
    )
    assert sampling_from_proto(sampling_to_proto(params)) == params
    assert sampling_from_proto(sampling_to_proto(SamplingParams())) == SamplingParams()
