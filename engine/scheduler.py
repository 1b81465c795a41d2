"""Scheduler: which tokens are computed in which step, on which pages. Pure: time is an argument, nothing is awaited.

There are no phases. A sequence has known tokens and computed tokens, and each step hands out a token budget so that the
second catch up with the first, in this order: sequences one token behind (decodes), the others that run, reservations,
then those that wait. The policy orders who starts (`engine.waiting`); once started, age counts. Invariants:

- A sequence gets the pages of all its known tokens when it starts to run, all or nothing; only decodes grow.
- A page is taken back only from a sequence that does not run, or is younger than the one that needs it: so the oldest
  that runs gets on, and all end.
- A page that a step copies from may be written later in that step, but by no other process before the step ends.
- Pages that another process may read or write (announced hand-offs, reservations) are never taken back.
- Pages of a hand-off are announced only once its destination has reserved; until then the sequence may be requeued.
- A sequence that starts shares the pages that the prefix cache has of its known tokens; one token at least is computed.
"""

from __future__ import annotations

from pdserve.core.request import FinishReason, Request
from pdserve.engine.batching import Batching, ContinuousBatching, Padding
from pdserve.engine.chunks import Chunks, SchedulerLimits
from pdserve.engine.forks import Forks, same_prefix
from pdserve.engine.holdings import Holdings
from pdserve.engine.lines import Policy, age
from pdserve.engine.page_pool import PagePool
from pdserve.engine.policies import fcfs
from pdserve.engine.prefix_cache import PrefixCache
from pdserve.engine.queues import Queues
from pdserve.engine.sequence import Sequence, SequenceState
from pdserve.engine.step import (
    EngineLoad,
    Event,
    PageCopy,
    PagesReady,
    PrefillStarted,
    ReservationRefused,
    Reserved,
    RunnerOutput,
    SampledToken,
    SamplingFailure,
    ScheduledSequence,
    SchedulerOutput,
    SequenceAborted,
    SequenceFailed,
    TokensSampled,
)
from pdserve.engine.swap import SwapSpace


class Scheduler:
    """Owns the sequences and, through the pool, their pages.

    Args:
        limits: Limits; a sequence that could not run alone in the pool is refused, whatever max_model_len says.
        pool: The pages; touched by nobody else.
        policy: Orders who starts; default: first come, first served.
        batching: Who may join the running ones, and how they leave; default: at every step.
        swap: What becomes of the KV of preempted ones; None: all are computed anew.
        cache: Finds pages for reuse; None: nothing is shared.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: PagePool,
        policy: Policy | None = None,
        batching: Batching | None = None,
        swap: SwapSpace | None = None,
        cache: PrefixCache | None = None,
    ) -> None:
        self._limits = limits
        self._pages = Holdings(pool, limits.page_size, limits.max_unreserved_fraction, cache)
        self._swap = swap or SwapSpace()
        self._policy = policy or fcfs()
        self._batching = batching or ContinuousBatching(limits.max_num_seqs)
        self._padding = Padding()  # finished, but still members of a fixed batch
        self._max_model_len = min(limits.max_model_len, pool.num_pages * limits.page_size)
        self._sequences: dict[str, Sequence] = {}
        self._queues = q = Queues(self._policy, limits.long_tokens)
        self._waiting, self._running, self._reservations = q.waiting, q.running, q.reservations  # to read
        self._forks = Forks()
        self._scheduled: list[Sequence] = []  # of the step in flight
        self._copies: list[PageCopy] = []  # to do before the step that is being put together
        self._starved: Sequence | None = None  # waits for pages; no reservation behind it takes any
        self._events: list[Event] = []
        self._num_added = 0
        self._step = 0

    # ---- commands, between steps -----------------------------------------------------------------------------------

    def add(
        self, request: Request, handoff: bool = False, reserved: bool = False, forks: tuple[Request, ...] = ()
    ) -> None:
        """Queues a request, and those that fork from its prompt; one that can never run fails at once."""
        assert not (handoff and forks) and all(same_prefix(f, request) for f in forks)
        family = (self._new_sequence(r, handoff, reserved) for r in (request, *forks))
        self._enqueue_family([seq for seq in family if seq])

    def reserve(self, request: Request, expires_s: float) -> None:
        """Queues a reservation of pages for KV that will be pulled."""
        if seq := self._new_sequence(request, False, False):
            seq.move(SequenceState.WAITING_KV)
            seq.expires_s = expires_s
            self._queues.enter(seq)

    def mark_reserved(self, key: str) -> None:
        """The destination of a hand-off has its pages: it goes first, and what is computed is announced."""
        seq = self._sequences.get(key)
        if seq is None or not seq.unreserved:
            return
        self._queues.leave(seq)
        self._pages.mark_reserved(seq)
        seq.order = (0, *seq.order[1:])
        self._queues.enter(seq)
        self._announce(seq)

    def activate(self, key: str, token_id: int | None, forks: tuple[Request, ...] = ()) -> None:
        """A granted reservation's pages are VALID: it runs on after a token sampled elsewhere, or samples it itself."""
        seq = self._sequences.get(key)
        if seq is None:
            return
        if not seq.granted:
            self._fail(seq, "INTERNAL", "NOT_RESERVED", f"sequence {key} was activated without a reservation")
            return
        if token_id is not None:
            seq.tokens.append(token_id)
        if token_id is not None and seq.finish_reason() is not None:
            self._fail(seq, "INVALID_ARGUMENT", "NOTHING_TO_GENERATE", f"token {token_id} already ended sequence {key}")
            return
        self._pages.validate(seq)
        seq.goal = len(seq.tokens)
        family = [seq, *(fork for r in forks if (fork := self._new_sequence(r, False, False)))]
        for member in family:  # their prefill started elsewhere
            member.started = True
        self._forks.lead(family)
        self._fork(seq)
        if token_id is None:
            self._pages.reopen(seq)
        self._enqueue(seq)

    def abort(self, key: str) -> None:
        """Ends whatever the key stands for."""
        seq = self._sequences.get(key)
        if seq is not None:
            self._end(seq)
        self._events.append(SequenceAborted(key, seq is not None))

    def release_lease(self, key: str) -> None:
        """No reader needs the pages of a hand-off: free them, now or when its token has been sampled."""
        seq = self._sequences.get(key)
        if seq is None or not seq.handoff:
            return
        if seq.state is SequenceState.HANDOFF:
            self._end(seq)
        else:
            seq.released = True

    def fail_all(self, status: str, reason: str, message: str) -> None:
        """Ends every sequence with the same failure."""
        for seq in list(self._sequences.values()):
            self._fail(seq, status, reason, message)

    # ---- the step --------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> SchedulerOutput | None:
        """Picks the work of one step.

        Args:
            now: Monotonic seconds.

        Returns:
            The work, or None when nothing can run before another command or `next_expiry`.
        """
        self._reclaim_for_reserved()
        # Rows are made in the same pass: with many sequences each pass misses the caches.
        decodes, items, chunked = list[Sequence](), list[ScheduledSequence](), list[Sequence]()
        at = 0
        while at < len(self._running):  # a decode that grows takes only younger ones, further on in the list
            seq = self._running[at]
            at += 1
            if seq.goal - seq.num_computed != 1:
                chunked.append(seq)
            elif seq.num_computed < seq.capacity or self._grow(seq):
                decodes.append(seq)
                items.append(seq.item(1))
        chunks = Chunks(self._limits, len(decodes) + len(self._padding))
        for seq in chunked:
            chunks.deal(seq)
        self._serve_reservations(now)
        before = len(self._running)
        last = before + self._batching.room(now, before + len(self._padding), len(self._waiting) + len(self._forks))
        while len(self._running) < last and (started := self._start_next(chunks)) is not None:
            if started.copy_from is not None:
                self._copies.append(self._pages.copy(started))
            chunks.deal(started, least=1)
        self._batching.join(len(self._running) - before)
        self._scheduled = [*decodes, *chunks.sequences]
        items += map(Sequence.item, chunks.sequences, chunks.shares())
        copies, self._copies = tuple(self._copies), []
        if not items and not copies:
            return None
        self._step += 1
        rows = (*items, *(self._padding.rows() if items else ()))
        num_tokens = len(rows) - len(chunks.sequences) + chunks.num_tokens  # the others have one each
        return SchedulerOutput(self._step, rows, num_tokens, copies)

    def update(self, output: SchedulerOutput, result: RunnerOutput) -> None:
        """Accounts for a computed step; its events are in `take_events`."""
        events, page_size = self._events, self._limits.page_size
        self._pages.end_step()
        assert len(result.sampled) == len(output.sequences)
        for at, logprobs in result.prompts.items():
            events.append(self._scheduled[at].tell_prompt(output.sequences[at].prompt, logprobs))
        for seq, item, token in zip(self._scheduled, output.sequences, result.sampled, strict=False):  # then padding
            seq.num_computed = item.start + len(item.token_ids)
            if not seq.started:
                seq.started = True
                events.append(PrefillStarted(seq.key))
            if not (isinstance(token, SamplingFailure) and token.kv_suspect):
                if seq.num_computed // page_size > seq.num_published:
                    self._pages.publish(seq)
                if seq.forks and seq.num_computed >= seq.num_prompt:
                    self._fork(seq)
            if isinstance(token, SamplingFailure):
                self._drop(seq, token)
            elif token is not None:
                self._accept(seq, token, item.output_index)
            elif seq.handoff:
                self._hand_off(seq)
        self._scheduled = []

    def take_events(self) -> tuple[Event, ...]:
        """What happened since the last call."""
        events, self._events = tuple(self._events), []
        return events

    def next_wakeup(self) -> float | None:
        """When a reservation or the batching must be looked at although nothing happens; monotonic seconds."""
        opens = self._batching.next_wakeup()
        times = [seq.expires_s for seq in self._reservations]
        return min(times if opens is None else [*times, opens], default=None)

    @property
    def step(self) -> int:
        """Steps scheduled so far."""
        return self._step

    def load(self) -> EngineLoad:
        """Load now."""
        return EngineLoad(
            num_running=len(self._running) + len(self._padding),
            num_waiting=len(self._waiting) + len(self._reservations) + len(self._forks),
            num_free_pages=self._pages.num_free,
            num_pages=self._pages.num_pages,
            num_pending_prefill_tokens=self._queues.num_pending_tokens(),
            preemptions=self._swap.totals(),
            num_prefix_queried_tokens=self._pages.num_queried_tokens,
            num_prefix_hit_tokens=self._pages.num_hit_tokens,
        )

    def check(self) -> None:
        """Proves that both pools' holders are the sequences' pages and that every sequence is where its state says."""
        self._pages.check([*self._sequences.values(), *self._padding])
        self._swap.check(self._sequences.values())
        self._forks.check(self._sequences.values())
        for seq in self._sequences.values():
            self._queues.check(seq)
        self._queues.check_order()
        assert len(self._running) + len(self._padding) <= self._limits.max_num_seqs
        assert self._running or not self._padding

    # ---- entering and leaving --------------------------------------------------------------------------------------

    def _new_sequence(self, request: Request, handoff: bool, reserved: bool) -> Sequence | None:
        if (old := self._sequences.get(request.key)) is not None:
            message = f"a sequence {old.key} lives already; abort it, and use another key"  # its pages may be in use
            self._events.append(SequenceFailed(old.key, "ALREADY_EXISTS", "DUPLICATE_KEY", message))
            return None
        self._num_added += 1
        order = (float(handoff and not reserved), request.arrival_s, self._num_added)
        seq = Sequence(request, order, self._max_model_len, handoff, reserved)
        if refusal := seq.refusal(self._max_model_len) or self._policy.refusal(request):
            self._events.append(SequenceFailed(request.key, "INVALID_ARGUMENT", *refusal))
            return None
        self._sequences[request.key] = seq
        return seq

    def _enqueue(self, seq: Sequence) -> None:
        if seq.state is not SequenceState.WAITING:
            seq.move(SequenceState.WAITING)
        self._queues.enter(seq)

    def _leave(self, seq: Sequence) -> None:
        """Takes a sequence out of its queue; when nobody runs any more, the batch has ended."""
        self._queues.leave(seq)
        if not self._running:
            for member in self._padding.clear():
                self._pages.take_back(member)

    def _enqueue_family(self, family: list[Sequence]) -> None:
        if (leader := self._forks.lead(family)) is not None:
            self._enqueue(leader)

    def _fork(self, seq: Sequence) -> None:
        for fork in self._forks.release(seq):
            self._pages.share(seq, fork)
            self._enqueue(fork)

    def _end(self, seq: Sequence) -> None:
        """Takes a sequence out of everything; the caller tells why."""
        if self._starved is seq:
            self._starved = None
        self._leave(seq)
        self._queues.end(seq)
        self._pages.take_back(seq)
        self._swap.drop(seq)
        seq.move(SequenceState.FINISHED)
        del self._sequences[seq.key]
        self._enqueue_family(self._forks.end(seq))

    def _fail(self, seq: Sequence, status: str, reason: str, message: str) -> None:
        self._end(seq)
        self._events.append(SequenceFailed(seq.key, status, reason, message))

    # ---- what a computed step means for one sequence ---------------------------------------------------------------

    def _accept(self, seq: Sequence, token: SampledToken, index: int) -> None:
        tokens = seq.tokens
        tokens.append(token.token_id)
        self._policy.sampled(seq)
        reason = seq.finish_reason()
        # Announced pages may be read right now: they stay leased even if this token ends the request.
        ended = reason is not None and not seq.num_announced and not seq.shared
        if ended:
            self._finish(seq)
        self._events.append(
            TokensSampled(
                seq.key,
                index,
                (token.token_id,),
                () if token.logprobs is None else (token.logprobs,),
                reason,
                token.token_id if reason is FinishReason.STOP else None,
                seq.num_cached or 0,
            )
        )
        if seq.handoff and not ended:
            self._hand_off(seq)
        elif not ended:
            seq.goal = len(tokens)

    def _finish(self, seq: Sequence) -> None:
        """The output is complete: the sequence leaves, or stays in a fixed batch to be computed for nobody."""
        full = len(seq.tokens) > seq.capacity  # its row needs a place of its own, for others may read its pages
        if not self._batching.keeps_finished or len(self._running) == 1 or (full and not self._pages.can_give(1)):
            self._end(seq)
            return
        if full:
            self._pages.give(seq, 1)
        self._leave(seq)
        self._queues.end(seq)
        self._padding.add(seq)
        seq.move(SequenceState.FINISHED)
        del self._sequences[seq.key]

    def _drop(self, seq: Sequence, failure: SamplingFailure) -> None:
        """Fails one sequence of a step; announced pages stay leased, for a reader may be at them."""
        if failure.kv_suspect:
            self._pages.forget(seq)
        if seq.num_announced:
            self._leave(seq)
            seq.move(SequenceState.HANDOFF)
            self._events.append(SequenceFailed(seq.key, failure.status, failure.reason, failure.message))
        else:
            self._fail(seq, failure.status, failure.reason, failure.message)

    def _hand_off(self, seq: Sequence) -> None:
        """Announces what a step made final; once all is, leases the pages, or frees them when no reader will come."""
        if seq.num_computed == seq.num_initial:
            if seq.released:
                self._end(seq)
                return
            self._leave(seq)
            seq.move(SequenceState.HANDOFF)
        self._announce(seq)

    def _announce(self, seq: Sequence) -> None:
        if not seq.reserved or seq.released or not seq.page_table:
            return
        complete = seq.state is SequenceState.HANDOFF
        final = len(seq.page_table) if complete else seq.num_computed // self._limits.page_size
        first = seq.num_announced
        if final > first:
            seq.num_announced = final
            self._events.append(PagesReady(seq.key, first, self._pages.refs(seq, first, final), complete))

    # ---- pages -----------------------------------------------------------------------------------------------------

    def _start_next(self, chunks: Chunks) -> Sequence | None:
        """Moves the first waiting sequence to RUNNING with all its pages, if there is room."""
        seq = self._waiting.head(chunks.may_add_long)
        # One that has its KV already, pulled or swapped, is a decode, and in the step whatever is left.
        if seq is None or not (chunks.left or seq.num_computed):
            return None
        cached = self._pages.cached(seq)
        need = self._pages.pages_for(seq.goal) - len(seq.page_table)
        if need > 0:
            if self._pages.over_share(seq, need):
                return None
            # Room for the others to grow: what starts now must not be the next to be preempted.
            headroom = 0 if seq.handoff else len(self._running)
            if not self._pages.can_give(need + headroom, cached):
                self._starved = seq
                return None
        if self._starved is seq:
            self._starved = None
        self._leave(seq)
        if need > 0:
            self._pages.give(seq, need, cached)
        self._queues.admit(seq)
        self._copies += self._swap.restore(seq)
        seq.move(SequenceState.RUNNING)
        self._queues.enter(seq)
        if seq.handoff and cached:
            self._announce(seq)
        return seq

    def _grow(self, seq: Sequence) -> bool:
        """One more page for a running sequence, from a younger one if need be; False: it sits this step out."""
        while not self._pages.can_give(1):
            if (member := self._padding.pop()) is not None:
                self._pages.take_back(member)
                continue
            if (victim := self._queues.victim(seq)) is None:
                return False
            self._preempt(victim)
        self._pages.give(seq, 1)
        return True

    def _reclaim_for_reserved(self) -> None:
        """A reserved hand-off never waits for unreserved ones: they are requeued, youngest first."""
        seq = self._waiting.head() if self._pages.num_unreserved else None
        if seq is None or not (seq.handoff and seq.reserved):
            return
        need, cached = self._pages.pages_for(seq.goal), self._pages.cached(seq)
        holders = [s for s in self._sequences.values() if s.unreserved and s.page_table]
        if self._pages.can_give(need - self._pages.num_released(holders, cached), cached):
            for victim in sorted(holders, key=age, reverse=True):
                if self._pages.can_give(need, cached):
                    return
                self._preempt(victim)

    def _preempt(self, seq: Sequence) -> None:
        """Takes all pages of a sequence; it waits again with its tokens, its KV swapped out or to be computed anew."""
        self._leave(seq)
        seq.move(SequenceState.PREEMPTED)
        self._copies += self._swap.save(seq)
        self._pages.take_back(seq)
        self._enqueue(seq)
        if self._starved is None or self._waiting.precedes(seq, self._starved):
            self._starved = seq

    def _serve_reservations(self, now: float) -> None:
        self._grant_reservations()
        if expired := [seq for seq in self._reservations if seq.expires_s <= now]:
            for seq in expired:
                self._end(seq)
                self._events.append(ReservationRefused(seq.key, self._limits.retry_after_s))
            self._grant_reservations()  # what stood behind them

    def _grant_reservations(self) -> None:
        if self._copies:  # pages that are about to be copied could be written by another process
            return
        while (seq := self._reservations.head()) is not None:
            num_prompt_pages = self._pages.pages_for(seq.num_initial)
            # One page to decode into, unless the sequence can never need it.
            need = max(num_prompt_pages, min(num_prompt_pages + 1, self._pages.pages_for(seq.max_len - 1)))
            starved = self._starved
            blocked = starved is not None and self._waiting.precedes(starved, seq)
            cached = self._pages.cached(seq)
            if blocked or not self._pages.can_give(need, cached):
                return
            self._queues.leave(seq)
            self._queues.admit(seq)
            self._pages.set_aside(seq, need, cached)
            self._events.append(Reserved(seq.key, len(cached), self._pages.refs(seq, 0, num_prompt_pages)))
