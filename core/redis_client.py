"""How our processes talk to Redis or Valkey: no hidden retries, short time-outs, a store that keeps its data."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from pdserve.core.errors import ConfigError

TIMEOUT_S = 2.0
STORE_ERRORS = (RedisError, OSError, TimeoutError)  # what an operation raises when the store is down or in trouble


def check_cancelled() -> None:
    """First in each `except STORE_ERRORS`: closing a connection of a dying store may raise over our cancellation.

    Raises:
        CancelledError: This task was cancelled.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def open_redis(url: str) -> Redis:
    """A client that connects on first use, never retries by itself and gives up after `TIMEOUT_S`.

    Raises:
        ConfigError: The URL cannot be read.
    """
    try:
        return Redis.from_url(
            url,
            decode_responses=True,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            health_check_interval=0,
        )
    except ValueError as e:
        raise ConfigError(f"--redis-url {shown_url(url)}: {e}") from e


async def check_redis(client: Redis, url: str) -> None:
    """Proves that the store answers and does not evict what it holds.

    Raises:
        ConfigError: It does not answer, refuses us, or evicts.
    """
    try:
        memory = await client.info("memory")
    except STORE_ERRORS as e:
        raise ConfigError(
            f"no Redis at {shown_url(url)} ({e or type(e).__name__}): start one (redis-server or valkey-server) and "
            "name it with --redis-url, or use 'pdserve up', which starts one by itself",
            reason="NO_REDIS",
        ) from e
    limit, policy = int(memory.get("maxmemory", 0)), str(memory.get("maxmemory_policy", "noeviction"))
    if limit > 0 and policy != "noeviction":
        raise ConfigError(
            f"Redis at {shown_url(url)} may evict request records (maxmemory-policy {policy}): set "
            "maxmemory-policy noeviction",
            reason="REDIS_EVICTS",
        )


def shown_url(url: str) -> str:
    """The URL without its password."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return parts._replace(netloc=f"***@{parts.netloc.rpartition('@')[2]}").geturl()
