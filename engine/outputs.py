"""The output of embedded requests: what a caller gets, and how it is put together from the engine's events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.core.errors import PdserveError
from pdserve.core.request import FinishReason, PositionLogprobs, Request
from pdserve.core.text_stream import TextStream
from pdserve.core.tokenizer import Tokenizer
from pdserve.engine.step import TokensSampled


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request.

    Attributes:
        prompt_tokens: Of the prompt; counted once, however many choices share it.
        completion_tokens: Of the output of all choices.
        cached_tokens: Of the prompt, had by prefix reuse.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """New output of one choice.

    Attributes:
        index: Output index of the first of `token_ids`.
        token_ids: New tokens.
        text: Text that became certain; may be empty.
        logprobs: One per token, or empty when not asked for.
        finish_reason: Set in the choice's last delta.
        choice: Which of the request's n output streams.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """All output of one of a request's n streams.

    Attributes:
        text: The text, without stop strings and special tokens unless asked for.
        token_ids: The tokens, with the one that ended the stream.
        finish_reason: Why it ended.
        stop_reason: The stop string, or the stop token as decimal text, that matched; None if neither.
        logprobs: One per token, or empty when not asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | None
    logprobs: tuple[PositionLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """All output of one request. What one choice has is here too, of the first: that is all of it unless n > 1.

    Attributes:
        prompt_token_ids: What the prompt became.
        choices: `SamplingParams.n` of them.
        usage: Token counts.
        prompt_logprobs: One per prompt token, of which the first is None; empty when not asked for.
    """

    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    usage: Usage
    prompt_logprobs: tuple[PositionLogprobs | None, ...] = ()

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of the first choice."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Of the first choice."""
        return self.choices[0].finish_reason

    @property
    def stop_reason(self) -> str | None:
        """Of the first choice."""
        return self.choices[0].stop_reason

    @property
    def logprobs(self) -> tuple[PositionLogprobs, ...]:
        """Of the first choice."""
        return self.choices[0].logprobs


class ChoiceOutput:
    """One choice's output so far, and how much of it a stream has taken.

    Args:
        request: Of this choice alone.
        tokenizer: The model's tokenizer.
        choice: Its index.
        echo: Text of the prompt, if it is to stand before the output's.

    Attributes:
        finish_reason: Why it ended; None: it goes on.
        error: Why it failed.
        prompt_logprobs: Of the prompt so far, from its second token on.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, choice: int, echo: str = "") -> None:
        self.key = request.key
        self.finish_reason: FinishReason | None = None
        self.error: PdserveError | None = None
        self.num_cached = 0
        self.prompt_logprobs: list[PositionLogprobs] = []
        self.token_ids: list[int] = []
        self._choice = choice
        self._text_stream = TextStream(tokenizer, request.sampling)
        self._text = echo
        self._logprobs: list[PositionLogprobs] = []
        self._stop_reason: str | None = None
        self._num_taken_tokens = 0
        self._num_taken_chars = 0
        self._taken = False

    @property
    def ended(self) -> bool:
        """Nothing more will come."""
        return self.finish_reason is not None or self.error is not None

    @property
    def news(self) -> bool:
        """Says whether a stream has something to take."""
        return len(self.token_ids) > self._num_taken_tokens or (self.finish_reason is not None and not self._taken)

    def push(self, event: TokensSampled) -> bool:
        """Takes new tokens; True when a stop string ended the output, which the engine does not know."""
        news = self._text_stream.advance(event.token_ids, event.finish_reason, event.stop_token_id)
        self.token_ids.extend(event.token_ids[: news.num_tokens])
        self._logprobs.extend(event.logprobs[: news.num_tokens])
        self.num_cached = max(self.num_cached, event.num_cached_tokens)
        self._text += news.text
        self.finish_reason, self._stop_reason = news.finish_reason, news.stop_reason
        return news.stopped_early

    def take(self) -> OutputDelta:
        """What is new since the last call."""
        index = self._num_taken_tokens
        delta = OutputDelta(
            index,
            tuple(self.token_ids[index:]),
            self._text[self._num_taken_chars :],
            tuple(self._logprobs[index:]),
            self.finish_reason,
            self._choice,
        )
        self._num_taken_tokens, self._num_taken_chars = len(self.token_ids), len(self._text)
        self._taken = self.finish_reason is not None
        return delta

    def choice(self) -> Choice:
        """All of it; it has ended."""
        assert self.finish_reason is not None
        return Choice(self._text, tuple(self.token_ids), self.finish_reason, self._stop_reason, tuple(self._logprobs))


class RequestOutput:
    """A request's choices. It fails as a whole with the first of them that does.

    Args:
        request: With `sampling.n` choices.
        choices: Its requests, one per choice; see `Request.choices`.
        tokenizer: The model's tokenizer.
        echo: Text of the prompt, if it is to stand before the output's.
    """

    def __init__(self, request: Request, choices: Sequence[Request], tokenizer: Tokenizer, echo: str = "") -> None:
        self.choices = [ChoiceOutput(choice, tokenizer, i, echo) for i, choice in enumerate(choices)]
        self._prompt_token_ids = request.prompt_token_ids
        self._scored = request.sampling.prompt_logprobs is not None

    @property
    def error(self) -> PdserveError | None:
        """Why it failed."""
        return next((c.error for c in self.choices if c.error is not None), None)

    @property
    def ended(self) -> bool:
        """Nothing more will come of any choice, or one failed."""
        return all(c.ended for c in self.choices) or self.error is not None

    @property
    def num_tokens(self) -> int:
        """Output tokens so far, of all choices."""
        return sum(len(c.token_ids) for c in self.choices)

    @property
    def news(self) -> ChoiceOutput | None:
        """A choice that a stream has something to take of; None: of no one."""
        return next((c for c in self.choices if c.news), None)

    def completion(self) -> Completion:
        """All of it; every choice has ended."""
        usage = Usage(
            prompt_tokens=len(self._prompt_token_ids),
            completion_tokens=self.num_tokens,
            cached_tokens=self.choices[0].num_cached,
        )
        prompt = (None, *self.choices[0].prompt_logprobs) if self._scored else ()
        return Completion(self._prompt_token_ids, tuple(c.choice() for c in self.choices), usage, prompt)
