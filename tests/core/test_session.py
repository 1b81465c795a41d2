"""The worker's side of Worker.Session over real connections: fencing, cutting off, silence, ends."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from pdserve.core.clock import MonotonicClock
from pdserve.core.errors import CapacityError, PdserveError
from pdserve.core.grpc_server import GrpcServer
from pdserve.core.session import SERVICE_NAME, FenceTable, SessionServer
from pdserve.core.telemetry import WorkerMetrics
from pdserve.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from tests.support.worker_client import fence, router_session

DEADLINE_S = 10.0


class RecordingHandler:
    """Keeps what it is given; answers aborts at once; `refuse` is raised by submit."""

    def __init__(self) -> None:
        self.submitted: list[tuple[str, int]] = []
        self.aborted: list[tuple[str, int]] = []
        self.renewed: list[str] = []
        self.ended: list[str] = []
        self.sessions: list = []
        self.refuse: Exception | None = None
        self._changed = asyncio.Condition()

    async def until(self, condition) -> None:
        """Waits until the condition over this object holds."""
        async with asyncio.timeout(DEADLINE_S), self._changed:
            await self._changed.wait_for(condition)

    def _notify(self) -> None:
        async def notify() -> None:
            async with self._changed:
                self._changed.notify_all()

        self._task = asyncio.ensure_future(notify())

    def welcome(self):
        return worker_pb2.Welcome(worker_id="w1", role=common_pb2.ROLE_DECODE, incarnation="ab", num_pages=7)

    def submit(self, session, message):
        if self.refuse is not None:
            raise self.refuse
        self.submitted.append((message.fence.request_id, message.fence.attempt))
        self.sessions.append(session)
        self._notify()

    def abort(self, session, message):
        self.aborted.append((message.fence.request_id, message.fence.attempt))
        session.send(worker_pb2.SessionResponse(aborted=worker_pb2.Aborted(fence=message.fence, known=True)))

    def renew(self, session, transfer_ids):
        self.renewed += transfer_ids
        self._notify()

    def session_ended(self, session):
        self.ended.append(session.router_id)
        self._notify()

    def load(self):
        return worker_pb2.Load(num_running=3)


@asynccontextmanager
async def worker(**options):
    """A served SessionServer: (handler, sessions, address)."""
    handler = RecordingHandler()
    options = {"router_timeout_s": 30.0, "heartbeat_s": 30.0} | options
    sessions = SessionServer(handler, MonotonicClock(), **options)
    server = GrpcServer([SERVICE_NAME], max_message_bytes=16 << 20)
    port = server.bind("127.0.0.1", 0)
    worker_pb2_grpc.add_WorkerServicer_to_server(sessions, server.server)
    await server.start()
    server.open()
    try:
        yield handler, sessions, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def submit(request_id: str, attempt: int = 1, epoch: int = 1) -> worker_pb2.Submit:
    return worker_pb2.Submit(fence=fence(request_id, attempt, epoch))


async def failure(router) -> common_pb2.ErrorDetail:
    """The next refusal's error."""
    return (await router.receive("step_outputs")).outputs[0].failed


# ---- opening -------------------------------------------------------------------------------------------------------


def test_welcome_answers_hello():
    async def main():
        async with worker() as (_, sessions, address), router_session(address) as router:
            welcome = await router.receive("welcome")
            assert (welcome.worker_id, welcome.protocol_version, welcome.num_pages) == ("w1", 1, 7)
            assert [s.router_id for s in sessions.sessions] == ["router-1"]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("hello", "reason", "status"),
    [
        ({"hello": worker_pb2.Hello(router_id="r", protocol_version=2)}, "PROTOCOL_VERSION", "FAILED_PRECONDITION"),
        ({"hello": worker_pb2.Hello(protocol_version=1)}, "NO_HELLO", "INVALID_ARGUMENT"),
        ({"heartbeat": worker_pb2.RouterHeartbeat()}, "NO_HELLO", "INVALID_ARGUMENT"),
    ],
)
def test_a_wrong_first_message_is_refused(hello, reason, status):
    async def main():
        async with worker() as (handler, sessions, address), router_session(address, hello=False) as router:
            await router.send(**hello)
            with pytest.raises(PdserveError) as raised:
                await router.receive()
            assert (raised.value.reason, raised.value.status) == (reason, status)
            assert (sessions.sessions, handler.ended) == ((), [])

    asyncio.run(main())


def test_no_first_message_in_time_is_refused():
    async def main():
        async with worker(router_timeout_s=0.05) as (_, _, address), router_session(address, hello=False) as router:
            with pytest.raises(PdserveError, match="must be Hello"):
                await router.receive()

    asyncio.run(main())


# ---- fencing -------------------------------------------------------------------------------------------------------


def test_stale_messages_never_reach_the_handler():
    async def main():
        metrics = CollectorRegistry()
        async with (
            worker(metrics=WorkerMetrics(metrics, "decode")) as (handler, sessions, address),
            router_session(address) as router,
        ):
            await router.send(submit=submit("a", attempt=2, epoch=2))
            for stale in (submit("a", 1, 2), submit("a", 2, 2), submit("a", 3, 1)):
                await router.send(submit=stale)
                error = await failure(router)
                assert (error.status, error.reason) == ("CANCELLED", "STALE_ATTEMPT")
            await router.send(abort=worker_pb2.Abort(fence=fence("a", 2, 1)))  # a zombie's
            assert not (await router.receive("aborted")).known
            await router.send(abort=worker_pb2.Abort(fence=fence("a", 2, 2)))
            assert (await router.receive("aborted")).known
            assert (handler.submitted, handler.aborted) == ([("a", 2)], [("a", 2)])
            assert sessions.num_stale == Counter(submit=3, abort=1)
            labels = {"role": "decode", "kind": "submit"}
            assert metrics.get_sample_value("pdserve_session_stale_messages_total", labels) == 3

    asyncio.run(main())


def test_an_abort_before_its_submit_refuses_that_submit():
    async def main():
        async with worker() as (handler, _, address), router_session(address) as router:
            await router.send(abort=worker_pb2.Abort(fence=fence("a", 2)))
            await router.receive("aborted")
            for attempt in (1, 2):
                await router.send(submit=submit("a", attempt))
                assert (await failure(router)).reason == "STALE_ATTEMPT"
            await router.send(submit=submit("a", 3))
            await handler.until(lambda: handler.submitted == [("a", 3)])

    asyncio.run(main())


def test_fences_hold_across_routers():
    async def main():
        async with (
            worker() as (handler, _, address),
            router_session(address, "old") as old,
            router_session(address, "new") as new,
        ):
            await new.send(submit=submit("a", attempt=2, epoch=2))
            await handler.until(lambda: handler.submitted)
            await old.send(submit=submit("a", attempt=3, epoch=1))
            assert (await failure(old)).reason == "STALE_ATTEMPT"
            await old.send(submit=submit("a", attempt=1, epoch=3))  # the id was deleted and is used again
            await handler.until(lambda: handler.submitted == [("a", 2), ("a", 1)])

    asyncio.run(main())


def test_a_request_id_that_is_used_again_starts_at_attempt_1():
    """Its record is gone, so a new one with a higher epoch begins; what is left of the old one is stale."""
    table = FenceTable()
    assert table.submit(fence("r", 1, 100)) and table.submit(fence("r", 2, 100))
    assert table.submit(fence("r", 1, 200))
    assert not table.submit(fence("r", 3, 100)) and not table.abort(fence("r", 3, 100))
    assert not table.submit(fence("r", 1, 200)), "the same attempt twice"
    assert table.submit(fence("r", 2, 200))


def test_a_newer_owner_is_never_held_up_by_what_a_zombie_did():
    """The zombie retried after the record was last written: the new owner goes on from the record all the same."""
    table = FenceTable()
    assert table.submit(fence("r", 2, 100))
    assert table.submit(fence("r", 3, 100)), "the zombie's, not in the record"
    assert table.submit(fence("r", 3, 101)), "attempt after the record's"
    assert not table.abort(fence("r", 9, 100)) and not table.submit(fence("r", 9, 100))


operations = st.tuples(st.sampled_from(["submit", "abort"]), st.integers(1, 4), st.integers(1, 3))


@given(st.lists(operations, max_size=30))
def test_fence_table_against_its_rules(script):
    """The rules over the whole history, without the table's summary of it."""
    table, known = FenceTable(), []  # (epoch, attempt) of everything that was let through
    for kind, attempt, epoch in script:
        replaced = any(e > epoch for e, _ in known)
        repeated = any(e == epoch and a >= attempt for e, a in known)
        accepted = getattr(table, kind)(fence("r", attempt, epoch))
        assert accepted == (not replaced and (kind == "abort" or not repeated))
        if accepted:
            known.append((epoch, attempt))


@settings(max_examples=20)
@given(st.lists(st.integers(0, 50), max_size=100))
def test_fence_table_is_bounded_and_keeps_the_recent(ids):
    table = FenceTable(max_requests=8)
    for i in ids:
        table.submit(fence(str(i), 2))
        assert len(table) <= 8
    for i in list(dict.fromkeys(reversed(ids)))[:8]:
        assert not table.submit(fence(str(i), 1))


# ---- messages ------------------------------------------------------------------------------------------------------


def test_refusals_of_the_handler_and_of_the_session():
    async def main():
        async with worker() as (handler, sessions, address), router_session(address) as router:
            handler.refuse = CapacityError("full", reason="QUEUE_FULL", retry_after_s=2)
            await router.send(submit=submit("a"))
            outputs = await router.receive("step_outputs")
            assert outputs.outputs[0].fence == fence("a")
            assert outputs.step == 0
            error = outputs.outputs[0].failed
            assert (error.status, error.reason, error.retry_after_ms) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL", 2000)
            await router.send(submit=worker_pb2.Submit())
            assert (await failure(router)).reason == "BAD_FENCE"
            await router.send(attach=worker_pb2.AttachSequence(fence=fence("b")))
            assert (await failure(router)).status == "UNIMPLEMENTED"
            await router.send(rebind=worker_pb2.Rebind(fence=fence("b")))
            assert (await failure(router)).status == "UNIMPLEMENTED"
            await router.send(renew_leases=worker_pb2.RenewLeases(transfer_ids=["t1", "t2"]))
            await handler.until(lambda: handler.renewed == ["t1", "t2"])
            sent = sessions.sessions[0].sent
            assert (sent["refusal"], sent["step_outputs"]) == (4, 0)

    asyncio.run(main())


def test_a_second_hello_ends_the_session_with_a_reason():
    async def main():
        async with worker() as (handler, _, address), router_session(address) as router:
            await router.receive("welcome")
            await router.send(hello=worker_pb2.Hello(router_id="router-1", protocol_version=1))
            with pytest.raises(PdserveError) as raised:
                await router.receive()
            assert raised.value.reason == "UNEXPECTED_MESSAGE"
            assert handler.ended == ["router-1"]

    asyncio.run(main())


def test_a_bug_in_the_handler_ends_the_session_not_the_worker():
    async def main():
        async with worker() as (handler, _, address):
            handler.refuse = KeyError("bug")
            async with router_session(address) as router:
                await router.send(submit=submit("a"))
                with pytest.raises(PdserveError) as raised:
                    await router.receive("step_outputs")
                assert raised.value.status == "INTERNAL"
                assert handler.ended == ["router-1"]
            async with router_session(address) as router:
                assert await router.receive("welcome")

    asyncio.run(main())


def test_messages_are_counted_by_kind():
    async def main():
        registry = CollectorRegistry()
        metrics = WorkerMetrics(registry, "decode")
        async with worker(metrics=metrics) as (handler, _, address), router_session(address) as router:
            await router.send(submit=submit("a"))
            await handler.until(lambda: handler.sessions)
            session = handler.sessions[0]
            for step in (1, 2, 3):
                session.send(worker_pb2.SessionResponse(step_outputs=worker_pb2.StepOutputs(step=step)))
            steps = [(await router.receive("step_outputs")).step for _ in range(3)]
            assert steps == [1, 2, 3]
            assert session.sent["step_outputs"] == 3
            assert session.received == Counter(submit=1)
            labels = {"role": "decode", "direction": "sent", "kind": "step_outputs"}
            assert registry.get_sample_value("pdserve_session_messages_total", labels) == 3

    asyncio.run(main())


# ---- life and death ------------------------------------------------------------------------------------------------


def test_heartbeats_carry_load_and_draining():
    async def main():
        async with worker(heartbeat_s=0.01) as (_, sessions, address), router_session(address) as router:
            beat = await router.receive("heartbeat")
            assert (beat.load.num_running, beat.draining) == (3, False)
            sessions.drain()
            while not (await router.receive("heartbeat")).draining:
                pass
            await router.send(submit=submit("a"))
            error = await failure(router)
            assert (error.status, error.reason) == ("UNAVAILABLE", "DRAINING")

    asyncio.run(main())


def test_a_silent_router_is_ended():
    async def main():
        async with worker(router_timeout_s=0.5) as (handler, _, address), router_session(address) as router:
            with pytest.raises(PdserveError) as raised:
                await router.receive("step_outputs")
            assert raised.value.reason == "ROUTER_SILENT"
            assert handler.ended == ["router-1"]

    asyncio.run(main())


def test_heartbeats_of_the_router_keep_the_session():
    async def main():
        async with (
            worker(router_timeout_s=1.0, heartbeat_s=0.05) as (handler, _, address),
            router_session(address) as router,
        ):
            for _ in range(40):  # twice the limit, told by the worker's heartbeats
                await router.send(heartbeat=worker_pb2.RouterHeartbeat())
                await router.receive("heartbeat")
            assert handler.ended == []

    asyncio.run(main())


@pytest.mark.parametrize("how", ["close", "cancel"])
def test_a_router_that_leaves_ends_its_session_once(how):
    async def main():
        async with worker() as (handler, sessions, address):
            async with router_session(address) as router:
                await router.receive("welcome")
                if how == "close":
                    await router.close()
                    assert await router.receive() is None
            await handler.until(lambda: handler.ended)
            assert (handler.ended, sessions.sessions) == (["router-1"], ())

    asyncio.run(main())


def test_a_newer_session_of_a_router_replaces_the_older():
    async def main():
        async with worker() as (handler, sessions, address), router_session(address) as old:
            await old.send(submit=submit("a"))
            await handler.until(lambda: handler.submitted)
            async with router_session(address) as new:
                await new.receive("welcome")
                assert handler.ended == ["router-1"]  # before the new one may submit
                with pytest.raises(PdserveError) as raised:
                    await old.receive("step_outputs")
                assert raised.value.reason == "SESSION_REPLACED"
                assert len(sessions.sessions) == 1
            await handler.until(lambda: len(handler.ended) == 2)

    asyncio.run(main())


def test_a_router_that_does_not_read_is_cut_off():
    async def main():
        registry = CollectorRegistry()
        async with (
            worker(max_queued_bytes=1 << 20, metrics=WorkerMetrics(registry, "decode")) as (handler, _, address),
            router_session(address, "slow") as slow,
            router_session(address, "good") as good,
        ):
            await slow.send(submit=submit("a"))
            await handler.until(lambda: handler.sessions)
            session = handler.sessions[0]
            delta = common_pb2.Delta(text="x" * 100_000)
            outputs = worker_pb2.StepOutputs(step=1, outputs=[worker_pb2.SequenceOutput(delta=delta)])
            async with asyncio.timeout(DEADLINE_S):
                while not session.closed:
                    session.send(worker_pb2.SessionResponse(step_outputs=outputs))
                    await asyncio.sleep(0)  # lets the writer run
            await handler.until(lambda: handler.ended == ["slow"])
            session.send(worker_pb2.SessionResponse(step_outputs=outputs))  # goes nowhere, harms nothing
            labels = {"role": "decode", "reason": "ROUTER_TOO_SLOW"}
            assert registry.get_sample_value("pdserve_sessions_cut_total", labels) == 1
            await good.send(submit=submit("b"))
            await handler.until(lambda: ("b", 1) in handler.submitted)
            with pytest.raises(PdserveError) as raised:  # should it ever read again, it learns why
                while True:
                    await slow.receive()
            assert raised.value.reason == "ROUTER_TOO_SLOW"

    asyncio.run(main())


def test_close_sends_what_is_queued_first():
    async def main():
        async with worker() as (handler, sessions, address), router_session(address) as router:
            await router.send(submit=submit("a"))
            await handler.until(lambda: handler.sessions)
            for step in range(1, 50):
                outputs = worker_pb2.StepOutputs(step=step)
                handler.sessions[0].send(worker_pb2.SessionResponse(step_outputs=outputs))
            closing = asyncio.create_task(sessions.close(DEADLINE_S))
            steps = [(await router.receive("step_outputs")).step for _ in range(1, 50)]
            assert steps == list(range(1, 50))
            goodbye = await router.receive("heartbeat")
            assert goodbye.draining and goodbye.leaving
            await router.send(submit=submit("late"))  # read and refused: a write into an ended stream would break it
            await router.close()
            assert (await failure(router)).reason == "DRAINING"
            await closing
            with pytest.raises(PdserveError) as raised:
                await router.receive()
            assert raised.value.reason == "WORKER_STOPPED"
            assert handler.ended == ["router-1"]

    asyncio.run(main())
