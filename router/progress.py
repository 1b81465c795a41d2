"""What was released of one request, and when: output indices, timings and usage. Lives over attempts."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.core.clock import Clock
from pdserve.router.output_stream import OutputStream
from pdserve.router.recorder import Recorder
from pdserve.router.trace import RequestTrace
from pdserve.v1 import common_pb2

_WORKER_TIMINGS = (
    *("prefill_s", "decode_s", "transfer_s", "transfer_hidden_s", "transfer_bytes", "transfer_exposed_s"),
    *("transfer_pull_s", "transfer_pull_hidden_s", "transfer_last_pages", "transfer_last_bytes"),
)


@dataclass(slots=True)
class Released:
    """What was released of one choice.

    Attributes:
        num_tokens: Tokens; also the next output index.
        num_chars: Characters of text; also the next text offset.
        last_s: When its last tokens were.
    """

    num_tokens: int = 0
    num_chars: int = 0
    last_s: float | None = None


class Progress:
    """Released output and measured times of one request.

    Args:
        clock: Time of releases.
        arrival_s: When the request arrived.
        stream: Where deltas go.
        recorder: Hears of the first token.
        trace: Hears of every release.
        num_choices: Output streams of the request.

    Attributes:
        num_tokens: Tokens released, of all choices.
        choices: The same for each.
        num_told: Leading prompt positions whose log-probabilities were released; the first has none.
        queue_s: Time in the router's queue, over all attempts.
    """

    def __init__(
        self,
        clock: Clock,
        arrival_s: float,
        stream: OutputStream,
        recorder: Recorder,
        trace: RequestTrace,
        num_choices: int = 1,
    ) -> None:
        self.num_tokens = 0
        self.choices = [Released() for _ in range(num_choices)]
        self.num_told = 1
        self._num_cached_tokens: int | None = None
        self.queue_s = 0.0
        self._clock = clock
        self._arrival_s = arrival_s
        self._recorder = recorder
        self._stream = stream
        self._trace = trace
        self._workers = common_pb2.Timings()
        self._first_s: float | None = None
        self._second_s: float | None = None
        self._last_s = arrival_s

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens had by prefix reuse, as the first worker that computed the prompt counted them.

        What later attempts and decode workers find in their caches is not counted.
        """
        return self._num_cached_tokens or 0

    def count_cached(self, num_tokens: int) -> None:
        """Takes over what a worker found in its cache of the prompt, unless another one has counted before."""
        if self._num_cached_tokens is None:
            self._num_cached_tokens = num_tokens

    def tell_prompt(self, told: common_pb2.PromptLogprobs) -> None:
        """Passes on what an attempt tells of the prompt; what an earlier attempt told is left out.

        Args:
            told: From a position of at most `num_told` on; belongs to the stream from now on.
        """
        del told.logprobs[: self.num_told - told.position]
        told.position = self.num_told
        if told.logprobs:
            self.num_told += len(told.logprobs)
            self._stream.put_prompt(told)

    def release(self, delta: common_pb2.Delta, num_cached_tokens: int = 0) -> None:
        """Passes a delta, whose index and text offset were checked, on to the client.

        Args:
            delta: New output.
            num_cached_tokens: What the worker said with it; counts with the first one only.
        """
        at_s = self._clock.now()
        count = len(delta.token_ids)
        choice = self.choices[delta.choice]
        if count:
            if self._first_s is None:
                self._first_s = at_s
                self.count_cached(num_cached_tokens)
                self._recorder.decoding()
                self._trace.first_token(at_s - self._arrival_s)
            else:
                self._second_s = at_s if self._second_s is None else self._second_s
            self._trace.tokens(count, None if choice.last_s is None else at_s - choice.last_s)
            self._last_s = choice.last_s = at_s
            self.num_tokens += count
            choice.num_tokens += count
        choice.num_chars += len(delta.text)
        if count or delta.text or delta.finish_reason:
            self._stream.put(delta)

    def measured(self, timings: common_pb2.Timings) -> None:
        """Takes over durations that a worker measured; the worker's queue adds to the router's."""
        self._workers.queue_s += timings.queue_s
        for name in _WORKER_TIMINGS:
            if value := getattr(timings, name):
                setattr(self._workers, name, value)

    def timings(self) -> common_pb2.Timings:
        """Where the time went until now."""
        t = common_pb2.Timings()
        t.CopyFrom(self._workers)
        t.queue_s += self.queue_s
        t.e2e_s = self._clock.now() - self._arrival_s
        if self._first_s is not None:
            t.ttft_s = self._first_s - self._arrival_s
            # Else nothing was handed off between the two, for with several choices it was before the first.
            if self._second_s is not None and t.transfer_bytes and len(self.choices) == 1:
                t.handoff_gap_s = self._second_s - self._first_s
            if (longest := max(c.num_tokens for c in self.choices)) > 1:  # they come side by side
                t.tpot_s = (self._last_s - self._first_s) / (longest - 1)
        return t
