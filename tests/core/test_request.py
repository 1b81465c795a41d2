"""Requests: the choices of one with n > 1."""

from __future__ import annotations

from pdserve.core.hashing import choice_seed
from pdserve.core.request import Request
from pdserve.core.sampling import SamplingParams


def test_the_choices_of_a_request_have_their_own_keys_and_seeds() -> None:
    sampling = SamplingParams(n=3, seed=7, max_tokens=4)
    whole = Request(key="a", prompt_token_ids=(1, 2), sampling=sampling, eos_token_ids=frozenset(), arrival_s=1.0)
    choices = whole.choices()
    assert [c.key for c in choices] == ["a", "a#1", "a#2"]
    assert [c.sampling.seed for c in choices] == [choice_seed(7, i) for i in range(3)]
    assert choices[0].sampling.seed == 7 and len({c.sampling.seed for c in choices}) == 3
    assert {c.sampling.n for c in choices} == {1}
    assert all(c.prompt_token_ids is whole.prompt_token_ids and c.arrival_s == 1.0 for c in choices)
    assert choices[0].choices() == (choices[0],)
