"""Request records in Redis: accepted ones are awaited, later changes are written in the background in order.

New records that wait at the same time share one round trip, so that a burst of requests needs no burst of connections.

The background writer holds at most one change per request (a newer one absorbs the older), so it is bounded by the
open requests and never blocks a token. While Redis is down it keeps trying; a change that finds no room is counted and
logged.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from importlib.resources import files
from typing import Any, Protocol

import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, ResponseError

from pdserve.core.clock import Clock
from pdserve.core.errors import PdserveError, RequestError, UnavailableError, UnknownError
from pdserve.core.redis_client import STORE_ERRORS, TIMEOUT_S, check_cancelled, check_redis
from pdserve.core.telemetry import RouterMetrics
from pdserve.router.record import (
    PHASES,
    TERMINAL_PHASE,
    RecordChange,
    RequestRecord,
    RequestState,
    duplicate_error,
    record_from_hash,
    record_to_hash,
)

OPEN_TTL_S = 24 * 3600
"""An open record without a deadline, whose owner vanished, is garbage after this long."""
AFTER_DEADLINE_S = 600
"""One with a deadline is garbage so long after it: its end may have to wait for a store that is down."""
MAX_CONNECTIONS = 32
MAX_BATCH = 64
MIN_RETRY_S, MAX_RETRY_S = 0.05, 1.0
FLUSH_TIMEOUT_S = 2.0

_log = logging.getLogger(__name__)


class RequestStore(Protocol):
    """Where request records live."""

    async def create(self, record: RequestRecord) -> int:
        """Stores a new request; `record.owner_epoch` means nothing yet.

        Returns:
            Its first owner epoch: higher than any that a request of this id had before.

        Raises:
            DuplicateRequestError: The id is known.
            UnavailableError: The store does not answer (STORE_UNAVAILABLE).
        """
        ...

    def update(self, change: RecordChange) -> None:
        """Queues a change; returns at once."""
        ...

    async def get(self, request_id: str) -> RequestRecord:
        """The stored record.

        Raises:
            UnknownError: There is none.
            UnavailableError: The store does not answer.
        """
        ...

    async def delete(self, request_id: str) -> bool:
        """Erases the record of an ended request; False when there is none.

        Raises:
            RequestError: It has not ended (FAILED_PRECONDITION).
            UnavailableError: The store does not answer.
        """
        ...


class RedisRequestStore:
    """`RequestStore` in Redis 7 or Valkey.

    Args:
        url: Where the store is.
        clock: For the writer's waits.
        record_ttl_s: Seconds that the record of an ended request is kept.
        max_pending: Requests whose change may wait to be written, at most.
        metrics: Counts errors.

    Attributes:
        num_dropped: Changes that found no room.
        num_refused: Changes that the compare-and-set refused.
    """

    def __init__(self, url: str, clock: Clock, *, record_ttl_s: int, max_pending: int, metrics: RouterMetrics) -> None:
        pool = aioredis.BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=TIMEOUT_S,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )
        self._redis = aioredis.Redis.from_pool(pool)
        self._url = url
        self._clock = clock
        self._ttl_s = record_ttl_s
        self._max_pending = max_pending
        self._metrics = metrics
        self._pending: dict[str, RecordChange] = {}
        self._writing: dict[str, RecordChange] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []
        self._new: deque[tuple[RequestRecord, asyncio.Future[list[Any]]]] = deque()
        self._new_wake = asyncio.Event()
        self._create, self._update, self._delete = (
            files("pdserve.router").joinpath(f"record_{name}.lua").read_text()
            for name in ("create", "update", "delete")
        )
        self.num_dropped = 0
        self.num_refused = 0

    async def start(self) -> None:
        """Proves that the store answers and keeps what it holds, and starts the background writer.

        Raises:
            ConfigError: The store does not answer, or it evicts keys.
        """
        await check_redis(self._redis, self._url)
        self._tasks = [
            asyncio.create_task(self._write_forever(), name="record-writer"),
            asyncio.create_task(self._create_forever(), name="record-creator"),
        ]

    async def fault(self) -> None:
        """Waits, for ever if all is well, until a background task failed by a fault of ours; raises what it raised."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def close(self) -> None:
        """Writes what is pending (for a bounded time) and closes the connections."""
        await self._flush(None)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._redis.aclose(close_connection_pool=True)

    async def create(self, record: RequestRecord) -> int:
        """See `RequestStore`. The epoch comes from the store's clock."""
        reply: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._new.append((record, reply))
        self._new_wake.set()
        found = await reply
        if found[0] == 1:
            return int(found[1])
        raise duplicate_error(record.request_id, found[1] == record.request_digest, RequestState(found[2].decode()))

    def update(self, change: RecordChange) -> None:
        """See `RequestStore`."""
        older = self._pending.get(change.request_id)
        if older is None and len(self._pending) >= self._max_pending:
            self.num_dropped += 1
            self._metrics.store_errors.labels("dropped").inc()
            _log.error("record of %s stays behind: %d changes wait for the store", change.request_id, self._max_pending)
            return
        self._pending[change.request_id] = change.merged(older) if older else change
        self._wake.set()

    async def get(self, request_id: str) -> RequestRecord:
        """See `RequestStore`. Reads what this process wrote."""
        await self._flush(request_id)
        raw = await self._call("get", lambda: self._redis.hgetall(record_key(request_id)))
        if not raw:
            raise UnknownError(
                f"no request {request_id!r} is stored; records of ended requests are kept for {self._ttl_s} s",
                reason="UNKNOWN_REQUEST",
            )
        return record_from_hash(request_id, raw)

    async def delete(self, request_id: str) -> bool:
        """See `RequestStore`."""
        await self._flush(request_id)
        keys = record_key(request_id), f"{{pdserve:{request_id}}}:out"
        result = await self._call("delete", lambda: self._redis.eval(self._delete, 2, *keys))
        if result == 0:
            raise still_running_error(request_id)
        return bool(result == 1)

    async def _create_forever(self) -> None:
        while True:
            await self._new_wake.wait()
            self._new_wake.clear()
            while self._new:
                await self._create_batch()

    async def _create_batch(self) -> None:
        batch = [self._new.popleft() for _ in range(min(MAX_BATCH, len(self._new)))]
        creations = [
            (1, record_key(record.request_id), str(_open_ttl_s(record)), secrets.token_hex(8), *record_to_hash(record))
            for record, _ in batch
        ]
        try:
            results = await self._call("create", lambda: self._eval_all(self._create, creations))
        except UnavailableError as e:
            failed = [*batch, *self._new]  # whoever waits behind them would only wait longer for the same answer
            self._new.clear()
            for _, reply in failed:
                if not reply.done():
                    reply.set_exception(e)
            return
        for (_, reply), result in zip(batch, results, strict=True):
            if reply.done():  # its caller is gone
                continue
            if isinstance(result, ResponseError):  # e.g. out of memory
                self._metrics.store_errors.labels("create").inc()
                reply.set_exception(_unavailable(result))
            else:
                reply.set_result(result)

    async def _eval_all(self, script: str, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        async with self._redis.pipeline(transaction=False) as pipe:
            for arguments in calls:
                pipe.eval(script, *arguments)
            return await pipe.execute(raise_on_error=False)

    async def _call(self, operation: str, send: Callable[[], Awaitable[Any] | Any]) -> Any:
        # every operation may be sent twice: the second one changes nothing that the first one did
        try:
            try:
                return await send()
            except ConnectionError:  # perhaps the store closed a connection that lay idle in the pool, or all of them
                await self._redis.connection_pool.disconnect(inuse_connections=False)
                return await send()
        except STORE_ERRORS as e:
            check_cancelled()
            self._metrics.store_errors.labels(operation).inc()
            raise _unavailable(e) from e

    async def _flush(self, request_id: str | None) -> None:
        def written() -> bool:
            if request_id is None:
                return not self._pending and not self._writing
            return request_id not in self._pending and request_id not in self._writing

        if written():
            return
        async with self._idle:
            try:
                await self._clock.wait_for(self._idle.wait_for(written), FLUSH_TIMEOUT_S)
            except TimeoutError:
                _log.warning("changes of %s are not written yet", request_id or "requests")

    async def _write_forever(self) -> None:
        delay_s = MIN_RETRY_S
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._pending or self._writing:
                try:
                    await self._write_batch()
                    delay_s = MIN_RETRY_S
                except PdserveError as e:
                    _log.warning("%s", e.message)
                    await self._clock.sleep(delay_s)
                    delay_s = min(2 * delay_s, MAX_RETRY_S)

    async def _write_batch(self) -> None:
        while self._pending and len(self._writing) < MAX_BATCH:
            request_id = next(iter(self._pending))
            change = self._pending.pop(request_id)
            older = self._writing.pop(request_id, None)
            self._writing[request_id] = change.merged(older) if older else change
        batch = list(self._writing.values())
        updates = [(1, record_key(change.request_id), *self._update_args(change)) for change in batch]
        results = await self._call("update", lambda: self._eval_all(self._update, updates))
        failed: ResponseError | None = None
        for change, result in zip(batch, results, strict=True):
            if isinstance(result, ResponseError):
                self._metrics.store_errors.labels("update").inc()
                if not str(result).startswith("WRONGTYPE"):  # e.g. out of memory, or a replica: later
                    failed = result
                    continue
            if result != 1:
                self.num_refused += 1
                self._metrics.store_errors.labels("refused").inc()
                _log.warning("record of %s not changed to %s: %s", change.request_id, change.state, result)
            del self._writing[change.request_id]
        async with self._idle:
            self._idle.notify_all()
        if failed is not None:
            raise UnavailableError(f"the request store refuses changes: {failed}", reason="STORE_UNAVAILABLE")

    def _update_args(self, change: RecordChange) -> list[str]:
        phase = PHASES[change.state]
        ttl_s = self._ttl_s if phase == TERMINAL_PHASE else 0
        args = [str(change.attempt), str(phase), str(change.owner_epoch), str(ttl_s), "state", str(change.state)]
        for name, value in change.fields.items():
            args += [name, value]
        return args


def record_key(request_id: str) -> str:
    """Redis key of a request's record; all keys of one request share its hash tag."""
    return f"{{pdserve:{request_id}}}:req"


def _open_ttl_s(record: RequestRecord) -> int:
    return -(-record.deadline_ms // 1000) + AFTER_DEADLINE_S if record.deadline_ms else OPEN_TTL_S


def still_running_error(request_id: str) -> RequestError:
    """The refusal to erase a request that has not ended."""
    return RequestError(
        f"request {request_id!r} has not ended; cancel it first",
        status="FAILED_PRECONDITION",
        reason="STILL_RUNNING",
    )


def _unavailable(error: BaseException) -> UnavailableError:
    return UnavailableError(
        f"the request store does not answer ({error or type(error).__name__}); retry soon, running requests go on",
        reason="STORE_UNAVAILABLE",
        retry_after_s=1.0,
    )
