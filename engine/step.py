"""The contract between the side that decides (scheduler) and the side that computes (runner). Data only.

One step is three calls:

    output = scheduler.schedule(now)         # SchedulerOutput: plain ints
    result = runner.execute(output)          # RunnerOutput: sampled tokens, after the device fence
    scheduler.update(output, result)         # events: scheduler.take_events()
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, TypeVar, dataclass_transform

from pdserve.core.errors import EngineError
from pdserve.core.request import FinishReason, PositionLogprobs, Request
from pdserve.core.sampling import SamplingParams

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def _hot(cls: type[T]) -> type[T]:
    """A dataclass that is frozen for the type checker only: one is made per sequence and step, and `frozen=True`
    makes that several times as slow."""
    return dataclass(slots=True)(cls)


@dataclass(frozen=True, slots=True)
class PromptPositions:
    """Prompt positions whose log-probabilities a step tells: those that its tokens predict and no step told before.

    Attributes:
        first: First of them, at least 1: nothing predicts the first token.
        last: Last of them.
        num_top: Likeliest tokens to report at each.
    """

    first: int
    last: int
    num_top: int


@_hot
class ScheduledSequence:
    """What one sequence computes in one step.

    Attributes:
        key: The sequence's `Request.key`.
        start: Tokens computed before this step (position of the first token of `token_ids`).
        token_ids: Tokens to compute, in order; at least one.
        page_table: Page ids in order, covering at least start + len(token_ids) tokens. Read-only for the runner.
        sampling: Set when a token is sampled from the last position; None for a chunk that ends before the known
            tokens do.
        output_index: Output index of the token to sample; meaningless when `sampling` is None.
        known: All known tokens: the prompt, then the output so far. Read-only for the runner; it grows between steps.
        num_prompt: Leading tokens of `known` that are the prompt.
        prompt: Positions of the prompt to tell the log-probabilities of.
    """

    key: str
    start: int
    token_ids: Seq[int]
    page_table: Seq[int]
    sampling: SamplingParams | None
    output_index: int
    known: Seq[int]
    num_prompt: int
    prompt: PromptPositions | None = None


class PageCopyKind(StrEnum):
    """Between which memories a page is copied."""

    SWAP_OUT = "swap_out"  # pool to host
    SWAP_IN = "swap_in"  # host to pool
    COPY = "copy"  # within the pool


@dataclass(frozen=True, slots=True)
class PageCopy:
    """All bytes of one page, copied.

    Attributes:
        source: Page id in the pool, or in the host pool for SWAP_IN.
        target: Page id in the pool, or in the host pool for SWAP_OUT.
        kind: Which memories.
    """

    source: int
    target: int
    kind: PageCopyKind


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's work: first the copies, then the sequences. An idle step is not executed.

    A page may change its owner within a step: what is swapped out is copied before another sequence writes the page.

    Attributes:
        step: Step number, from 1.
        sequences: Decodes and prefill chunks, in the order of execution; empty only beside copies.
        num_tokens: Sum of tokens over `sequences`.
        copies: One after the other, all of them before any token is computed. Within a run of one kind targets are
            distinct and no target is a source, so that a run may be done at once.
    """

    step: int
    sequences: tuple[ScheduledSequence, ...]
    num_tokens: int
    copies: tuple[PageCopy, ...] = ()

    def require_pages(self, page_size: int) -> None:
        """Refuses a row whose pages do not hold all of its tokens: runners ask before they write anything.

        Raises:
            EngineError: A row lacks pages; the scheduler is wrong.
        """
        for row in self.sequences:
            end = row.start + len(row.token_ids)
            if end > len(row.page_table) * page_size:
                held = f"sequence {row.key} has {len(row.page_table)} pages"
                raise EngineError(f"{held}, but computes up to position {end - 1} in step {self.step}")


@_hot
class SampledToken:
    """A sampled token.

    Attributes:
        token_id: The token.
        logprobs: Set when the sequence asked for log-probabilities.
    """

    token_id: int
    logprobs: PositionLogprobs | None = None


@dataclass(frozen=True, slots=True)
class SamplingFailure:
    """No token could be chosen for one sequence; the others of the step are right.

    Attributes:
        reason: UPPER_SNAKE_CASE.
        message: What is wrong and what to do.
        status: gRPC status name.
        kv_suspect: The KV that it read may be damaged: nobody else may use it.
    """

    reason: str
    message: str
    status: str = "INTERNAL"
    kv_suspect: bool = False


@dataclass(frozen=True, slots=True)
class RunnerOutput:
    """What one step computed, valid only after the device fence.

    Attributes:
        sampled: One entry per scheduled sequence; None where nothing was sampled.
        prompts: Log-probabilities at the prompt positions that were asked for, by index of the scheduled sequence.
    """

    sampled: tuple[SampledToken | SamplingFailure | None, ...]
    prompts: Mapping[int, tuple[PositionLogprobs, ...]] = field(default_factory=dict)


class Runner(Protocol):
    """Computes steps. Owns tensors; knows nothing of requests, queues or pages' owners."""

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """Copies pages, writes the KV of all scheduled tokens into theirs and samples; returns after the device fence.

        Raises:
            EngineError: The computation failed; the engine is dead.
        """
        ...


# ---- what goes in: commands, drained by the engine thread at begin_step --------------------------------------------


@dataclass(frozen=True, slots=True)
class Add:
    """Compute a request. On a prefill role the sequence ends in HANDOFF and its pages stay leased.

    Attributes:
        request: The request.
        handoff: True: stop after the first sampled token and keep the pages leased until `ReleaseLease`.
        reserved: With handoff: the destination has reserved pages already (`MarkReserved` says so later).
        forks: Further requests with the same prompt; never with handoff. They share its full pages once the first has
            computed them, and are sequences of their own in all else: each ends, fails and is aborted alone.
    """

    request: Request
    handoff: bool = False
    reserved: bool = False
    forks: tuple[Request, ...] = ()


@dataclass(frozen=True, slots=True)
class MarkReserved:
    """The destination of a handoff sequence has reserved its pages: run it before unreserved ones."""

    key: str


@dataclass(frozen=True, slots=True)
class Reserve:
    """Set pages aside for KV that will be pulled; answered by `Reserved` or `ReservationRefused`, maybe steps later.

    Attributes:
        request: The request; its prompt and emitted tokens are what will arrive.
        expires_s: Monotonic seconds after which it is refused with retry-after when pages are still missing.
    """

    request: Request
    expires_s: float


@dataclass(frozen=True, slots=True)
class Activate:
    """All reserved pages are VALID: the sequence joins the batch with a first token that another worker sampled.

    Attributes:
        key: The reserved sequence.
        token_id: Sampled by the prefill worker; never sampled again. None: the sequence samples its first token itself.
        forks: As those of `Add`: they begin at once, after the prompt whose KV has come.
    """

    key: str
    token_id: int | None
    forks: tuple[Request, ...] = ()


@dataclass(frozen=True, slots=True)
class Abort:
    """End a sequence, reservation or lease in whatever state; answered by `SequenceAborted`. Idempotent.

    The caller aborts a reservation only after every write into its pages has ended (fence, then free).
    """

    key: str


@dataclass(frozen=True, slots=True)
class ReleaseLease:
    """No reader needs the handoff pages any more. Unknown keys are ignored."""

    key: str


Command = Add | MarkReserved | Reserve | Activate | Abort | ReleaseLease


# ---- what comes out: events of one step ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PageRef:
    """A page and its reuse number.

    Attributes:
        page_id: Index in the pool.
        generation: Incremented each time the page becomes free.
    """

    page_id: int
    generation: int


@_hot
class TokensSampled:
    """New tokens of a sequence.

    Attributes:
        key: The sequence.
        index: Output index of the first of `token_ids`.
        token_ids: New tokens, in order; not empty.
        logprobs: One per token, or empty when not asked for.
        finish_reason: Set when this ends the sequence. Its pages are free, unless some were announced or, with n > 1,
            are to be handed off: those wait for `ReleaseLease`.
        stop_token_id: The token that matched, when it was an end-of-sequence or stop token.
        num_cached_tokens: Prompt tokens that came from the prefix cache when the sequence first started: a preemption
            adds none, and where the KV was pulled there are none.
    """

    key: str
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PagesReady:
    """Pages of a handoff sequence whose KV is final, after the step's fence or from the prefix cache: the watermark
    rises.

    Nothing is announced before the destination has reserved (`Add.reserved` or `MarkReserved`): until then the sequence
    may be requeued and its pages reused. So the pages of a late destination come together when `MarkReserved` is
    handled, which may be after the sequence's `TokensSampled`; else `complete` follows that within the same step.

    Attributes:
        key: The sequence.
        first_page: Index within the sequence of the first of `pages`.
        pages: In prompt order. The partial last page comes with the prompt's last chunk.
        complete: True when these are the last ones.
    """

    key: str
    first_page: int
    pages: tuple[PageRef, ...]
    complete: bool


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens; each position is told once, in order, before the first token is sampled.

    Attributes:
        key: The sequence.
        first: Position of the first of `logprobs`; the first of all is 1.
        logprobs: One per position; `chosen` is the prompt's token.
    """

    key: str
    first: int
    logprobs: tuple[PositionLogprobs, ...]


@dataclass(frozen=True, slots=True)
class PrefillStarted:
    """The first step of a sequence ran (ends its queue time)."""

    key: str


@dataclass(frozen=True, slots=True)
class Reserved:
    """Pages are set aside.

    Attributes:
        key: The reserved sequence.
        num_cached_pages: Leading pages that the prefix cache already has.
        pages: All prompt pages in order, cached ones included.
    """

    key: str
    num_cached_pages: int
    pages: tuple[PageRef, ...]


@dataclass(frozen=True, slots=True)
class ReservationRefused:
    """Pages were not free in time.

    Attributes:
        key: The reservation.
        retry_after_s: Earliest useful retry, seconds; None: it can never fit.
    """

    key: str
    retry_after_s: float | None


@dataclass(frozen=True, slots=True)
class SequenceAborted:
    """No page of the sequence is held any more.

    Attributes:
        key: The sequence.
        known: False when it had ended before or never came.
    """

    key: str
    known: bool


@dataclass(frozen=True, slots=True)
class SequenceFailed:
    """The engine could not go on with this sequence. Its pages are free, unless some were announced: those wait for
    `Abort` or `ReleaseLease`.

    Attributes:
        key: The sequence.
        status: gRPC status name.
        reason: UPPER_SNAKE_CASE.
        message: What is wrong and what to do.
    """

    key: str
    status: str
    reason: str
    message: str


Event = (
    TokensSampled
    | PromptLogprobs
    | PagesReady
    | PrefillStarted
    | Reserved
    | ReservationRefused
    | SequenceAborted
    | SequenceFailed
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemptions:
    """Preemptions since the engine's start, and the host pool now.

    Attributes:
        num_recomputes: Preempted sequences whose KV was dropped.
        num_swaps: Preempted sequences whose KV was swapped out.
        swapped_out_bytes: Bytes copied to the host pool.
        swapped_in_bytes: Bytes copied back.
        num_host_pages: Pages of the host pool in all.
        num_free_host_pages: Pages of the host pool free.
    """

    num_recomputes: int = 0
    num_swaps: int = 0
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    num_host_pages: int = 0
    num_free_host_pages: int = 0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Load after a step.

    Attributes:
        num_running: Sequences running.
        num_waiting: Sequences waiting: to run, for pages, for the prompt that they fork from, or for their grammar.
        num_free_pages: Pages free or evictable.
        num_pages: Pages in all.
        num_pending_prefill_tokens: Tokens known but not computed.
        preemptions: What became of sequences preempted so far.
        num_prefix_queried_tokens: Known tokens of sequences that looked for their prefix; since the start.
        num_prefix_hit_tokens: Of these, tokens that the prefix cache had.
    """

    num_running: int
    num_waiting: int
    num_free_pages: int
    num_pages: int
    num_pending_prefill_tokens: int
    preemptions: Preemptions = Preemptions()
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepEvents:
    """Everything that one step tells the outside: one item per step, never one per token.

    Attributes:
        step: Step number (unchanged when only commands were handled).
        events: In order.
        load: Load afterwards.
        num_tokens: Tokens computed in the step.
        duration_s: Seconds from schedule to update.
    """

    step: int
    events: tuple[Event, ...]
    load: EngineLoad
    num_tokens: int = 0
    duration_s: float = 0.0
