"""What every worker keeps of the attempts that it computes: the table of live ones, and the messages of one step.

A stream is in the table from its Submit until nothing of it is left in the engine; `silent` says that its router hears
nothing of it any more (it ended, failed, or is being aborted). Event loop only.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from pdserve.core.errors import PdserveError
from pdserve.core.output_stage import OutputStates
from pdserve.core.request import Request, Role
from pdserve.core.session import RouterSession, fence_order, refusal
from pdserve.core.stream_record import StreamRecord
from pdserve.core.telemetry import WorkerMetrics
from pdserve.core.worker_app import LoadedWorker, WorkerContext
from pdserve.v1 import common_pb2, worker_pb2


@dataclass(eq=False, kw_only=True)
class Stream:
    """One attempt of a request on this worker.

    Attributes:
        submit: What the router asked.
        request: The same for the engine.
        session: Who asked.
        output: Text and offsets so far, of every choice.
        record: Where its time went.
        silent: True: nothing more is sent.
        ending: True: the engine was, or will be, told to abort it.
        abort_answers: Sessions that wait for Aborted.
    """

    submit: worker_pb2.Submit
    request: Request
    session: RouterSession
    output: OutputStates
    record: StreamRecord
    silent: bool = False
    ending: bool = False
    abort_answers: list[RouterSession] = field(default_factory=list)

    @property
    def key(self) -> str:
        """Its name in the engine; with n > 1 that of its first choice, of which the others' are derived."""
        return self.request.key

    def fail(self, error: PdserveError) -> None:
        """Tells the router, once, that nothing more will come."""
        if not self.silent:
            self.session.send(refusal(self.submit.fence, error))
        self.silent = True

    def answer_aborted(self, known: bool) -> None:
        """Answers every Abort that waits: no page of the attempt is held any more."""
        for session in self.abort_answers:
            send_aborted(session, self.submit, known)
        self.abort_answers.clear()


def send_aborted(session: RouterSession, message: worker_pb2.Submit | worker_pb2.Abort, known: bool) -> None:
    """Answers an Abort."""
    session.send(worker_pb2.SessionResponse(aborted=worker_pb2.Aborted(fence=message.fence, known=known)))


S = TypeVar("S", bound=Stream)


class StreamTable(Generic[S]):
    """Live streams by engine key, transfer, request and session."""

    def __init__(self) -> None:
        self._by_key: dict[str, S] = {}
        self._by_transfer: dict[str, S] = {}
        self._by_request: dict[str, list[S]] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, stream: S) -> None:
        """Adds a stream whose key is new."""
        assert stream.key not in self._by_key, stream.key
        self._by_key[stream.key] = stream
        self._empty.clear()
        self._by_request.setdefault(stream.submit.fence.request_id, []).append(stream)
        if stream.submit.transfer_id:
            self._by_transfer.setdefault(stream.submit.transfer_id, stream)

    def remove(self, stream: S) -> None:
        """Forgets a stream. Idempotent."""
        if self._by_key.pop(stream.key, None) is None:
            return
        if self._by_transfer.get(stream.submit.transfer_id) is stream:
            del self._by_transfer[stream.submit.transfer_id]
        same = self._by_request[stream.submit.fence.request_id]
        same.remove(stream)
        if not same:
            del self._by_request[stream.submit.fence.request_id]
        if not self._by_key:
            self._empty.set()

    async def wait_empty(self) -> None:
        """Waits until no stream lives; the caller sets the limit."""
        await self._empty.wait()

    def get(self, key: str) -> S | None:
        """The stream with this engine key."""
        return self._by_key.get(key)

    def of_transfer(self, transfer_id: str) -> S | None:
        """The stream whose pages move in this transfer."""
        return self._by_transfer.get(transfer_id)

    def up_to(self, fence: common_pb2.Fence) -> list[S]:
        """Streams of a request with this fence or an older one."""
        newest = fence_order(fence)
        return [s for s in self._by_request.get(fence.request_id, ()) if fence_order(s.submit.fence) <= newest]

    def of_session(self, session: RouterSession) -> list[S]:
        """Streams that a router owns."""
        return [s for s in self._by_key.values() if s.session is session]

    def all(self) -> list[S]:
        """All streams."""
        return list(self._by_key.values())


def welcome_message(context: WorkerContext, loaded: LoadedWorker, page_size: int) -> worker_pb2.Welcome:
    """What a worker says of itself to every router."""
    return worker_pb2.Welcome(
        worker_id=context.worker_id,
        role=f"ROLE_{context.role.name}",
        incarnation=context.incarnation,
        identity_digest=loaded.identity_digest,
        model=loaded.model,
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.vocab_size,
        layout=loaded.layout,
        num_pages=loaded.num_pages,
        page_size=page_size,
        max_num_seqs=loaded.max_num_seqs,
        kv_converts=sorted(context.kv_converts),
        transports=loaded.transports,
        host_id=loaded.host_id,
        kv_staging_bytes=context.worker.kv_staging_bytes if context.role is Role.DECODE else 0,
    )


class Preempted(Protocol):
    """What an engine tells of preemptions; see `engine.step.Preemptions`."""

    @property
    def num_recomputes(self) -> int:
        """Preempted sequences whose KV was dropped."""
        ...

    @property
    def num_swaps(self) -> int:
        """Preempted sequences whose KV was swapped out."""
        ...

    @property
    def swapped_out_bytes(self) -> int:
        """Bytes copied to the host pool."""
        ...

    @property
    def swapped_in_bytes(self) -> int:
        """Bytes copied back."""
        ...

    @property
    def num_host_pages(self) -> int:
        """Pages of the host pool in all."""
        ...

    @property
    def num_free_host_pages(self) -> int:
        """Pages of the host pool free."""
        ...


class Load(Protocol):
    """An engine's load; see `engine.step.EngineLoad`."""

    @property
    def num_running(self) -> int:
        """Sequences running."""
        ...

    @property
    def num_waiting(self) -> int:
        """Sequences waiting."""
        ...

    @property
    def num_free_pages(self) -> int:
        """Pages free or evictable."""
        ...

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        ...

    @property
    def num_pending_prefill_tokens(self) -> int:
        """Tokens known but not computed."""
        ...

    @property
    def preemptions(self) -> Preempted:
        """Since the engine's start."""
        ...

    @property
    def num_prefix_queried_tokens(self) -> int:
        """Tokens looked for in the prefix cache since the start."""
        ...

    @property
    def num_prefix_hit_tokens(self) -> int:
        """Of these, tokens found."""
        ...


def load_message(load: Load) -> worker_pb2.Load:
    """Load as a message."""
    return worker_pb2.Load(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_free_pages=load.num_free_pages,
        num_pending_prefill_tokens=load.num_pending_prefill_tokens,
    )


class StepBatch:
    """Collects what one engine step gave, so that each router gets one message."""

    def __init__(self) -> None:
        self._by_session: dict[RouterSession, list[worker_pb2.SequenceOutput]] = {}

    def add(self, session: RouterSession, output: worker_pb2.SequenceOutput) -> None:
        """Adds the news of one sequence."""
        self._by_session.setdefault(session, []).append(output)

    def send(self, step: int, load: Load) -> None:
        """Sends one StepOutputs to each router that has news."""
        for session, outputs in self._by_session.items():
            message = worker_pb2.StepOutputs(step=step, outputs=outputs, load=load_message(load))
            session.send(worker_pb2.SessionResponse(step_outputs=message))


def observe_step(metrics: WorkerMetrics, load: Load, num_tokens: int, duration_s: float) -> None:
    """Updates the engine's metrics after a step."""
    if num_tokens:
        metrics.observe_step(duration_s=duration_s, num_tokens=num_tokens)
    metrics.observe_load(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_free_pages=load.num_free_pages,
        num_pages=load.num_pages,
        num_pending_tokens=load.num_pending_prefill_tokens,
    )
    totals = load.preemptions
    metrics.observe_preemptions(
        num_recomputes=totals.num_recomputes,
        num_swaps=totals.num_swaps,
        swapped_out_bytes=totals.swapped_out_bytes,
        swapped_in_bytes=totals.swapped_in_bytes,
        num_host_pages=totals.num_host_pages,
        num_free_host_pages=totals.num_free_host_pages,
    )
    metrics.observe_prefix_cache(
        num_queried_tokens=load.num_prefix_queried_tokens, num_hit_tokens=load.num_prefix_hit_tokens
    )
