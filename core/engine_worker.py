"""EngineWorker: what the workers of all roles do alike around their engine.

    built -> what it says of itself (`loaded_worker`, `stream_parts`) -> `_run_engine` -> healthy, drain -> stop

What `start` makes it pushes to `_stack`, which ends all in reverse: whatever reads or writes pages is fenced before the
engine stops, and the engine stops before what reads its events.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AsyncExitStack
from typing import Protocol

from pdserve.core.background import Background
from pdserve.core.layout import KVLayout
from pdserve.core.session import SessionHandler
from pdserve.core.stream_service import StreamParts
from pdserve.core.streams import welcome_message
from pdserve.core.submission import ModelLimits
from pdserve.core.tokenizer import Tokenizer
from pdserve.core.worker_app import LoadedWorker, WorkerContext


class EngineFacts(Protocol):
    """What a worker tells of its engine; see `engine.build.EngineFacts`."""

    @property
    def layout(self) -> KVLayout:
        """Layout of its pages."""
        ...

    @property
    def num_pages(self) -> int:
        """Pages in the pool."""
        ...

    @property
    def identity_digest(self) -> bytes:
        """Equal on all workers that exchange pages."""
        ...

    @property
    def model_name(self) -> str:
        """Name that clients ask for."""
        ...

    @property
    def max_model_len(self) -> int:
        """Prompt and output tokens together, at most."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """End-of-sequence tokens."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """Of the model."""
        ...


class SteppingEngine(Protocol):
    """An engine in its own thread; see `engine.async_engine.AsyncEngine`."""

    def start(self) -> None:
        """Starts its thread."""
        ...

    async def stop(self) -> None:
        """Ends it."""
        ...

    def healthy(self, stall_s: float) -> bool:
        """False when it is dead or a step takes longer than this, seconds."""
        ...


class EventReader(Protocol):
    """What handles an engine's events; see `core.stream_service.StreamService`."""

    async def run(self) -> None:
        """Returns when the engine has stopped."""
        ...

    async def drain(self) -> None:
        """Waits until nothing of any attempt is left."""
        ...


class EngineWorker(ABC):
    """`core.worker_app.WorkerService` of a role, which says how it starts."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._engine: SteppingEngine | None = None
        self._stall_s = 0.0
        self._reader: EventReader

    @abstractmethod
    async def start(self, context: WorkerContext) -> tuple[SessionHandler, LoadedWorker]:
        """See `WorkerService`."""

    def _run_engine(self, context: WorkerContext, engine: SteppingEngine, reader: EventReader) -> None:
        """Starts both; what is pushed to the stack after this is ended before them."""
        events = Background(context.fail)
        engine.start()
        self._engine, self._reader, self._stall_s = engine, reader, context.worker.step_stall_s
        events.start(reader.run(), "engine events")
        self._stack.push_async_callback(events.wait)
        self._stack.push_async_callback(engine.stop)

    def healthy(self) -> bool:
        """See `WorkerService`."""
        return self._engine is None or self._engine.healthy(self._stall_s)

    def ready(self) -> bool:
        """See `WorkerService`."""
        return True

    async def drain(self) -> None:
        """See `WorkerService`."""
        await self._reader.drain()

    async def stop(self) -> None:
        """See `WorkerService`."""
        await self._stack.aclose()


def loaded_worker(
    built: EngineFacts,
    max_num_seqs: int,
    data_address: str | None = None,
    *,
    transports: Iterable[str] = (),
    host_id: str = "",
) -> LoadedWorker:
    """What a worker says of itself to the registry.

    Args:
        built: Its engine.
        max_num_seqs: Sequences that may run at once.
        data_address: host:port of the KV data plane; None: there is none.
        transports: Its data planes, most wanted first.
        host_id: See `kvtransfer.negotiation.host_id`; empty: no plane within the host.
    """
    return LoadedWorker(
        identity_digest=built.identity_digest,
        layout=built.layout.to_json(),
        model=built.model_name,
        max_model_len=built.max_model_len,
        vocab_size=built.vocab_size,
        num_pages=built.num_pages,
        max_num_seqs=max_num_seqs,
        data_address=data_address,
        transports=tuple(transports),
        host_id=host_id,
    )


def stream_parts(context: WorkerContext, built: EngineFacts, loaded: LoadedWorker) -> StreamParts:
    """What a role's service is made of, beside its engine."""
    return StreamParts(
        welcome=welcome_message(context, loaded, built.layout.page_size),
        limits=ModelLimits(
            max_model_len=built.max_model_len, vocab_size=built.vocab_size, eos_token_ids=built.eos_token_ids
        ),
        tokenizer=built.tokenizer,
        clock=context.clock,
        metrics=context.metrics,
        tracing=context.tracing,
    )
