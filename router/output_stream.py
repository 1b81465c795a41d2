"""What a request gives to its client: news of its prompt, if asked for, each choice's deltas in order, one end.

The request's life never waits for the reader. What a slow reader has not taken is merged, so that the number of waiting
messages stays small; its tokens are bounded by the request's `max_tokens`, what is told of its prompt by admission.
"""

from __future__ import annotations

import asyncio
from collections import deque

from pdserve.core.errors import PdserveError
from pdserve.v1 import common_pb2, inference_pb2

MAX_MERGED_TOKENS = 512

Terminal = inference_pb2.Finished | PdserveError


class OutputStream:
    """One writer (the request's life), one reader (the RPC)."""

    def __init__(self) -> None:
        self._prompt: deque[common_pb2.PromptLogprobs] = deque()
        self._deltas: deque[common_pb2.Delta] = deque()
        self._newest: dict[int, common_pb2.Delta] = {}  # of those that wait, by choice
        self._terminal: Terminal | None = None
        self._news = asyncio.Event()

    def put_prompt(self, told: common_pb2.PromptLogprobs) -> None:
        """Adds what is told of the prompt; before the first delta."""
        assert not self._deltas and self._terminal is None, "of the prompt after output"
        self._prompt.append(told)
        self._news.set()

    def put(self, delta: common_pb2.Delta) -> None:
        """Adds output. The delta belongs to the stream from now on."""
        assert self._terminal is None, "output after the terminal event"
        last = self._newest.get(delta.choice)
        if last is not None and len(last.token_ids) + len(delta.token_ids) <= MAX_MERGED_TOKENS:
            last.token_ids.extend(delta.token_ids)
            last.text += delta.text
            last.logprobs.extend(delta.logprobs)
            last.finish_reason, last.stop_reason = delta.finish_reason, delta.stop_reason
        else:
            self._deltas.append(delta)
            self._newest[delta.choice] = delta
        self._news.set()

    def finish(self, terminal: Terminal) -> None:
        """Ends the stream; only once."""
        assert self._terminal is None, "a second terminal event"
        self._terminal = terminal
        self._news.set()

    async def next(self) -> common_pb2.PromptLogprobs | common_pb2.Delta | inference_pb2.Finished:
        """What is told of the prompt, then the next delta, or Finished after the last one.

        Raises:
            PdserveError: The request failed; nothing follows.
        """
        while not (self._prompt or self._deltas) and self._terminal is None:
            self._news.clear()
            await self._news.wait()
        if self._prompt:
            return self._prompt.popleft()
        if self._deltas:
            delta = self._deltas.popleft()
            if self._newest[delta.choice] is delta:
                del self._newest[delta.choice]
            return delta
        if isinstance(self._terminal, PdserveError):
            raise self._terminal
        assert self._terminal is not None
        return self._terminal
