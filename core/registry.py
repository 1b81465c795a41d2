"""Worker discovery in Redis. For discovery only: whether a worker lives is known by its session, never from here.

Two keys of one hash slot per cluster name: a hash worker_id -> record (JSON), and a sorted set worker_id -> expiry in
Redis time. All changes are scripts, so a table is always read whole. A worker refreshes its entry every third of its
time to live. An entry belongs to the incarnation that registered last: an older process neither renews nor removes it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass, fields
from typing import NoReturn, cast

from redis.asyncio import Redis

from pdserve.core.clock import Clock
from pdserve.core.errors import UnavailableError
from pdserve.core.redis_client import STORE_ERRORS, check_cancelled
from pdserve.core.request import Role

READY, DRAINING = "ready", "draining"
MAX_BACKOFF_S = 2.0

_log = logging.getLogger(__name__)

# KEYS: records, expiries, channel. ARGV: worker_id, incarnation, record, ttl_ms, force ("1": take the entry over).
_PUT = """
local old = redis.call('HGET', KEYS[1], ARGV[1])
if old and ARGV[5] ~= '1' and cjson.decode(old)['incarnation'] ~= ARGV[2] then return 0 end
local t = redis.call('TIME')
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
redis.call('ZADD', KEYS[2], t[1] * 1000 + math.floor(t[2] / 1000) + ARGV[4], ARGV[1])
if old ~= ARGV[3] then redis.call('PUBLISH', KEYS[3], ARGV[1]) end
return 1
"""
# KEYS: records, expiries, channel. ARGV: worker_id, incarnation.
_REMOVE = """
local old = redis.call('HGET', KEYS[1], ARGV[1])
if not old or cjson.decode(old)['incarnation'] ~= ARGV[2] then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('PUBLISH', KEYS[3], ARGV[1])
return 1
"""
# KEYS: records, expiries.
_LIST = """
local t = redis.call('TIME')
local gone = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', t[1] * 1000 + math.floor(t[2] / 1000))
for _, id in ipairs(gone) do
  redis.call('HDEL', KEYS[1], id)
  redis.call('ZREM', KEYS[2], id)
end
return redis.call('HVALS', KEYS[1])
"""


@dataclass(frozen=True, kw_only=True)
class WorkerRecord:
    """What a worker tells the world about itself.

    Attributes:
        worker_id: Stable name.
        role: What it computes.
        incarnation: Process start, hex.
        address: host:port of its gRPC endpoint.
        data_address: host:port of its KV data plane; empty if it has none.
        identity_digest: Hex; equal on every worker of a pool.
        layout: KVLayout as JSON text.
        model: Served model name.
        max_model_len: Prompt and output tokens together, at most.
        vocab_size: Size of the vocabulary.
        num_pages: KV pages in all.
        max_num_seqs: Sequences that may run at once.
        state: `READY` or `DRAINING`.
    """

    worker_id: str
    role: Role
    incarnation: str
    address: str
    data_address: str = ""
    identity_digest: str = ""
    layout: str = ""
    model: str = ""
    max_model_len: int = 0
    vocab_size: int = 0
    num_pages: int = 0
    max_num_seqs: int = 0
    state: str = READY

    def to_json(self) -> str:
        """The record as stored."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> WorkerRecord:
        """Reads a stored record; fields of newer versions are ignored.

        Raises:
            ValueError: Not a record.
        """
        raw = json.loads(text)
        known = {f.name for f in fields(cls)}
        try:
            return cls(**{k: v for k, v in raw.items() if k in known} | {"role": Role(raw["role"])})
        except (TypeError, KeyError, AttributeError) as e:
            raise ValueError(f"not a worker record: {e}") from e


class Registry:
    """The table of workers of one cluster name.

    Args:
        redis: A client of `core.redis_client.open_redis`; closed by its owner.
        cluster: Separates deployments that share one Redis.
        clock: For polling and refreshing.
        ttl_s: An entry that is not refreshed for this long is gone.
        poll_s: Time between two reads of `watch` when nothing was announced.
    """

    def __init__(self, redis: Redis, cluster: str, clock: Clock, *, ttl_s: float = 10.0, poll_s: float = 1.0) -> None:
        self._redis = redis
        self._clock = clock
        self._ttl_s = ttl_s
        self._poll_s = poll_s
        tag = f"{{pdserve:{cluster}}}"
        self._channel = f"{tag}:workers:changed"
        self._keys = [f"{tag}:workers", f"{tag}:workers:expiry", self._channel]

    async def register(self, record: WorkerRecord) -> None:
        """Puts a worker into the table, over any entry of the same name.

        Raises:
            UnavailableError: The store is down.
        """
        await self._put(record, force=True)

    async def refresh(self, record: WorkerRecord) -> bool:
        """Renews or changes an entry. Returns False when a newer process of the same name has taken it over.

        Raises:
            UnavailableError: The store is down.
        """
        return await self._put(record, force=False)

    async def unregister(self, record: WorkerRecord) -> None:
        """Removes the entry if it is this incarnation's.

        Raises:
            UnavailableError: The store is down.
        """
        await self._eval(_REMOVE, self._keys, record.worker_id, record.incarnation)

    async def workers(self) -> tuple[WorkerRecord, ...]:
        """The table now, by worker_id. Entries that cannot be read are logged and left out.

        Raises:
            UnavailableError: The store is down.
        """
        found = []
        for text in cast(list[str], await self._eval(_LIST, self._keys[:2])):
            try:
                found.append(WorkerRecord.from_json(text))
            except ValueError as e:
                _log.warning("worker registry: %s", e)
        return tuple(sorted(found, key=lambda record: record.worker_id))

    async def keep_registered(self, current: Callable[[], WorkerRecord]) -> NoReturn:
        """Refreshes a worker's entry until cancelled; rides out a store that is down.

        Args:
            current: The record to store, asked each time.
        """
        trouble = False
        while True:
            await self._clock.sleep(self._ttl_s / 3)
            try:
                ours = await self.refresh(current())
            except UnavailableError as e:
                if not trouble:
                    _log.warning("worker registry: %s; serving goes on, retrying", e.message)
                trouble = True
                continue
            if not ours and not trouble:
                _log.error("another process registered as worker %s; this one is not found", current().worker_id)
            trouble = not ours

    async def watch(self) -> AsyncGenerator[tuple[WorkerRecord, ...], None]:
        """Yields the table at first and whenever it changed. While the store is down it yields nothing and retries."""
        changed = asyncio.Event()
        listener = asyncio.create_task(self._listen(changed))
        try:
            async with aclosing(self._tables(changed)) as tables:
                async for table in tables:
                    yield table
        finally:
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)

    async def _tables(self, changed: asyncio.Event) -> AsyncGenerator[tuple[WorkerRecord, ...], None]:
        last: tuple[WorkerRecord, ...] | None = None
        backoff_s = 0.0
        while True:
            changed.clear()
            try:
                table = await self.workers()
            except UnavailableError as e:
                if not backoff_s:
                    _log.warning("worker registry: %s; known workers stay, retrying", e.message)
                backoff_s = min(MAX_BACKOFF_S, 2 * backoff_s or 0.1)
                await self._clock.sleep(backoff_s)
                continue
            backoff_s = 0.0
            if table != last:
                last = table
                yield table
            with suppress(TimeoutError):  # then it is time to poll: an expired entry announces nothing
                await self._clock.wait_for(changed.wait(), self._poll_s)

    async def _listen(self, changed: asyncio.Event) -> NoReturn:
        while True:
            try:
                async with self._redis.pubsub() as pubsub:
                    await pubsub.subscribe(self._channel)
                    while True:
                        if await pubsub.get_message(ignore_subscribe_messages=True, timeout=self._poll_s) is not None:
                            changed.set()
            except STORE_ERRORS:
                check_cancelled()
                await self._clock.sleep(self._poll_s)  # the poll reports the trouble; this is only for speed

    async def _put(self, record: WorkerRecord, *, force: bool) -> bool:
        ttl_ms = str(round(self._ttl_s * 1000))
        text = record.to_json()
        force_flag = "1" if force else "0"
        return bool(await self._eval(_PUT, self._keys, record.worker_id, record.incarnation, text, ttl_ms, force_flag))

    async def _eval(self, script: str, keys: list[str], *args: str) -> object:
        try:
            return await self._redis.eval(script, len(keys), *keys, *args)
        except STORE_ERRORS as e:
            check_cancelled()
            raise UnavailableError(f"Redis does not answer: {e or type(e).__name__}", reason="STORE_DOWN") from e
