"""Who gets in, and what the others are told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.errors import CapacityError, PdserveError, RequestError
from pdserve.core.sampling import SamplingParams
from pdserve.router.admission import Admitted, admit, check_envelope, check_queue, request_digest
from pdserve.router.worker_table import Limits
from pdserve.v1 import common_pb2, inference_pb2

LIMITS = Limits(max_model_len=32, vocab_size=100)


def message(**fields: object) -> inference_pb2.GenerateRequest:
    fields.setdefault("text", "hello")
    return inference_pb2.GenerateRequest(**fields)  # type: ignore[arg-type]


def take(prompt: list[int], **options: object) -> Admitted:
    return admit(
        message(),
        request_id="r",
        model="m",
        prompt_token_ids=prompt,
        sampling=SamplingParams(**options),  # type: ignore[arg-type]
        limits=LIMITS,
        drawn_seed=7,
    )


@pytest.mark.parametrize(
    ("fields", "status", "word"),
    [
        ({"request_id": "a b"}, "INVALID_ARGUMENT", "request_id"),
        ({"request_id": "x" * 129}, "INVALID_ARGUMENT", "128"),
        ({"request_id": "naïve"}, "INVALID_ARGUMENT", "request_id"),
        ({"model": "other"}, "NOT_FOUND", "'m'"),
        ({"priority": 101}, "INVALID_ARGUMENT", "priority"),
        ({"priority": -101}, "INVALID_ARGUMENT", "priority"),
        ({"cache_salt": "s" * 129}, "INVALID_ARGUMENT", "cache_salt"),
        ({"on_disconnect": inference_pb2.ON_DISCONNECT_DETACH}, "UNIMPLEMENTED", "DETACH"),
        ({"tenant": "t" * 65}, "INVALID_ARGUMENT", "tenant"),
    ],
)
def test_envelope_refused_by_name(fields: dict[str, object], status: str, word: str) -> None:
    with pytest.raises(PdserveError) as caught:
        check_envelope(message(**fields), "m")
    assert caught.value.status == status
    assert word in caught.value.message


def test_envelope_without_prompt() -> None:
    with pytest.raises(RequestError, match="no prompt"):
        check_envelope(inference_pb2.GenerateRequest(), "m")


def test_envelope_taken() -> None:
    check_envelope(message(model="m", request_id="A-z_0.9:x", tenant="t" * 64, priority=-100), "m")
    check_envelope(message(on_disconnect=inference_pb2.ON_DISCONNECT_CANCEL), "m")


@pytest.mark.parametrize(
    ("prompt", "options", "reason", "word"),
    [
        ([], {}, "EMPTY_PROMPT", "empty"),
        ([1] * 32, {}, "PROMPT_TOO_LONG", "at most 31"),
        ([1, 2, 100], {}, "BAD_TOKEN_ID", "100 at position 2"),
        ([1], {"stop_token_ids": (100,)}, "BAD_TOKEN_ID", "stop_token_ids"),
        ([1], {"logit_bias": {3: 1.0, 100: 1.0}}, "BAD_TOKEN_ID", "'logit_bias': token id 100"),
        ([1], {"allowed_token_ids": (100,)}, "BAD_TOKEN_ID", "allowed_token_ids"),
        ([1] * 20, {"min_tokens": 13}, "BAD_PARAMETER", "'min_tokens' is 13; it must be in 0..max_tokens (12)"),
        ([1, 2], {"max_tokens": 31}, "MAX_TOKENS_TOO_LARGE", "'max_tokens' is 31"),
    ],
)
def test_refused(prompt: list[int], options: dict[str, object], reason: str, word: str) -> None:
    with pytest.raises(RequestError) as caught:
        take(prompt, **options)
    assert caught.value.reason == reason
    assert word in caught.value.message


@given(st.integers(1, 31), st.one_of(st.none(), st.integers(1, 31)), st.one_of(st.none(), st.integers(0, 2**64 - 1)))
def test_what_is_admitted_always_fits(length: int, max_tokens: int | None, seed: int | None) -> None:
    if max_tokens is not None and length + max_tokens > LIMITS.max_model_len:
        with pytest.raises(RequestError):
            take([1] * length, max_tokens=max_tokens, seed=seed)
        return
    sampling = take([1] * length, max_tokens=max_tokens, seed=seed).sampling
    assert sampling.max_tokens is not None
    assert 1 <= sampling.max_tokens <= LIMITS.max_model_len - length
    assert sampling.max_tokens == (max_tokens or LIMITS.max_model_len - length)
    assert sampling.seed == (7 if seed is None else seed)


def test_full_queue_says_when() -> None:
    check_queue(3, 4)
    with pytest.raises(CapacityError) as caught:
        check_queue(4, 4)
    assert caught.value.reason == "QUEUE_FULL"
    assert caught.value.retry_after_s


def test_digest_ignores_the_id_and_nothing_else() -> None:
    assert request_digest(message(request_id="a")) == request_digest(message(request_id="b"))
    other = message(sampling=common_pb2.SamplingParams(temperature=0.0))
    assert request_digest(message()) != request_digest(other)


def test_too_many_logprobs_of_a_long_prompt_are_refused_by_name() -> None:
    sampling = SamplingParams(prompt_logprobs=20, temperature=0.0)
    sampling.check_request(12_000, 100)
    with pytest.raises(RequestError, match="'prompt_logprobs' is 20: with 13000 prompt tokens"):
        sampling.check_request(13_000, 100)
