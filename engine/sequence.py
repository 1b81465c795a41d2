"""Sequence: the engine's mutable state of one token stream, and the table of its legal transitions.

A sequence has known tokens (prompt, emitted, sampled) and computed ones; scheduling is the second catching up with
the first. Nothing here says prefill or decode.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from pdserve.core.request import FinishReason, PositionLogprobs, Request
from pdserve.engine.step import PromptLogprobs, PromptPositions, ScheduledSequence


class SequenceState(StrEnum):
    """Where a sequence stands."""

    WAITING = "waiting"
    WAITING_FORK = "waiting_fork"
    WAITING_KV = "waiting_kv"
    RUNNING = "running"
    HANDOFF = "handoff"
    PREEMPTED = "preempted"
    FINISHED = "finished"


TRANSITIONS: Mapping[SequenceState, frozenset[SequenceState]] = {
    # an activated reservation is WAITING with its pages; they may be taken back while it waits
    SequenceState.WAITING: frozenset(
        {
            SequenceState.WAITING_FORK,
            SequenceState.WAITING_KV,
            SequenceState.RUNNING,
            SequenceState.PREEMPTED,
            SequenceState.FINISHED,
        }
    ),
    SequenceState.WAITING_FORK: frozenset({SequenceState.WAITING, SequenceState.FINISHED}),
    SequenceState.WAITING_KV: frozenset({SequenceState.WAITING, SequenceState.FINISHED}),
    SequenceState.RUNNING: frozenset({SequenceState.HANDOFF, SequenceState.PREEMPTED, SequenceState.FINISHED}),
    # only while no destination has reserved, so that no reader can exist
    SequenceState.HANDOFF: frozenset({SequenceState.PREEMPTED, SequenceState.FINISHED}),
    SequenceState.PREEMPTED: frozenset({SequenceState.WAITING}),
    SequenceState.FINISHED: frozenset(),
}


class Sequence:
    """One token stream on this engine.

    Args:
        request: What was asked.
        order: Age: lower is older, unique on this engine; hand-offs without a destination are younger than all others.
        max_model_len: Most tokens that the engine lets a sequence have.
        handoff: It ends after its first sampled token, its pages leased.
        reserved: With handoff: the destination has its pages.

    Attributes:
        tokens: Known tokens: prompt, emitted, sampled.
        num_initial: Prompt and emitted tokens.
        num_computed: Leading tokens whose KV exists.
        goal: Tokens to compute before something is sampled or handed off.
        page_table: Pages in order; capacity is the tokens that they hold.
        host_pages: Where the KV of the computed tokens lies while it is swapped out, in order; see `engine.swap`.
        num_told: Leading prompt positions whose log-probabilities were told; the first has none.
        max_len: Known tokens at which it ends with LENGTH.
        min_len: Known tokens up to which no token ends it.
        stop_ids: Tokens that end it.
        forks: Sequences of the same prompt that wait (WAITING_FORK) until this one has computed it.
        copy_from: A page to be copied into its first page that is not shared, when it starts; held until then. Its
            own pages are not worth moving before that: take them back.
        num_announced: Leading pages told as ready.
        digests: Of its leading full pages, as far as somebody asked; see `prefix_cache`.
        num_published: Leading pages that others may share; of pages set aside, those that were cached.
        num_cached: Prompt tokens had by prefix reuse when it, or the one that it forks from, first got pages.
        granted: WAITING_KV: pages are set aside.
        expires_s: WAITING_KV: when a reservation without pages is refused.
        released: Handoff: no reader will come.
        shared: Handoff: other choices need the prompt's pages too, so that its own end is not theirs.
        started: Its first step has run.
        arrived: The policy knows it.
        admitted: It has started once, or was granted its reservation: from then on it goes by age, not by policy.
        rank: Place in the policy's order, set when it arrives.
        long: Set by the waiting queue: its prompt counts as long.
    """

    __slots__ = (
        "admitted",
        "arrived",
        "capacity",
        "copy_from",
        "digests",
        "expires_s",
        "forks",
        "goal",
        "granted",
        "handoff",
        "host_pages",
        "key",
        "long",
        "max_len",
        "min_len",
        "num_announced",
        "num_cached",
        "num_computed",
        "num_initial",
        "num_prompt",
        "num_published",
        "num_told",
        "order",
        "page_table",
        "rank",
        "released",
        "request",
        "reserved",
        "sampling",
        "shared",
        "started",
        "state",
        "stop_ids",
        "tokens",
    )

    def __init__(
        self, request: Request, order: tuple[float, ...], max_model_len: int, handoff: bool, reserved: bool
    ) -> None:
        sampling = request.sampling
        self.key = request.key
        self.request = request
        self.sampling = sampling
        self.state = SequenceState.WAITING
        self.order = order
        self.handoff = handoff
        self.reserved = reserved
        self.tokens = [*request.prompt_token_ids, *request.emitted_token_ids]
        self.num_prompt = len(request.prompt_token_ids)
        self.num_initial = len(self.tokens)
        self.num_computed = 0
        self.goal = self.num_initial
        self.page_table: list[int] = []
        self.capacity = 0
        self.host_pages: list[int] = []
        self.max_len = (
            max_model_len if sampling.max_tokens is None else min(max_model_len, self.num_prompt + sampling.max_tokens)
        )
        self.num_told = 1
        self.min_len = self.num_prompt + sampling.min_tokens
        eos = frozenset() if sampling.ignore_eos else request.eos_token_ids
        self.stop_ids = eos | frozenset(sampling.stop_token_ids)
        self.forks: tuple[Sequence, ...] = ()
        self.copy_from: int | None = None
        self.num_announced = 0
        self.digests: list[bytes] = []
        self.num_published = 0
        self.num_cached: int | None = None
        self.granted = False
        self.expires_s = 0.0
        self.released = False
        self.shared = handoff and sampling.n > 1
        self.started = False
        self.arrived = False
        self.admitted = False
        self.rank = 0.0
        self.long = False

    def move(self, state: SequenceState) -> None:
        """Changes the state; an illegal change is a bug."""
        assert state in TRANSITIONS[self.state], f"sequence {self.key}: {self.state} -> {state}"
        self.state = state

    def check(self) -> None:
        """Proves that its numbers agree with each other."""
        assert self.num_computed <= len(self.tokens) <= max(self.max_len, self.num_initial)
        assert self.num_computed <= self.capacity or self.host_pages
        assert not self.host_pages or self.state is SequenceState.WAITING

    def finish_reason(self) -> FinishReason | None:
        """Why the newest token ends the sequence, or None."""
        if self.tokens[-1] in self.stop_ids and len(self.tokens) > self.min_len:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.max_len else None

    def item(self, num_tokens: int) -> ScheduledSequence:
        """A step's work: so many tokens after the computed ones; at the end of the known tokens one is sampled."""
        start = self.num_computed
        end = start + num_tokens
        tokens = self.tokens
        return ScheduledSequence(
            self.key,
            start,
            tokens[start:end],
            self.page_table,
            self.sampling if end == len(tokens) else None,
            len(tokens) - self.num_prompt,
            tokens,
            self.num_prompt,
            None if self.sampling.prompt_logprobs is None else self._prompt_positions(start, end),
        )

    def _prompt_positions(self, start: int, end: int) -> PromptPositions | None:
        """What a step of the tokens [start, end) tells of the prompt."""
        assert self.sampling.prompt_logprobs is not None
        first, last = max(start + 1, self.num_told), min(end, self.num_prompt - 1)
        return PromptPositions(first, last, self.sampling.prompt_logprobs) if first <= last else None

    def tell_prompt(self, asked: PromptPositions | None, logprobs: tuple[PositionLogprobs, ...]) -> PromptLogprobs:
        """Notes that log-probabilities of the prompt are told; returns the event that does it."""
        assert asked is not None and asked.first == self.num_told, f"sequence {self.key}: prompt positions left out"
        self.num_told += len(logprobs)
        return PromptLogprobs(self.key, asked.first, logprobs)

    @property
    def scores_prompt(self) -> bool:
        """Log-probabilities of its prompt are still to be told."""
        return self.sampling.prompt_logprobs is not None and self.num_told < self.num_prompt

    @property
    def unreserved(self) -> bool:
        """A hand-off whose destination has no pages yet: nobody but this engine reaches its pages."""
        return self.handoff and not self.reserved

    def refusal(self, max_model_len: int) -> tuple[str, str] | None:
        """Why it can never run: reason and message; None when it can."""
        if self.num_prompt == 0:
            return "EMPTY_PROMPT", "the prompt has no tokens; send at least one"
        if self.num_initial >= max_model_len:
            return (
                "PROMPT_TOO_LONG",
                f"the prompt and the tokens already emitted are {self.num_initial} tokens; with one more they must fit "
                f"into {max_model_len} (the model's length, or what the KV pages hold)",
            )
        if self.num_initial >= self.max_len:
            return "NOTHING_TO_GENERATE", f"all of max_tokens={self.sampling.max_tokens} have been emitted already"
        return None
