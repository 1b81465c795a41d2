"""The seam between sampler and logits processors."""

from __future__ import annotations

import math

import pytest
import torch

from pdserve.core.sampling import SamplingParams
from pdserve.engine.sampler import sample
from pdserve.engine.step import SampledToken, SamplingFailure, ScheduledSequence


class Forbid:
    """Forbids a token in the rows of one seed, or gives up."""

    def __init__(self, token: int, seed: int, failure: SamplingFailure | None = None) -> None:
        self.token, self.seed, self.failure = token, seed, failure

    def wants(self, params: SamplingParams) -> bool:
        return params.seed == self.seed

    def edit(self, logits: torch.Tensor, row: ScheduledSequence) -> SamplingFailure | None:
        logits[self.token] = -math.inf
        return self.failure


def row(seed: int, **params: object) -> ScheduledSequence:
    sampling = SamplingParams(seed=seed, **{"temperature": 0.0, "logprobs": 1, **params})  # type: ignore[arg-type]
    return ScheduledSequence(str(seed), 0, [0], [0], sampling, 0, [0], 1)


def test_a_processor_edits_only_the_rows_that_want_it_and_never_the_logits_that_logprobs_tell() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]]).repeat(2, 1)
    before = logits.clone()
    edited, plain = sample(logits, [row(1), row(2)], [Forbid(1, seed=1)])
    assert isinstance(edited, SampledToken) and isinstance(plain, SampledToken)
    assert (edited.token_id, plain.token_id) == (2, 1)
    assert torch.equal(logits, before)
    assert edited.logprobs is not None and plain.logprobs is not None
    assert edited.logprobs.top == plain.logprobs.top  # the forbidden token is still the likeliest of the model
    assert edited.logprobs.chosen.rank == 2


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}])
def test_a_row_whose_processors_leave_nothing_fails_alone(params: dict[str, float]) -> None:
    processors = [Forbid(0, seed=1), Forbid(1, seed=1)]
    bad, good = sample(torch.zeros(2, 2), [row(1, **params), row(2)], processors)
    assert isinstance(bad, SamplingFailure)
    assert (bad.reason, bad.status) == ("NO_TOKEN_LEFT", "INVALID_ARGUMENT")
    assert isinstance(good, SampledToken)


def test_a_processor_may_fail_its_row() -> None:
    failure = SamplingFailure("WRONG", "says why")
    bad, good = sample(torch.zeros(2, 2), [row(1), row(2)], [Forbid(0, seed=1, failure=failure)])
    assert bad == failure and isinstance(good, SampledToken)
