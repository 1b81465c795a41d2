"""The output of a request's choices on its way from the engine to the router.

The engine gives token ids; here they become text, stop strings end the stream, and log-probabilities and usage are put
into messages. Runs on the event loop, never on the step thread. A sequence that moves to another worker is rebuilt
there with `skip`, from the tokens that the client already has.

`OutputState` is one choice; `OutputStates` all of a request, whose messages say whose they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.core.request import FinishReason, PositionLogprobs, TokenLogprob
from pdserve.core.sampling import SamplingParams
from pdserve.core.text_stream import TextStream
from pdserve.core.tokenizer import Tokenizer
from pdserve.v1 import common_pb2, worker_pb2

_FINISH = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: common_pb2.FINISH_REASON_CANCELLED,
}


@dataclass(frozen=True, slots=True)
class Output:
    """News of a sequence, ready to be sent.

    Attributes:
        message: Delta, and `finished` when the sequence ended.
        num_tokens: Tokens in the delta (those after a stop string are cut).
        finish_reason: Why the sequence ended; None: it goes on.
        stopped_early: True: a stop string ended it, which the engine does not know: abort it there.
    """

    message: worker_pb2.SequenceOutput
    num_tokens: int
    finish_reason: FinishReason | None
    stopped_early: bool


class OutputState:
    """Text, offsets and usage of one sequence.

    Args:
        fence: Identity of the try, put into every message.
        tokenizer: The model's tokenizer.
        params: The request's parameters.
        num_prompt_tokens: Tokens of the prompt, for usage.
    """

    def __init__(
        self, fence: common_pb2.Fence, tokenizer: Tokenizer, params: SamplingParams, num_prompt_tokens: int
    ) -> None:
        self._fence = fence
        self._params = params
        self._stream = TextStream(tokenizer, params)
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = 0
        self._num_chars = 0
        self._num_cached = 0

    @property
    def num_tokens(self) -> int:
        """Output tokens so far, skipped ones included: the index of the next one."""
        return self._num_tokens

    def skip(self, token_ids: Sequence[int]) -> None:
        """Takes tokens that were sent before, by whatever worker."""
        self._num_chars += len(self._stream.push(token_ids).text)
        self._num_tokens += len(token_ids)

    def push(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[PositionLogprobs] = (),
        *,
        finish_reason: FinishReason | None = None,
        stop_token_id: int | None = None,
        num_cached_tokens: int = 0,
    ) -> Output:
        """Takes new tokens.

        Args:
            token_ids: New tokens, in order; their first has output index `num_tokens`.
            logprobs: One per token, or empty.
            finish_reason: Set when the engine ended the sequence with these tokens.
            stop_token_id: The token that ended it, if one did.
            num_cached_tokens: Prompt tokens that came from the prefix cache.
        """
        news = self._stream.advance(token_ids, finish_reason, stop_token_id)
        first, self._num_cached = not self._num_tokens, max(self._num_cached, num_cached_tokens)
        message = worker_pb2.SequenceOutput(
            fence=self._fence,
            delta=common_pb2.Delta(
                index=self._num_tokens,
                token_ids=token_ids[: news.num_tokens],
                text=news.text,
                text_offset=self._num_chars,
                logprobs=map(_position, logprobs[: news.num_tokens]),
            ),
            cached_tokens=num_cached_tokens if first else 0,
        )
        self._num_tokens += news.num_tokens
        self._num_chars += len(news.text)
        if news.finish_reason is not None:
            message.finished.CopyFrom(self._finished(news.finish_reason, news.stop_reason or ""))
        return Output(message, news.num_tokens, news.finish_reason, news.stopped_early)

    def _finished(self, reason: FinishReason, stop_reason: str) -> worker_pb2.SequenceFinished:
        return worker_pb2.SequenceFinished(
            finish_reason=_FINISH[reason],
            stop_reason=stop_reason,
            usage=common_pb2.Usage(
                prompt_tokens=self._num_prompt_tokens,
                completion_tokens=self._num_tokens,
                cached_tokens=self._num_cached,
            ),
        )


def prompt_output(
    fence: common_pb2.Fence, first: int, logprobs: Sequence[PositionLogprobs]
) -> worker_pb2.SequenceOutput:
    """Log-probabilities of prompt positions, ready to be sent.

    Args:
        fence: Identity of the try.
        first: Position of the first of `logprobs`.
        logprobs: One per position.
    """
    told = common_pb2.PromptLogprobs(position=first, logprobs=map(_position, logprobs))
    return worker_pb2.SequenceOutput(fence=fence, prompt_logprobs=told)


class OutputStates:
    """A request's choices. Arguments are those of `OutputState`.

    With n = 1 messages are those of the one; else each delta names its choice and carries the choice's end, and
    `finished` comes once, with the last end.
    """

    def __init__(
        self, fence: common_pb2.Fence, tokenizer: Tokenizer, params: SamplingParams, num_prompt_tokens: int
    ) -> None:
        self._states = [OutputState(fence, tokenizer, params, num_prompt_tokens) for _ in range(params.n)]
        self._ends: dict[int, worker_pb2.SequenceFinished] = {}

    def __getitem__(self, choice: int) -> OutputState:
        return self._states[choice]

    @property
    def num_choices(self) -> int:
        """How many there are."""
        return len(self._states)

    def has_ended(self, choice: int) -> bool:
        """Nothing more is to be told of this one."""
        return choice in self._ends

    def push(
        self,
        choice: int,
        token_ids: Sequence[int],
        logprobs: Sequence[PositionLogprobs] = (),
        *,
        finish_reason: FinishReason | None = None,
        stop_token_id: int | None = None,
        num_cached_tokens: int = 0,
    ) -> Output:
        """Takes new tokens of one choice, which has not ended; see `OutputState.push`.

        Returns:
            Its news; the message says `finished` only when all choices have ended.
        """
        out = self._states[choice].push(
            token_ids,
            logprobs,
            finish_reason=finish_reason,
            stop_token_id=stop_token_id,
            num_cached_tokens=num_cached_tokens,
        )
        message = out.message
        if out.finish_reason is not None:
            self._ends[choice] = ended = worker_pb2.SequenceFinished()
            ended.CopyFrom(message.finished)
        if len(self._states) == 1:
            return out
        message.delta.choice = choice
        if out.finish_reason is not None:
            message.delta.finish_reason = message.finished.finish_reason
            message.delta.stop_reason = message.finished.stop_reason
            message.ClearField("finished")
            if len(self._ends) == len(self._states):
                message.finished.CopyFrom(self._ends[0])
                message.finished.usage.completion_tokens = sum(e.usage.completion_tokens for e in self._ends.values())
        return out


def _position(at: PositionLogprobs) -> common_pb2.PositionLogprobs:
    return common_pb2.PositionLogprobs(chosen=_token(at.chosen), top=map(_token, at.top))


def _token(t: TokenLogprob) -> common_pb2.TokenLogprob:
    return common_pb2.TokenLogprob(token_id=t.token_id, logprob=t.logprob, rank=t.rank)
