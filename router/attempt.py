"""One try at a request: Submit to its workers, their news in order, and an end that leaves nothing behind on either.

A (prefill, decode) pair:

    asked ──RESERVED──▶ reserved ──token 1 of P──▶ decoding ──finished of D──▶ Finished
      └──REFUSED──▶ Refused (P aborted; the caller queues the request again)

Token 1 is released only once D said RESERVED, or if it ends the request. What D sends before token 1 came from P waits.
With n > 1 P's message has no token: D samples the first one of each choice.
Every index and every text offset must follow what was released: a gap or a repeat fails the request and is never passed
on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from pdserve.core.errors import CapacityError, EngineError, PdserveError
from pdserve.core.grpc_server import error_from_detail
from pdserve.core.sampling_proto import sampling_to_proto
from pdserve.router.admission import Admitted
from pdserve.router.inbox import AttemptEvent, Cancel, Died, Inbox, Output, Reservation, WorkersChanged
from pdserve.router.policy import Route
from pdserve.router.progress import Progress
from pdserve.router.worker_set import WorkerSet
from pdserve.router.worker_table import WorkerFacts
from pdserve.v1 import common_pb2, worker_pb2

ABORT_TIMEOUT_S = 1.5
"""Bound of the wait for Aborted; small enough that a death is told within 5 s."""
_PLACED, _TERMINAL = 1, 3


@dataclass(frozen=True, slots=True)
class Refused:
    """The decode worker had no room, or one of the two drains; no token was released.

    Attributes:
        worker_id: Who refused.
        retry_after_s: When it may have room.
    """

    worker_id: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The request was cancelled and both workers know."""

    cancel: Cancel


@dataclass(frozen=True, slots=True)
class Completed:
    """The stream ended properly.

    Attributes:
        finished: What the last worker said.
    """

    finished: worker_pb2.SequenceFinished


Outcome = Refused | Cancelled | Completed


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptIds:
    """Identity of a try.

    Attributes:
        attempt: Retry number, from 1.
        owner_epoch: Epoch of this router's ownership.
        reservation_id: Lives over attempts.
        transfer_id: This attempt's.
        deadline_ms: Time left for the whole request; 0: no deadline.
        traceparent: Of the root span.
    """

    attempt: int
    owner_epoch: int
    reservation_id: str
    transfer_id: str
    deadline_ms: int
    traceparent: str


class Attempt:
    """One try.

    Args:
        request: What is computed.
        ids: Identity of this try.
        route: Where.
        workers: Gives the clients of the route's workers, keeps this router's own counts, hears who drains.
        inbox: Where the workers' news and the cancellation arrive.
        progress: Released output; lives over attempts.
    """

    def __init__(
        self,
        request: Admitted,
        ids: AttemptIds,
        route: Route,
        workers: WorkerSet,
        inbox: Inbox,
        progress: Progress,
    ) -> None:
        self._request = request
        self._ids = ids
        self._route = route
        self._workers = workers
        self._clients = {worker_id: workers.client(worker_id) for worker_id in route.worker_ids}
        self._table = workers.table
        self._inbox = inbox
        self._progress = progress
        self._key = f"{request.request_id}/{ids.attempt}"
        self._alive = set(route.worker_ids)
        self._reserved = route.prefill is None
        self._first: Output | None = None
        self._first_passed = False
        self._early: deque[Output] = deque()

    async def run(self) -> Outcome:
        """Runs the try to its end; afterwards no worker holds anything of it.

        Raises:
            PdserveError: A worker failed or died; nothing of this try runs on.
        """
        reason = "ROUTER_FAILED"
        try:
            self._submit()
            outcome = None
            while outcome is None:
                outcome = self._handle(await self._inbox.get())
            reason = _abort_reason(outcome)
            return outcome
        except PdserveError as e:
            reason = e.reason
            raise
        finally:
            await self._leave(reason)

    def _submit(self) -> None:
        tokens = len(self._request.prompt_token_ids)
        prefill, decode = self._route.prefill, self._route.decode
        if prefill is None:
            self._send(decode, common_pb2.ROLE_MIXED, tokens)
            return
        self._clients[prefill.worker_id].hold_lease(self._ids.transfer_id)
        self._send(prefill, common_pb2.ROLE_PREFILL, tokens)
        self._send(decode, common_pb2.ROLE_DECODE, 0)

    def _send(self, worker: WorkerFacts, part: common_pb2.Role, tokens: int) -> None:
        request, ids, route = self._request, self._ids, self._route
        message = worker_pb2.Submit(
            fence=self._fence(_PLACED),
            part=part,
            prompt_token_ids=request.prompt_token_ids,
            sampling=sampling_to_proto(request.sampling),
            deadline_ms=ids.deadline_ms,
            traceparent=ids.traceparent,
            tenant=request.tenant,
            priority=request.priority,
            cache_salt=request.cache_salt,
            prompt_digest=request.prompt_digest,
        )
        if route.prefill is not None:
            message.reservation_id = ids.reservation_id
            message.transfer_id = ids.transfer_id
            message.prefill.CopyFrom(_peer(route.prefill))
            message.decode.CopyFrom(_peer(route.decode))
        self._table.placed(worker.worker_id, self._key, tokens)
        self._clients[worker.worker_id].submit(message, self._inbox)

    # ---- news

    def _handle(self, event: AttemptEvent | Cancel | WorkersChanged) -> Outcome | None:
        if isinstance(event, Cancel):
            return Cancelled(event)
        if isinstance(event, WorkersChanged) or event.attempt != self._ids.attempt:
            return None
        if isinstance(event, Died):
            return self._died(event)
        if isinstance(event, Reservation):
            return self._reservation(event.result)
        if event.output.HasField("failed"):
            self._alive.discard(event.worker_id)
            error = error_from_detail(event.output.failed)
            if self._may_move(event.worker_id, error):
                return Refused(event.worker_id, 0.0)
            raise self._named(error)
        if event.output.HasField("prompt_logprobs"):
            self._tell_prompt(event)
            return None
        if self._route.prefill is not None and event.worker_id == self._route.prefill.worker_id:
            return self._from_prefill(event)
        if self._route.prefill is not None and not self._first_passed:
            self._early.append(event)
            return None
        return self._from_decode(event)

    def _died(self, event: Died) -> Outcome | None:
        self._alive.discard(event.worker_id)
        if event.worker_id != self._route.decode.worker_id and self._first is not None:
            return None  # P died after its token: D has all pages, or says what it misses
        if self._may_move(event.worker_id, event.error):
            return Refused(event.worker_id, 0.0)
        raise event.error

    def _may_move(self, worker_id: str, error: PdserveError) -> bool:
        """True when a worker that drains did not take the request, and no token was released: another may have it."""
        if error.reason != "DRAINING" or self._progress.num_tokens:
            return False
        self._workers.worker_draining(worker_id, True)
        return True

    def _reservation(self, result: worker_pb2.ReservationResult) -> Outcome | None:
        if result.reserved:
            self._reserved = True
            return self._release()
        self._alive.discard(self._route.decode.worker_id)
        if result.retry_after_ms == 0:
            raise CapacityError(
                f"the request needs more KV pages than decode worker {self._route.decode.worker_id} has "
                f"({self._route.decode.num_pages}); shorten the prompt or start workers with more pages",
                reason="DOES_NOT_FIT",
            )
        return Refused(self._route.decode.worker_id, result.retry_after_ms / 1000)

    def _from_prefill(self, event: Output) -> Outcome | None:
        num_tokens = len(event.output.delta.token_ids)
        if self._first is not None or (num_tokens > 0) != (self._request.sampling.n == 1):
            raise self._broken(
                f"prefill worker {event.worker_id} sent {num_tokens} tokens from index {event.output.delta.index}"
            )
        assert self._route.prefill is not None
        self._first = event
        self._table.computed(self._route.prefill.worker_id, self._key)
        return self._release()

    def _release(self) -> Outcome | None:
        """Token 1 goes out when both halves are there; then what D sent early."""
        first = self._first
        if first is None or self._first_passed:
            return None
        ends = first.output.HasField("finished")
        if not (self._reserved or ends):
            return None
        self._pass_on(first)
        self._first_passed = True
        if ends:
            self._alive.discard(first.worker_id)
            return Completed(first.output.finished)
        outcome = None
        while self._early and outcome is None:
            outcome = self._from_decode(self._early.popleft())
        return outcome

    def _from_decode(self, event: Output) -> Outcome | None:
        if self._route.prefill is not None:
            self._clients[self._route.prefill.worker_id].drop_lease(self._ids.transfer_id)
            self._table.released(self._route.prefill.worker_id, self._key)
        else:
            self._table.computed(event.worker_id, self._key)
        self._pass_on(event)
        if event.output.HasField("finished"):
            self._alive.discard(event.worker_id)
            return Completed(event.output.finished)
        return None

    def _tell_prompt(self, event: Output) -> None:
        told, progress = event.output.prompt_logprobs, self._progress
        last, num_tokens = told.position + len(told.logprobs), len(self._request.prompt_token_ids)
        if not 1 <= told.position <= progress.num_told or last > num_tokens or progress.num_tokens:
            raise self._broken(
                f"worker {event.worker_id} told prompt positions {told.position} to {last - 1} of {num_tokens}, "
                f"expected {progress.num_told}"
            )
        progress.tell_prompt(told)

    def _pass_on(self, event: Output) -> None:
        output = event.output
        if output.HasField("timings"):
            self._progress.measured(output.timings)
        if not output.HasField("delta"):
            if event is self._first:  # a prompt that was computed for several choices
                self._progress.count_cached(output.cached_tokens)
            return
        delta = output.delta
        if delta.choice >= self._request.sampling.n:
            raise self._broken(f"worker {event.worker_id} sent choice {delta.choice} of {self._request.sampling.n}")
        num_told = len(self._request.prompt_token_ids) if self._request.sampling.prompt_logprobs is not None else 1
        if self._progress.num_told < num_told:
            raise self._broken(f"worker {event.worker_id} sent output after {self._progress.num_told} prompt positions")
        released = self._progress.choices[delta.choice]
        if delta.token_ids and delta.index != released.num_tokens:
            raise self._broken(
                f"worker {event.worker_id} sent output index {delta.index}, expected {released.num_tokens}"
            )
        if (delta.token_ids or delta.text) and delta.text_offset != released.num_chars:
            raise self._broken(
                f"worker {event.worker_id} sent text offset {delta.text_offset}, expected {released.num_chars}"
            )
        self._progress.release(delta, output.cached_tokens)

    def _named(self, error: PdserveError) -> PdserveError:
        """Names the workers: what one of them saw may be the other's death."""
        if error.status not in ("UNAVAILABLE", "INTERNAL"):
            return error
        where = " and ".join(f"{f.role} worker {f.worker_id}" for f in (self._route.prefill, self._route.decode) if f)
        return type(error)(
            f"{error.message} (on {where})",
            reason=error.reason,
            status=error.status,
            retry_after_s=error.retry_after_s,
        )

    def _broken(self, what: str) -> PdserveError:
        return EngineError(f"{what}; nothing of it was passed on: report this", reason="BROKEN_STREAM")

    # ---- the end

    async def _leave(self, reason: str) -> None:
        """Tells every worker that may still hold something, in parallel, and waits for its answer (bounded)."""
        ids = self._ids
        if self._route.prefill is not None:
            self._clients[self._route.prefill.worker_id].drop_lease(ids.transfer_id)
            if reason == "" and not self._ended_at_prefill():
                self._alive.discard(self._route.prefill.worker_id)  # D closed the transfer; the lease is gone
        clients = [self._clients[w] for w in sorted(self._alive)]
        fence = self._fence(_TERMINAL)
        try:
            await asyncio.gather(*(c.abort(fence, reason or "FINISHED", ABORT_TIMEOUT_S) for c in clients))
        finally:
            for worker_id, client in self._clients.items():
                client.forget(fence)
                self._table.released(worker_id, self._key)

    def _ended_at_prefill(self) -> bool:
        return self._first is not None and self._first.output.HasField("finished")

    def _fence(self, phase: int) -> common_pb2.Fence:
        ids = self._ids
        return common_pb2.Fence(
            request_id=self._request.request_id, attempt=ids.attempt, phase=phase, owner_epoch=ids.owner_epoch
        )


def _abort_reason(outcome: Outcome) -> str:
    """UPPER_SNAKE_CASE for the workers; empty when the request ended well."""
    if isinstance(outcome, Cancelled):
        return outcome.cancel.reason
    return "RESERVATION_REFUSED" if isinstance(outcome, Refused) else ""


def _peer(facts: WorkerFacts) -> worker_pb2.Peer:
    return worker_pb2.Peer(worker_id=facts.worker_id, address=facts.address, incarnation=facts.incarnation)
