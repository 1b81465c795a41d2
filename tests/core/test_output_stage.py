"""What a worker tells the router of one sequence: text, offsets, usage, and who ended it."""

from __future__ import annotations

from pdserve.core.output_stage import OutputState, OutputStates
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


def test_choices_have_their_own_offsets_and_ends_and_one_end_together() -> None:
    params = SamplingParams(n=2, stop=("t2",))
    states = OutputStates(FENCE, Tokenizer.fake(100), params, num_prompt_tokens=4)
    first = states.push(1, [1]).message
    assert (first.delta.choice, first.delta.index, first.delta.finish_reason) == (1, 0, 0)
    stopped = states.push(1, [2])
    assert stopped.stopped_early and states.has_ended(1) and not states.has_ended(0)
    assert (stopped.message.delta.index, stopped.message.delta.text, stopped.message.delta.text_offset) == (1, " ", 3)
    assert stopped.message.delta.finish_reason == common_pb2.FINISH_REASON_STOP
    assert stopped.message.delta.stop_reason == "t2" and not stopped.message.HasField("finished")
    last = states.push(0, [5, 6, 7], finish_reason=FinishReason.LENGTH, num_cached_tokens=3).message
    assert (last.delta.choice, last.delta.index, last.delta.text_offset) == (0, 0, 0)
    assert last.delta.finish_reason == last.finished.finish_reason == common_pb2.FINISH_REASON_LENGTH
    usage = last.finished.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (4, 5, 3)


def test_messages_of_one_choice_are_those_of_its_state() -> None:
    states = OutputStates(FENCE, Tokenizer.fake(100), SamplingParams(), num_prompt_tokens=4)
    assert states.push(0, [1]) == (alone := _state()).push([1])
    end = {"finish_reason": FinishReason.LENGTH}
    assert states.push(0, [2], **end) == alone.push([2], **end)  # type: ignore[arg-type]
