"""Keeps one session to every worker that the registry names.

The registry is for discovery only: a session that lives is kept whatever the registry says; one that ended is opened
again, with backoff, while the registry still names the worker, and at once when it names a new incarnation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Protocol

import grpc.aio

from pdserve.core.clock import Clock
from pdserve.core.registry import WorkerRecord
from pdserve.router.worker_client import GrpcWorkerClient
from pdserve.router.worker_set import WorkerSet
from pdserve.router.worker_table import Listed

MIN_BACKOFF_S, MAX_BACKOFF_S = 0.1, 2.0

_log = logging.getLogger(__name__)


class Discovery(Protocol):
    """Where workers are found; `core.registry.Registry` is one."""

    def watch(self) -> AsyncIterator[tuple[WorkerRecord, ...]]:
        """Yields the table at first and whenever it changed."""
        ...


class Connector:
    """Owns the sessions.

    Args:
        workers: What is changed.
        discovery: Names the workers.
        router_id: Name of this router.
        clock: Time.
        heartbeat_s: Time between signs of life.
        worker_timeout_s: A worker silent for this long is taken for dead.
        open_channel: Makes a gRPC channel to host:port.
        count_late: Called for each message that came for an ended attempt.
        refusal: As for `GrpcWorkerClient`.
    """

    def __init__(
        self,
        workers: WorkerSet,
        discovery: Discovery,
        router_id: str,
        clock: Clock,
        *,
        heartbeat_s: float,
        worker_timeout_s: float,
        open_channel: Callable[[str], grpc.aio.Channel],
        count_late: Callable[[], None] = lambda: None,
        refusal: Callable[[str], str | None] | None = None,
    ) -> None:
        self._workers = workers
        self._discovery = discovery
        self._router_id = router_id
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._worker_timeout_s = worker_timeout_s
        self._open_channel = open_channel
        self._count_late, self._refusal = count_late, refusal
        self._listed: dict[str, Listed] = {}
        self._news: dict[str, asyncio.Event] = {}  # of each worker that a keeper cares for

    async def run(self) -> None:
        """Follows the registry until cancelled, or until a session fails by a fault of ours; ends every session."""
        async with asyncio.TaskGroup() as keepers:
            async for records in self._discovery.watch():
                self._follow(records, keepers)

    def _follow(self, records: tuple[WorkerRecord, ...], keepers: asyncio.TaskGroup) -> None:
        old = self._listed
        self._listed = {
            r.worker_id: Listed(worker_id=r.worker_id, role=r.role, incarnation=r.incarnation, address=r.address)
            for r in records
        }
        self._workers.set_listed(self._listed.values())
        for worker_id, listed in self._listed.items():
            if worker_id not in self._news:
                self._news[worker_id] = asyncio.Event()
                keepers.create_task(self._keep(worker_id), name=f"session-{worker_id}")
            elif listed != old.get(worker_id):
                self._news[worker_id].set()

    async def _keep(self, worker_id: str) -> None:
        backoff_s = MIN_BACKOFF_S
        logged: tuple[Listed, str] | None = None  # whom it could not be connected to, and why
        news = self._news[worker_id]
        while (listed := self._listed.get(worker_id)) is not None:
            news.clear()
            client = GrpcWorkerClient(
                listed,
                self._router_id,
                self._clock,
                self._workers,
                heartbeat_s=self._heartbeat_s,
                timeout_s=self._worker_timeout_s,
                open_channel=self._open_channel,
                count_late=self._count_late,
                refusal=self._refusal,
            )
            try:
                error = await client.run()
            finally:
                self._workers.session_closed(worker_id, client.why_not_open)
            if (listed, error.reason) != logged:
                _log.warning("%s", error.message)
            logged = (listed, error.reason)
            if client.was_open:
                backoff_s, logged = MIN_BACKOFF_S, None
            with suppress(TimeoutError):
                await self._clock.wait_for(news.wait(), backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
        del self._news[worker_id]
