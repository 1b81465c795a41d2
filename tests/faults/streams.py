"""Streams in threads, each checked token by token against what a right engine gives."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

from pdserve.client import Client
from pdserve.client.errors import PdserveError
from pdserve.engine.fake import expected_tokens
from tests.support.deployment import wait_until

JOIN_S = 90.0


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(1000 * seed + length).choices(range(256), k=length)


class BackgroundStream:
    """One request in a thread.

    Attributes:
        tokens: What came so far.
        error: With what it failed; None while it runs and when it ended well.
        ended_s: Monotonic time of the end; None while it runs.
    """

    def __init__(self, client: Client, prompt_tokens: int, max_tokens: int, seed: int = 0) -> None:
        self._prompt, self._max_tokens = prompt_of(prompt_tokens, seed), max_tokens
        self.tokens: list[int] = []
        self.error: PdserveError | None = None
        self.ended_s: float | None = None
        self._stream = client.stream(
            prompt_token_ids=self._prompt, max_tokens=max_tokens, ignore_eos=True, timeout_s=JOIN_S
        )
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            for delta in self._stream:
                self.tokens += delta.token_ids
        except PdserveError as e:
            self.error = e
        finally:
            self.ended_s = time.monotonic()

    def end(self) -> PdserveError | None:
        """Waits for the end, proves that no token was wrong and none is missing in a good stream; gives the error."""
        self._thread.join(JOIN_S)
        assert not self._thread.is_alive(), "the stream hangs"
        expected = expected_tokens(self._prompt, self._max_tokens)
        assert self.tokens == expected[: len(self.tokens)], "wrong tokens"
        assert self.error is not None or len(self.tokens) == self._max_tokens, "a cut stream looks finished"
        return self.error


def wait_begun(streams: Sequence[BackgroundStream], num_tokens: int = 1) -> None:
    """Waits until each stream has so many tokens; one that fails before fails the test with its error."""

    def begun() -> bool:
        for stream in streams:
            assert stream.error is None, stream.error
        return all(len(stream.tokens) >= num_tokens for stream in streams)

    wait_until(begun, 20, f"{num_tokens} tokens of each stream")
