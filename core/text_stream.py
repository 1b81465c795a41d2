"""TextStream: token ids in, text out, as soon as the text is certain.

Tokens are always handled one by one, so the text, and where a stop string ends it, do not depend on how the tokens were
grouped into pushes: a decode worker rebuilds the state of a sequence by pushing its earlier tokens.

    window   the last tokens, decoded together, since some decoders look at a token's neighbours
    held     text not handed out yet, because a stop string may begin in it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.core.request import FinishReason
from pdserve.core.sampling import SamplingParams
from pdserve.core.tokenizer import Tokenizer

_INCOMPLETE = "�"  # what decoders show for a character that lacks bytes


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that became certain.

    Attributes:
        text: New text; may be empty.
        stop_reason: The stop string that ended the stream, or None.
        num_tokens: Tokens of the push that were used: all of them, or up to and with the one that completed the stop
            string.
    """

    text: str
    stop_reason: str | None = None
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StreamNews:
    """What new tokens mean to the reader of a stream.

    Attributes:
        text: Text that became certain; may be empty.
        num_tokens: Tokens that count: all of them, or up to and with the one that completed a stop string.
        finish_reason: Why the stream ended; None: it goes on.
        stop_reason: The stop string, or the stop token as decimal text, that ended it; None if neither did.
        stopped_early: True: a stop string ended it, which the engine does not know.
    """

    text: str
    num_tokens: int
    finish_reason: FinishReason | None
    stop_reason: str | None
    stopped_early: bool


class TextStream:
    """Detokenises one output stream and matches its stop strings.

    A stop string that is complete within the first `min_tokens` tokens is text like any other.

    Args:
        tokenizer: The model's tokenizer.
        params: `stop`, `include_stop_str_in_output`, `min_tokens` and `skip_special_tokens` are read.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = _Detokenizer(tokenizer, params.skip_special_tokens)
        self._stop = params.stop
        self._include_stop = params.include_stop_str_in_output
        self._num_free = params.min_tokens
        self._num_tokens = 0
        self._held = ""
        self._ended = False

    def advance(
        self, token_ids: Sequence[int], finish_reason: FinishReason | None = None, stop_token_id: int | None = None
    ) -> StreamNews:
        """Takes what the engine gave in one step; after an end nothing more may follow.

        Args:
            token_ids: New tokens.
            finish_reason: Set when the engine ended the stream with them.
            stop_token_id: The token that ended it, if one did.
        """
        delta = self.push(token_ids)
        text, stop = delta.text, delta.stop_reason
        if finish_reason is not None and stop is None:
            last = self.finish()
            text, stop = text + last.text, last.stop_reason
        if stop is not None:
            return StreamNews(text, delta.num_tokens, FinishReason.STOP, stop, finish_reason is None)
        matched = None if stop_token_id is None else str(stop_token_id)
        return StreamNews(text, delta.num_tokens, finish_reason, matched, False)

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Takes new tokens. After a stop string matched, further pushes give nothing.

        Returns:
            The text that became certain; with `stop_reason` when a stop string is complete.
        """
        if self._ended:
            return TextDelta("")
        out = ""
        for used, token_id in enumerate(token_ids, 1):
            self._num_tokens += 1
            text, stop = self._take(self._detokenizer.push(token_id))
            out += text
            if stop is not None:
                return TextDelta(out, stop, used)
        return TextDelta(out, None, len(token_ids))

    def finish(self) -> TextDelta:
        """Ends the stream: gives what was held back. Idempotent."""
        if self._ended:
            return TextDelta("")
        text, stop = self._take(self._detokenizer.finish())
        if stop is None:
            text, self._held = text + self._held, ""
        self._ended = True
        return TextDelta(text, stop)

    def _take(self, new: str) -> tuple[str, str | None]:
        """Adds certain text; returns what may be handed out and the stop string that it completed."""
        if not self._stop:
            return new, None
        if not new:
            return "", None
        text = self._held + new
        if self._num_tokens > self._num_free and (match := first_stop(text, self._stop, len(self._held))):
            start, stop = match
            self._ended, self._held = True, ""
            return text[: start + len(stop) if self._include_stop else start], stop
        keep = _possible_start(text, self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None


def first_stop(text: str, stops: Sequence[str], num_passed: int = 0) -> tuple[int, str] | None:
    """The stop string that is complete first in reading order; of several that end together the longest.

    Args:
        text: To search.
        stops: Stop strings, not empty.
        num_passed: Leading characters of the text within which no stop string may end.

    Returns:
        Its start and itself, or None.
    """
    found = [(at + len(s), at, s) for s in stops if (at := text.find(s, max(0, num_passed - len(s) + 1))) >= 0]
    if not found:
        return None
    _, start, stop = min(found)
    return start, stop


def _possible_start(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` with which a stop string begins."""
    longest = min(len(text), max(map(len, stops)) - 1)
    for n in range(longest, 0, -1):
        if any(len(s) > n and s.startswith(text[len(text) - n :]) for s in stops):
            return n
    return 0


def echo_text(tokenizer: Tokenizer, prompt: object, token_ids: Sequence[int], params: SamplingParams) -> str:
    """What `echo` puts before the output.

    Args:
        tokenizer: The model's tokenizer.
        prompt: As it was sent.
        token_ids: What it became.
        params: `echo` and `skip_special_tokens` are read.

    Returns:
        A text as it was sent; of chats and token ids the text of the tokens; empty without `echo`.
    """
    if not params.echo:
        return ""
    if isinstance(prompt, str):
        return prompt
    return tokenizer.decode(token_ids, skip_special_tokens=params.skip_special_tokens)


class _Detokenizer:
    """Turns tokens into text that later tokens cannot change.

    The window holds the tokens of the last certain text (context) and those after it, whose text is still uncertain.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._num_context = 0
        self._context_text = ""

    def push(self, token_id: int) -> str:
        if not self._tokenizer.has_text(token_id, self._skip):
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text or text.endswith(_INCOMPLETE) or text == self._context_text:
            return ""
        return self._advance(text)

    def finish(self) -> str:
        if len(self._window) == self._num_context:
            return ""
        return self._advance(self._decode(self._window))

    def _advance(self, text: str) -> str:
        fresh = self._window[self._num_context :]
        fresh_text = self._decode(fresh)
        # A byte-fallback decoder gives up on a whole run of bytes when one is wrong; its valid part is out already.
        new = text[len(self._context_text) :] if text.startswith(self._context_text) else fresh_text
        self._window, self._num_context, self._context_text = fresh, len(fresh), fresh_text
        return new

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
