"""KV reservation as it was before paging, for comparison: contiguous memory, set aside when a request starts.

`MaximumLength` reserves the longest sequence there may be; `Buddy` a power of two that holds the prompt and an output
rounded up to a power of two. Source: the baselines Orca (Max) and Orca (Pow2) of Kwon et al., "Efficient Memory
Management for Large Language Model Serving with PagedAttention", SOSP 2023, section 6.1. Nothing here is in the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pdserve.bench.workload import TraceRow


class Reservation(Protocol):
    """Gives contiguous memory to requests.

    Attributes:
        reserved: Tokens set aside now.
    """

    reserved: int

    def reserve(self, input_tokens: int, output_tokens: int) -> int | None:
        """Sets memory aside.

        Returns:
            What `release` wants; None when there is no room now.
        """
        ...

    def release(self, handle: int) -> None:
        """Gives it back."""
        ...


class MaximumLength:
    """One slot of the greatest length per sequence.

    Args:
        num_tokens: Memory.
        max_len: Tokens of a slot.
    """

    def __init__(self, num_tokens: int, max_len: int) -> None:
        self._free, self._max_len = num_tokens // max_len, max_len
        self.reserved = 0

    def reserve(self, input_tokens: int, output_tokens: int) -> int | None:
        """See `Reservation`."""
        assert input_tokens + output_tokens <= self._max_len
        if not self._free:
            return None
        self._free -= 1
        self.reserved += self._max_len
        return 0

    def release(self, handle: int) -> None:
        """See `Reservation`."""
        self._free += 1
        self.reserved -= self._max_len


class Buddy:
    """Blocks of power-of-two sizes: a block splits into two buddies, and two free buddies become one again.

    Args:
        num_tokens: Memory, a power of two.
    """

    def __init__(self, num_tokens: int) -> None:
        assert num_tokens == power_of_two(num_tokens)
        self._num_tokens = num_tokens
        self._free: dict[int, set[int]] = {num_tokens: {0}}  # size -> starts
        self._taken: dict[int, int] = {}  # start -> size
        self.reserved = 0

    def reserve(self, input_tokens: int, output_tokens: int) -> int | None:
        """See `Reservation`."""
        wanted = power_of_two(input_tokens + power_of_two(output_tokens))
        size = min((s for s, starts in self._free.items() if starts and s >= wanted), default=None)
        if size is None:
            return None
        start = min(self._free[size])
        self._free[size].remove(start)
        while size > wanted:
            size //= 2
            self._free.setdefault(size, set()).add(start + size)
        self._taken[start] = size
        self.reserved += size
        return start

    def release(self, handle: int) -> None:
        """See `Reservation`."""
        size = self._taken.pop(handle)
        self.reserved -= size
        while size < self._num_tokens and handle ^ size in self._free.setdefault(size, set()):
            self._free[size].remove(handle ^ size)
            handle, size = min(handle, handle ^ size), size * 2
        self._free.setdefault(size, set()).add(handle)

    def check(self) -> None:
        """Proves that taken and free blocks cover the memory once."""
        blocks = sorted([(b, s) for s, starts in self._free.items() for b in starts] + list(self._taken.items()))
        at = 0
        for start, size in blocks:
            assert start == at and start % size == 0
            at += size
        assert at == self._num_tokens and sum(self._taken.values()) == self.reserved


@dataclass(frozen=True, slots=True)
class Use:
    """Memory use, averaged over the time in which any was reserved.

    Attributes:
        held_of_reserved: Tokens held / tokens reserved.
        held_of_all: Tokens held / tokens of the memory.
        num_running: Sequences.
        seconds: Virtual, from the first arrival to the last end.
    """

    held_of_reserved: float
    held_of_all: float
    num_running: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory use in one step."""

    seconds: float
    held: int
    reserved: int
    num_running: int


def averaged(samples: Sequence[Sample], num_tokens: int, seconds: float) -> Use:
    """Averages over time.

    Args:
        samples: Steps.
        num_tokens: Memory.
        seconds: Of the whole run.
    """
    time = sum(s.seconds for s in samples)
    return Use(
        sum(s.seconds * s.held / s.reserved for s in samples) / time,
        sum(s.seconds * s.held for s in samples) / time / num_tokens,
        sum(s.seconds * s.num_running for s in samples) / time,
        seconds,
    )


@dataclass(slots=True)
class _Running:
    handle: int
    prompt_left: int
    held: int
    output_left: int


def simulate(
    rows: Sequence[TraceRow],
    memory: Reservation,
    num_tokens: int,
    max_num_seqs: int,
    token_budget: int,
    step_s: float,
    token_s: float,
) -> Use:
    """Continuous batching over contiguous memory, first come first served, in virtual time.

    Args:
        rows: Requests in the order of arrival.
        memory: Fresh.
        num_tokens: Of the memory.
        max_num_seqs: Sequences that run at once.
        token_budget: Tokens of a step: decodes first, then prompts.
        step_s: Seconds of a step.
        token_s: Seconds more for each token.
    """
    now, waiting, running = 0.0, deque(rows), list[_Running]()
    samples: list[Sample] = []
    while waiting or running:
        if not running:
            now = max(now, waiting[0].arrival_s or 0.0)
        while waiting and (waiting[0].arrival_s or 0.0) <= now and len(running) < max_num_seqs:
            row = waiting[0]
            if (handle := memory.reserve(row.input_tokens, row.output_tokens)) is None:
                break
            waiting.popleft()
            running.append(_Running(handle, row.input_tokens, 0, row.output_tokens))
        assert running, f"a request of {waiting[0]} does not fit"
        tokens = _step(running, token_budget)
        held = sum(seq.held for seq in running)
        samples.append(Sample(step_s + token_s * tokens, held, memory.reserved, len(running)))
        now += samples[-1].seconds
        for seq in running:
            if not seq.output_left:
                memory.release(seq.handle)
        running = [seq for seq in running if seq.output_left]
    return averaged(samples, num_tokens, now)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def _step(running: Sequence[_Running], token_budget: int) -> int:
    """Computes one step; returns its tokens. The last chunk of a prompt gives the first output token."""
    decodes = [seq for seq in running if not seq.prompt_left]
    for seq in decodes:
        seq.held += 1
        seq.output_left -= 1
    budget = max(0, token_budget - len(decodes))
    tokens = len(decodes)
    for seq in running:
        if seq.prompt_left and budget:
            num = min(seq.prompt_left, budget)
            seq.prompt_left -= num
            seq.held += num
            seq.output_left -= not seq.prompt_left
            budget -= num
            tokens += num
    return tokens
