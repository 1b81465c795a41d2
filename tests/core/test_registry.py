"""Worker discovery on a real Valkey: who owns an entry, when it goes, what a store that is down does."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest

from pdserve.core.clock import MonotonicClock
from pdserve.core.errors import ConfigError, UnavailableError
from pdserve.core.redis_client import check_redis, open_redis, shown_url
from pdserve.core.registry import DRAINING, Registry, WorkerRecord
from pdserve.core.request import Role
from tests.support.redis_server import RedisServer, free_port, redis_process
from tests.support.waiting import eventually

DEADLINE_S = 10.0
RECORD = WorkerRecord(worker_id="w1", role=Role.DECODE, incarnation="aa", address="127.0.0.1:1", num_pages=9)


@pytest.fixture(scope="module")
def store() -> Iterator[RedisServer]:
    with redis_process() as server:
        yield server


@asynccontextmanager
async def registry(store: RedisServer, cluster: str, **options):
    client = open_redis(store.url)
    try:
        yield Registry(client, cluster, MonotonicClock(), **options)
    finally:
        await client.aclose()


def test_an_entry_belongs_to_the_process_that_registered_last(store):
    async def main():
        async with registry(store, "owner") as table:
            await table.register(RECORD)
            assert await table.workers() == (RECORD,)
            newer = replace(RECORD, incarnation="bb", address="127.0.0.1:2")
            await table.register(newer)
            assert not await table.refresh(replace(RECORD, state=DRAINING))
            await table.unregister(RECORD)
            assert await table.workers() == (newer,)
            assert await table.refresh(replace(newer, state=DRAINING))
            assert (await table.workers())[0].state == DRAINING
            await table.unregister(newer)
            assert await table.workers() == ()

    asyncio.run(main())


def test_clusters_do_not_see_each_other_and_use_one_hash_slot_each(store):
    async def main():
        async with registry(store, "one") as one, registry(store, "two") as two:
            await one.register(RECORD)
            await two.register(replace(RECORD, worker_id="w2"))
            assert [r.worker_id for r in await one.workers()] == ["w1"]
            assert [r.worker_id for r in await two.workers()] == ["w2"]
            client = open_redis(store.url)
            keys = [k for k in await client.keys("*") if "one" in k]
            await client.aclose()
            assert len(keys) == 2
            assert all(k.startswith("{pdserve:one}:") for k in keys)

    asyncio.run(main())


def test_an_entry_that_is_not_refreshed_goes(store):
    async def main():
        async with (
            registry(store, "ttl", ttl_s=60, poll_s=0.02) as table,
            registry(store, "ttl", ttl_s=0.1) as hasty,
            asyncio.timeout(DEADLINE_S),
            aclosing(table.watch()) as tables,
        ):
            await table.register(RECORD)
            assert await anext(tables) == (RECORD,)
            await hasty.register(RECORD)
            assert await anext(tables) == ()

    asyncio.run(main())


def test_watch_sees_changes_at_once(store):
    async def main():
        async with (
            registry(store, "watch", poll_s=3600) as table,
            asyncio.timeout(DEADLINE_S),
            aclosing(table.watch()) as tables,
        ):
            assert await anext(tables) == ()
            seen = asyncio.ensure_future(anext(tables))
            await until_subscribed(store, "watch")
            await table.register(RECORD)  # found by the announcement: the poll is an hour away
            assert await seen == (RECORD,)

    asyncio.run(main())


async def until_subscribed(store: RedisServer, cluster: str) -> None:
    channel = f"{{pdserve:{cluster}}}:workers:changed"
    client = open_redis(store.url)

    async def subscribed() -> bool:
        return (await client.pubsub_numsub(channel))[0][1] > 0

    await eventually(subscribed)
    await client.aclose()


def test_a_dead_store_empties_nothing_and_its_return_is_noticed(caplog):
    async def main(store: RedisServer):
        async with (
            registry(store, "down", poll_s=0.02, ttl_s=60) as table,
            registry(store, "down", ttl_s=1.0) as worker,  # refreshes three times a second
        ):
            await table.register(RECORD)
            async with asyncio.timeout(20), aclosing(table.watch()) as tables:
                assert await anext(tables) == (RECORD,)
                store.stop()
                with pytest.raises(UnavailableError):
                    await table.workers()
                waiting = asyncio.ensure_future(anext(tables))
                await eventually(lambda: "known workers stay" in caplog.text)
                assert not waiting.done()
                store.start()
                keeper = asyncio.ensure_future(worker.keep_registered(lambda: replace(RECORD, state=DRAINING)))
                while (found := await waiting) == ():  # the store may have come back empty
                    waiting = asyncio.ensure_future(anext(tables))
                keeper.cancel()
                assert found == (replace(RECORD, state=DRAINING),)

    with redis_process() as own:
        asyncio.run(main(own))
    assert sum("known workers stay" in r.getMessage() for r in caplog.records) == 1  # told once, not per try


def test_keep_registered_says_when_its_name_is_taken(store, caplog):
    async def main():
        async with registry(store, "taken", ttl_s=0.03) as table:
            await table.register(replace(RECORD, incarnation="bb"))
            async with registry(store, "taken", ttl_s=60) as other:
                await other.register(replace(RECORD, incarnation="bb"))
            keeper = asyncio.ensure_future(table.keep_registered(lambda: RECORD))
            await eventually(lambda: caplog.records)
            keeper.cancel()

    asyncio.run(main())
    assert "another process registered as worker w1" in caplog.text


def test_unreadable_entries_are_left_out(store, caplog):
    async def main():
        async with registry(store, "bad") as table:
            await table.register(RECORD)
            client = open_redis(store.url)
            for name, text in (("x", "no json"), ("y", "[]"), ("z", '{"role": "decode"}'), ("v", '{"role": "cook"}')):
                await client.hset("{pdserve:bad}:workers", name, text)
            newer = RECORD.to_json()[:-1] + ', "field_of_the_future": 1}'
            await client.hset("{pdserve:bad}:workers", "w1", newer)
            await client.aclose()
            assert await table.workers() == (RECORD,)

    asyncio.run(main())
    assert len(caplog.records) == 4


# ---- the store at start --------------------------------------------------------------------------------------------


def check(url: str) -> None:
    async def main():
        client = open_redis(url)
        try:
            await check_redis(client, url)
        finally:
            await client.aclose()

    asyncio.run(main())


def test_no_redis_is_a_config_error_that_says_what_to_do():
    with pytest.raises(ConfigError, match=r"no Redis at redis://127\.0\.0\.1:\d+.*--redis-url.*pdserve up"):
        check(f"redis://127.0.0.1:{free_port()}/0")


def test_a_listener_that_is_no_redis_is_refused(monkeypatch):
    monkeypatch.setattr("pdserve.core.redis_client.TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(ConfigError, match="no Redis at"):
        check(f"redis://127.0.0.1:{silent.getsockname()[1]}/0")


def test_an_unreadable_url_is_a_config_error():
    with pytest.raises(ConfigError, match="--redis-url"):
        open_redis("http://127.0.0.1:6379")


def test_a_store_that_evicts_is_refused():
    with (
        redis_process("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru") as server,
        pytest.raises(ConfigError, match="maxmemory-policy allkeys-lru"),
    ):
        check(server.url)
    with redis_process("--maxmemory", "100mb", "--maxmemory-policy", "noeviction") as server:
        check(server.url)


def test_passwords_are_not_shown():
    assert shown_url("redis://user:secret@host:6379/0") == "redis://***@host:6379/0"
    assert shown_url("redis://host:6379/0") == "redis://host:6379/0"


class BreaksWhenCancelled:
    """A store that dies while we leave it: what closes the connection raises over the cancellation."""

    def __init__(self) -> None:
        self.waiting = asyncio.Event()

    async def eval(self, *args: object) -> list[str]:
        return await self.get_message()

    def pubsub(self):
        return self

    async def __aenter__(self):
        return self

    async def __aexit__(self, *args: object) -> None:
        return None

    async def subscribe(self, channel: str) -> None:
        return None

    async def get_message(self, **options: object) -> list[str]:
        self.waiting.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ConnectionResetError("the store is gone") from None
        return []


def test_a_cancellation_is_not_lost_in_a_store_that_dies_with_it():
    async def main():
        redis = BreaksWhenCancelled()
        tables = Registry(redis, "gone", MonotonicClock()).watch()
        watching = asyncio.ensure_future(anext(tables))
        await redis.waiting.wait()
        watching.cancel()
        done, _ = await asyncio.wait([watching], timeout=5)
        assert done and watching.cancelled()

    asyncio.run(main())
