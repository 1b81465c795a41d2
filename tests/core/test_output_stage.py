"""What a worker tells the router of one sequence: text, offsets, usage, and who ended it."""

from __future__ import annotations

from pdserve.core.output_stage import OutputState
from pdserve.core.request import FinishReason, PositionLogprobs, TokenLogprob
from pdserve.core.sampling import SamplingParams
from pdserve.core.tokenizer import Tokenizer
from pdserve.v1 import common_pb2

FENCE = common_pb2.Fence(request_id="r", attempt=1, phase=1, owner_epoch=3)


def _state(**params: object) -> OutputState:
    return OutputState(FENCE, Tokenizer.fake(100), SamplingParams(**params), num_prompt_tokens=4)  # type: ignore[arg-type]


def test_indices_and_offsets_continue() -> None:
    state = _state()
    first, second = state.push([1]).message, state.push([22, 3]).message
    assert (first.delta.index, first.delta.text, first.delta.text_offset) == (0, " t1", 0)
    assert (second.delta.index, second.delta.text, second.delta.text_offset) == (1, " t22 t3", 3)
    assert list(second.delta.token_ids) == [22, 3] and second.fence == FENCE
    assert not second.HasField("finished")


def test_the_engines_end_flushes_text_and_counts_usage() -> None:
    state = _state(stop=(" t5 t6",))
    first = state.push([5], num_cached_tokens=2).message
    assert (first.delta.text, first.cached_tokens) == ("", 2)
    out = state.push([7, 5], finish_reason=FinishReason.LENGTH, num_cached_tokens=2)
    assert out.message.cached_tokens == 0
    assert out.message.delta.text == " t5 t7 t5" and not out.stopped_early
    finished = out.message.finished
    assert finished.finish_reason == common_pb2.FINISH_REASON_LENGTH and finished.stop_reason == ""
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens, finished.usage.cached_tokens) == (4, 3, 2)


def test_stop_token_is_named() -> None:
    out = _state().push([9], finish_reason=FinishReason.STOP, stop_token_id=9)
    assert out.message.finished.stop_reason == "9"


def test_stop_string_ends_the_sequence_and_cuts_later_tokens() -> None:
    out = _state(stop=("t2",)).push([1, 2, 3])
    assert out.stopped_early and out.finish_reason is FinishReason.STOP and out.num_tokens == 2
    assert list(out.message.delta.token_ids) == [1, 2] and out.message.delta.text == " t1 "
    assert out.message.finished.stop_reason == "t2"
    assert out.message.finished.usage.completion_tokens == 2


def test_stop_string_wins_over_the_engines_end_in_the_same_step() -> None:
    out = _state(stop=("t2",)).push([2], finish_reason=FinishReason.LENGTH)
    assert out.finish_reason is FinishReason.STOP and not out.stopped_early


def test_a_rebuilt_state_continues_where_the_first_one_stopped() -> None:
    here, there = _state(stop=("t2 t3",)), _state(stop=("t2 t3",))
    here.push([1]), here.push([2])
    there.skip([1]), there.skip([2])
    assert here.push([3]) == there.push([3])


def test_logprobs_follow_their_tokens() -> None:
    def at(token: int) -> PositionLogprobs:
        return PositionLogprobs(TokenLogprob(token, -0.5, 1), (TokenLogprob(token, -0.5, 1), TokenLogprob(0, -2.0, 2)))

    out = _state(stop=("t2",), logprobs=2).push([1, 2, 3], [at(1), at(2), at(3)]).message
    assert [p.chosen.token_id for p in out.delta.logprobs] == [1, 2]
    assert out.delta.logprobs[0].top[1].logprob == -2.0
