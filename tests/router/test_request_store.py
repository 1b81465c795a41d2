"""Records in a real Valkey: compare-and-set, idempotency, ends, and a store that goes away."""

from __future__ import annotations

import asyncio
import itertools
import socket
import socketserver
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from pdserve.core.clock import MonotonicClock
from pdserve.core.errors import ConfigError, PdserveError, RequestError, UnavailableError, UnknownError
from pdserve.core.telemetry import RouterMetrics
from pdserve.router.record import PHASES, DuplicateRequestError, RecordChange, RequestRecord, RequestState
from pdserve.router.request_store import RedisRequestStore, record_key
from tests.support.redis_server import RedisServer, redis_process, redis_server

S = RequestState


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_process() as running:
        yield running


def run(url: str, test: Callable[[RedisRequestStore], Awaitable[None]], max_pending: int = 100) -> None:
    async def main() -> None:
        metrics = RouterMetrics(CollectorRegistry())
        store = RedisRequestStore(url, MonotonicClock(), record_ttl_s=60, max_pending=max_pending, metrics=metrics)
        try:
            await store.start()
            await test(store)
        finally:
            await store.close()

    asyncio.run(main())


@contextmanager
def losing_proxy(port: int) -> Iterator[tuple[int, list[str]]]:
    """A relay to the store; a word put into the list makes it drop one connection after the command with that word."""
    lost: list[str] = []

    class Relay(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection(("127.0.0.1", port)) as store:
                while data := self.request.recv(65536):
                    store.sendall(data)
                    answer = store.recv(65536)
                    if lost and lost[0].encode() in data:
                        lost.clear()
                        return
                    self.request.sendall(answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Relay) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1], lost
        finally:
            server.shutdown()
            thread.join()


_names = (f"request-{i}" for i in itertools.count())


def record(request_id: str, digest: bytes = b"\x00\xff") -> RequestRecord:
    return RequestRecord(
        request_id=request_id,
        owner="router-0",
        model="m",
        request_digest=digest,
        prompt=b"\x01\x00\x00\x00",
        sampling=b"\x80",
        deadline_ms=7,
    )


def change(request_id: str, state: RequestState, epoch: int, attempt: int = 1, **fields: str) -> RecordChange:
    return RecordChange(request_id=request_id, attempt=attempt, owner_epoch=epoch, state=state, fields=fields)


def test_a_whole_life(server: RedisServer) -> None:
    name = next(_names)

    async def test(store: RedisRequestStore) -> None:
        epoch = await store.create(record(name))
        assert await store.get(name) == replace(record(name), owner_epoch=epoch)
        store.update(change(name, S.PLACED, epoch, prefill_worker="p0", decode_worker="d0"))
        store.update(change(name, S.DECODING, epoch))
        with pytest.raises(RequestError) as caught:
            await store.delete(name)
        assert caught.value.status == "FAILED_PRECONDITION"
        store.update(change(name, S.FINISHED, epoch, finish_reason="stop", emitted_tokens="4"))
        got = await store.get(name)
        assert (got.state, got.emitted_tokens, got.decode_worker) == (S.FINISHED, 4, "d0")
        assert (got.prompt, got.sampling) == (b"", b""), "nobody needs them any more"
        assert got.request_digest == b"\x00\xff"
        redis = Redis.from_url(server.url)
        assert 0 < await redis.ttl(record_key(name)) <= 60
        await redis.aclose()
        assert await store.delete(name)
        assert not await store.delete(name)
        with pytest.raises(UnknownError):
            await store.get(name)

    run(server.url, test)


def test_same_id_again(server: RedisServer) -> None:
    name = next(_names)

    async def test(store: RedisRequestStore) -> None:
        await store.create(record(name))
        for digest, word in ((b"\x00\xff", "Attach"), (b"other", "different request")):
            with pytest.raises(DuplicateRequestError, match=word):
                await store.create(record(name, digest))

    run(server.url, test)


def test_every_life_of_an_id_has_a_higher_epoch_and_its_own_record(server: RedisServer) -> None:
    name = next(_names)

    async def test(store: RedisRequestStore) -> None:
        before = 0
        for _ in range(50):
            epoch = await store.create(record(name))
            assert before < epoch < 2**53, "grows, and Lua's numbers hold it exactly"
            store.update(change(name, S.FINISHED, before, attempt=9))
            assert (await store.get(name)).state is S.QUEUED, "a late change of the life before"
            store.update(change(name, S.CANCELLED, epoch))
            assert await store.delete(name)
            before = epoch

    run(server.url, test)


def test_an_open_record_outlives_its_deadline_by_minutes_only(server: RedisServer) -> None:
    with_deadline, without = next(_names), next(_names)

    async def test(store: RedisRequestStore) -> None:
        await store.create(replace(record(with_deadline), deadline_ms=5_000))
        await store.create(replace(record(without), deadline_ms=0))
        redis = Redis.from_url(server.url)
        left_s = [await redis.ttl(record_key(name)) for name in (with_deadline, without)]
        await redis.aclose()
        assert 5 < left_s[0] <= 605 and 80_000 < left_s[1] <= 86_400

    run(server.url, test)


def test_a_thousand_at_once_need_few_connections(server: RedisServer) -> None:
    names = [next(_names) for _ in range(1000)]

    async def test(store: RedisRequestStore) -> None:
        await asyncio.gather(*(store.create(record(n)) for n in names))
        assert (await store.get(names[-1])).state is S.QUEUED
        redis = Redis.from_url(server.url)
        assert (await redis.info("clients"))["connected_clients"] <= 5
        await redis.aclose()

    run(server.url, test)


Step = tuple[RequestState, int, int]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(list(S)), st.integers(1, 3), st.sampled_from([-1, 0, 0, 1])), max_size=8))
def test_compare_and_set_against_the_rule(server: RedisServer, steps: list[Step]) -> None:
    name = next(_names)

    async def test(store: RedisRequestStore) -> None:
        own = await store.create(record(name))
        now = (S.QUEUED, 1)
        for state, attempt, off in steps:
            store.update(change(name, state, own + off, attempt))
            if PHASES[now[0]] < 3 and not off and (attempt, PHASES[state]) >= (now[1], PHASES[now[0]]):
                now = (state, attempt)
            got = await store.get(name)
            assert (got.state, got.attempt, got.owner_epoch) == (*now, own)

    run(server.url, test)


def test_changes_survive_an_outage_and_new_requests_fail_fast() -> None:
    with redis_process() as server:

        async def test(store: RedisRequestStore) -> None:
            epoch = await store.create(record("a"))
            server.stop()
            with pytest.raises(UnavailableError) as caught:
                await asyncio.wait_for(store.create(record("b")), 5)
            assert caught.value.reason == "STORE_UNAVAILABLE"
            store.update(change("a", S.PLACED, epoch, prefill_worker="p0"))
            store.update(change("a", S.DECODING, epoch))
            server.start()
            async with asyncio.timeout(10):
                while (await store.get("a")).state is not S.DECODING:
                    pass
            assert (await store.get("a")).prefill_worker == "p0"
            await store.create(record("b"))

        run(server.url, test)


def test_connections_that_the_store_closed_fail_nobody() -> None:
    """A store that restarted, or closes idle connections, refuses no request that comes afterwards."""
    with redis_process() as server:

        async def test(store: RedisRequestStore) -> None:
            await store.create(record("a"))
            await asyncio.gather(*(store.get("a") for _ in range(8)))  # eight connections lie in the pool
            server.stop()
            server.start()
            for i in range(4):
                await store.create(record(f"new-{i}"))
            await asyncio.gather(*(store.get("new-0") for _ in range(8)))

        run(server.url, test)


def test_a_creation_whose_answer_was_lost_is_sent_again() -> None:
    with redis_process() as server, losing_proxy(server.port) as (port, lost):

        async def test(store: RedisRequestStore) -> None:
            lost.append("EVAL")
            epoch = await store.create(record("a"))
            assert not lost, "no answer was lost"
            assert (await store.get("a")).owner_epoch == epoch
            with pytest.raises(DuplicateRequestError):
                await store.create(record("a"))

        run(f"redis://127.0.0.1:{port}/0", test)


def test_pending_changes_are_bounded() -> None:
    with redis_process() as server:

        async def test(store: RedisRequestStore) -> None:
            server.stop()
            for i in range(200):
                store.update(change(f"r{i}", S.PLACED, 1))
            assert store.num_dropped == 200 - 10

        run(server.url, test, max_pending=10)


def test_start_refuses_no_store_and_an_evicting_one() -> None:
    async def nothing(store: RedisRequestStore) -> None:
        return None

    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:1"):
        run("redis://127.0.0.1:1/0", nothing)
    with (
        redis_server("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru") as url,
        pytest.raises(ConfigError, match="allkeys-lru"),
    ):
        run(url, nothing)


def test_foreign_value_is_a_typed_error(server: RedisServer) -> None:
    name = next(_names)

    async def test(store: RedisRequestStore) -> None:
        redis = Redis.from_url(server.url)
        await redis.set(record_key(name), "not a hash")
        with pytest.raises(PdserveError):
            await store.get(name)
        await redis.delete(record_key(name))
        await redis.aclose()

    run(server.url, test)


def test_a_foreign_value_holds_up_no_other_record(server: RedisServer) -> None:
    ours, theirs = next(_names), next(_names)

    async def test(store: RedisRequestStore) -> None:
        epoch = await store.create(record(ours))
        redis = Redis.from_url(server.url)
        await redis.set(record_key(theirs), "not a hash")
        store.update(change(theirs, S.FINISHED, 1))
        store.update(change(ours, S.FINISHED, epoch))
        assert (await store.get(ours)).state is S.FINISHED
        async with asyncio.timeout(10):
            await store._flush(None)
        assert store.num_refused == 1
        await redis.delete(record_key(theirs))
        await redis.aclose()

    run(server.url, test)


def test_a_full_store_is_told_and_counted_and_changes_wait_for_room() -> None:
    with redis_process() as server:

        async def test(store: RedisRequestStore) -> None:
            epoch = await store.create(record("a"))
            redis = Redis.from_url(server.url)
            await redis.config_set("maxmemory", 1)
            with pytest.raises(UnavailableError) as caught:
                await store.create(record("b"))
            assert caught.value.reason == "STORE_UNAVAILABLE"
            store.update(change("a", S.FINISHED, epoch))
            await store._flush(None)
            await redis.config_set("maxmemory", 0)
            async with asyncio.timeout(10):
                while (await store.get("a")).state is not S.FINISHED:
                    pass
            await redis.aclose()
            samples = (s for m in store._metrics.store_errors.collect() for s in m.samples)
            errors = {s.labels["operation"]: s.value for s in samples if s.name.endswith("_total")}
            assert errors["create"] == 1
            assert errors["update"] >= 1

        run(server.url, test)


def test_two_routers_that_are_sent_the_same_id_make_one_request(server: RedisServer) -> None:
    names = [next(_names) for _ in range(50)]

    async def test(one: RedisRequestStore) -> None:
        other = RedisRequestStore(
            server.url, MonotonicClock(), record_ttl_s=60, max_pending=9, metrics=RouterMetrics(CollectorRegistry())
        )
        await other.start()
        try:
            both = [store.create(record(n)) for n in names for store in (one, other)]
            told = await asyncio.gather(*both, return_exceptions=True)
        finally:
            await other.close()
        for pair in zip(told[::2], told[1::2], strict=True):
            assert sorted(type(t).__name__ for t in pair) == ["DuplicateRequestError", "int"]

    run(server.url, test)


def test_a_fault_of_ours_is_heard_instead_of_creating_for_ever(server: RedisServer) -> None:
    async def test(store: RedisRequestStore) -> None:
        creating = asyncio.create_task(store.create(replace(record(next(_names)), owner="\ud800")))
        with pytest.raises(UnicodeEncodeError):
            await asyncio.wait_for(store.fault(), 10)
        creating.cancel()

    run(server.url, test)
