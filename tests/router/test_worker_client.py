"""A real Session over gRPC against a scripted worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import pytest

from pdserve.bench.virtual_time import VirtualClock, run_virtual
from pdserve.core.clock import MonotonicClock
from pdserve.core.errors import PdserveError
from pdserve.core.registry import WorkerRecord
from pdserve.core.request import Role
from pdserve.router.connector import Connector
from pdserve.router.inbox import Died, Inbox, Output, Reservation, WorkersChanged
from pdserve.router.worker_client import GrpcWorkerClient, WorkerClient
from pdserve.router.worker_set import WorkerSet
from pdserve.router.worker_table import Listed
from pdserve.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from tests.router.test_worker_table import MODEL, layout
from tests.router.world import tokens

DEADLINE_S = 10.0
Response = worker_pb2.SessionResponse


class ScriptedWorker(worker_pb2_grpc.WorkerServicer):
    """A worker whose messages the test sends."""

    def __init__(self, incarnation: str = "i1") -> None:
        self.incarnation = incarnation
        self.worker_id = "d0"
        self.protocol = 1
        self.received: asyncio.Queue[worker_pb2.SessionRequest] = asyncio.Queue()
        self.outgoing: asyncio.Queue[Response | None] = asyncio.Queue()
        self.num_sessions = 0
        self.half_closed = asyncio.Event()

    async def Session(
        self, requests: AsyncIterator[worker_pb2.SessionRequest], context: object
    ) -> AsyncIterator[Response]:
        self.num_sessions += 1
        assert (await anext(aiter(requests))).hello.router_id == "router"
        yield Response(welcome=self.welcome())
        reader = asyncio.create_task(self._read(requests))
        try:
            while (response := await self.outgoing.get()) is not None:
                yield response
        finally:
            reader.cancel()

    def welcome(self) -> worker_pb2.Welcome:
        return worker_pb2.Welcome(
            worker_id=self.worker_id,
            role=common_pb2.ROLE_DECODE,
            incarnation=self.incarnation,
            protocol_version=self.protocol,
            identity_digest=b"a" * 32,
            model=MODEL,
            max_model_len=128,
            vocab_size=100,
            layout=layout().to_json(),
            num_pages=64,
            page_size=16,
            max_num_seqs=8,
            transports=["shm", "tcp"],
            host_id="host:1",
            kv_staging_bytes=1 << 20,
        )

    async def _read(self, requests: AsyncIterator[worker_pb2.SessionRequest]) -> None:
        async for request in requests:
            await self.received.put(request)
        self.half_closed.set()

    async def next(self, kind: str) -> worker_pb2.SessionRequest:
        """The next message of a kind."""
        while True:
            request = await self.received.get()
            if request.HasField(kind):  # type: ignore[arg-type]
                return request

    def send(self, **message: object) -> None:
        self.outgoing.put_nowait(Response(**message))  # type: ignore[arg-type]


@asynccontextmanager
async def serve(worker: ScriptedWorker, port: int = 0) -> AsyncIterator[tuple[grpc.aio.Server, int]]:
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield server, port
    finally:
        await server.stop(0)


class Discovery:
    """A registry in memory."""

    def __init__(self) -> None:
        self.tables: asyncio.Queue[tuple[WorkerRecord, ...]] = asyncio.Queue()

    async def watch(self) -> AsyncIterator[tuple[WorkerRecord, ...]]:
        while True:
            yield await self.tables.get()

    def set(self, *records: WorkerRecord) -> None:
        self.tables.put_nowait(records)


def record(port: int, incarnation: str = "i1") -> WorkerRecord:
    return WorkerRecord(worker_id="d0", role=Role.DECODE, incarnation=incarnation, address=f"127.0.0.1:{port}")


class Router:
    """Connector and worker set, with waits."""

    def __init__(self) -> None:
        self.workers = WorkerSet(MODEL)
        self.discovery = Discovery()
        self.inbox = Inbox()
        self.workers.subscribe(self.inbox)
        self.num_late = 0

    def count_late(self) -> None:
        self.num_late += 1

    def state(self) -> str:
        return next((row.state for row in self.workers.table.rows()), "")

    async def until(self, state: str) -> None:
        await self.until_state(lambda now: now == state)

    async def until_state(self, holds: Callable[[str], bool]) -> None:
        while not holds(self.state()):
            assert isinstance(await self.inbox.get(), WorkersChanged)

    @property
    def client(self) -> WorkerClient:
        return self.workers.client("d0")


def run(
    test: Callable[[Router, ScriptedWorker, int], Awaitable[None]],
    *,
    timeout_s: float = 30.0,  # the scripted worker says nothing for a while
    open_channel: Callable[[str], grpc.aio.Channel] = grpc.aio.insecure_channel,
) -> None:
    async def main() -> None:
        worker, router = ScriptedWorker(), Router()
        connector = Connector(
            router.workers,
            router.discovery,
            "router",
            MonotonicClock(),
            heartbeat_s=0.05,
            worker_timeout_s=timeout_s,
            open_channel=open_channel,
            count_late=router.count_late,
        )
        running = asyncio.create_task(connector.run())
        try:
            async with serve(worker) as (_, port), asyncio.timeout(DEADLINE_S):
                await test(router, worker, port)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())


def fence(request_id: str = "r", attempt: int = 1, epoch: int = 5) -> common_pb2.Fence:
    return common_pb2.Fence(request_id=request_id, attempt=attempt, phase=1, owner_epoch=epoch)


def submit(request_id: str = "r", attempt: int = 1) -> worker_pb2.Submit:
    return worker_pb2.Submit(fence=fence(request_id, attempt))


def step(*outputs: worker_pb2.SequenceOutput) -> worker_pb2.StepOutputs:
    return worker_pb2.StepOutputs(step=1, outputs=outputs, load=worker_pb2.Load(num_running=7))


def of(
    output: worker_pb2.SequenceOutput, request_id: str, attempt: int = 1, epoch: int = 5
) -> worker_pb2.SequenceOutput:
    output.fence.CopyFrom(fence(request_id, attempt, epoch))
    return output


def test_outputs_reach_their_attempts_and_nobody_else() -> None:
    async def test(router: Router, worker: ScriptedWorker, port: int) -> None:
        router.discovery.set(record(port))
        await router.until("ready")
        a, b = Inbox(), Inbox()
        router.client.submit(submit("a"), a)
        router.client.submit(submit("b", 2), b)
        assert (await worker.next("submit")).submit.fence.request_id == "a"
        worker.send(reservation=worker_pb2.ReservationResult(fence=fence("a"), reserved=True))
        worker.send(
            step_outputs=step(
                of(tokens(0, 1), "b", 1),  # an older attempt
                of(tokens(0, 2), "unknown"),
                of(tokens(0, 5), "a", epoch=4),  # an earlier request under the same id
                of(tokens(0, 3), "b", 2),
                of(tokens(0, 4), "a"),
            )
        )
        first, second, third = await a.get(), await a.get(), await b.get()
        assert isinstance(first, Reservation)
        assert isinstance(second, Output)
        assert isinstance(third, Output)
        assert (list(second.output.delta.token_ids), list(third.output.delta.token_ids)) == ([4], [3])
        live = router.workers.table.live("d0")
        assert live is not None
        said = live.facts.transports, live.facts.host_id, live.facts.kv_staging_bytes
        assert said == (("shm", "tcp"), "host:1", 1 << 20)
        assert live.load.num_running == 7
        assert router.num_late == 3

    run(test)


def test_a_worker_that_leaves_is_written_to_no_more_and_heard_to_its_end() -> None:
    async def test(router: Router, worker: ScriptedWorker, port: int) -> None:
        router.discovery.set(record(port))
        await router.until("ready")
        client, early, late = router.client, Inbox(), Inbox()
        client.submit(submit("early"), early)
        worker.send(heartbeat=worker_pb2.WorkerHeartbeat(draining=True, leaving=True))
        await worker.half_closed.wait()
        client.submit(submit("late"), late)
        died = await late.get()
        assert isinstance(died, Died) and died.error.reason == "DRAINING"
        assert not await client.abort(fence("late"), "CLIENT_CANCELLED", 60.0), "nobody answers any more"
        worker.send(step_outputs=step(of(tokens(0, 1), "early")))
        assert isinstance(await early.get(), Output)
        worker.outgoing.put_nowait(None)
        died = await early.get()
        assert isinstance(died, Died) and died.error.reason == "DRAINING"

    run(test)


def test_heartbeats_renew_held_leases_and_draining_is_heard() -> None:
    async def test(router: Router, worker: ScriptedWorker, port: int) -> None:
        router.discovery.set(record(port))
        await router.until("ready")
        await worker.next("heartbeat")
        router.client.hold_lease("t1")
        assert list((await worker.next("renew_leases")).renew_leases.transfer_ids) == ["t1"]
        router.client.drop_lease("t1")
        worker.send(heartbeat=worker_pb2.WorkerHeartbeat(draining=True, load=worker_pb2.Load(num_waiting=3)))
        await router.until("draining")
        inbox = Inbox()
        router.client.submit(submit(), inbox)
        worker.outgoing.put_nowait(None)
        died = await asyncio.wait_for(inbox.get(), 5)
        assert isinstance(died, Died) and died.error.reason == "DRAINING", "another worker may take the request"

    run(test)


def test_abort_waits_for_its_answer_and_nothing_follows() -> None:
    async def test(router: Router, worker: ScriptedWorker, port: int) -> None:
        router.discovery.set(record(port))
        await router.until("ready")
        inbox = Inbox()
        router.client.submit(submit(), inbox)
        aborting = asyncio.create_task(router.client.abort(fence(), "CLIENT_CANCELLED", 5.0))
        assert (await worker.next("abort")).abort.reason == "CLIENT_CANCELLED"
        worker.send(step_outputs=step(of(tokens(0, 1), "r")))
        worker.send(aborted=worker_pb2.Aborted(fence=fence(), known=True))
        assert await aborting is True
        assert not await router.client.abort(fence("s"), "X", 0.01), "no answer: bounded"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(inbox.get(), 0.01)

    run(test)


def test_end_of_the_stream_fails_attempts_at_once_and_a_new_process_is_found() -> None:
    async def test(router: Router, worker: ScriptedWorker, port: int) -> None:
        router.discovery.set(record(port))
        await router.until("ready")
        inbox, old = Inbox(), router.client
        old.submit(submit(), inbox)
        await worker.next("submit")
        worker.outgoing.put_nowait(None)
        died = await inbox.get()
        assert isinstance(died, Died)
        assert died.error.reason == "WORKER_DIED"
        assert "d0" in died.error.message and "send the request again" in died.error.message
        old.submit(submit("late"), inbox)
        assert isinstance(await inbox.get(), Died), "a dead client answers at once"
        assert not await old.abort(fence(), "X", 5.0)
        while router.state() != "ready" or router.client is old:  # the registry still names it: connected again
            assert isinstance(await router.inbox.get(), WorkersChanged)

        again = ScriptedWorker("i2")
        async with serve(again) as (_, new_port):
            router.discovery.set(record(new_port, "i2"))
            worker.outgoing.put_nowait(None)
            while router.workers.table.rows()[0].incarnation != "i2" or router.state() != "ready":
                await router.inbox.get()

    run(test)


def test_silent_worker_is_taken_for_dead() -> None:
    async def test(router: Router, worker: ScriptedWorker, port: int) -> None:
        router.discovery.set(record(port))
        await router.until("ready")
        inbox = Inbox()
        router.client.submit(submit(), inbox)
        died = await inbox.get()
        assert isinstance(died, Died)
        assert "silent" in died.error.message

    run(test, timeout_s=0.2)


def test_registry_that_empties_keeps_a_live_session() -> None:
    async def test(router: Router, worker: ScriptedWorker, port: int) -> None:
        router.discovery.set(record(port))
        await router.until("ready")
        router.discovery.set()
        await worker.next("heartbeat")
        await worker.next("heartbeat")
        assert router.state() == "ready"
        worker.outgoing.put_nowait(None)
        await router.until("")
        assert worker.num_sessions == 1

    run(test)


class _Owner:
    def session_open(self, client: object, facts: object) -> None:
        raise AssertionError("a worker with a wrong Welcome must not be used")

    worker_loaded = worker_draining = session_open


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("incarnation", "i2", "registry says otherwise"),
        ("worker_id", "d9", "registry says otherwise"),
        ("protocol", 2, "protocol 2"),
    ],
)
def test_wrong_welcome_is_refused(field: str, value: object, word: str) -> None:
    async def test(router: Router, worker: ScriptedWorker, port: int) -> None:
        setattr(worker, field, value)
        r = record(port)
        from pdserve.router.worker_table import Listed

        listed = Listed(worker_id=r.worker_id, role=r.role, incarnation=r.incarnation, address=r.address)
        client = GrpcWorkerClient(
            listed,
            "router",
            MonotonicClock(),
            _Owner(),
            heartbeat_s=1,
            timeout_s=3,
            open_channel=grpc.aio.insecure_channel,
        )
        error: PdserveError = await client.run()
        assert error.reason == "BAD_WORKER"
        assert word in error.message
        assert "d0" in error.message

    run(test)


class SilentCall:
    """A worker that says Welcome and then nothing; whoever ends its call ends the router in the same moment."""

    def __init__(self, welcome: Response) -> None:
        self.welcome: Response | None = welcome
        self.ended = asyncio.Event()
        self.end_router: Callable[[], object]

    async def read(self) -> Response:
        if (welcome := self.welcome) is not None:
            self.welcome = None
            return welcome
        await self.ended.wait()
        raise asyncio.CancelledError  # as gRPC says that its call was cancelled

    def cancel(self) -> None:
        if not self.ended.is_set():
            self.ended.set()
            self.end_router()


def test_a_router_that_ends_while_a_silent_worker_is_given_up_ends() -> None:
    class Channel:
        async def __aenter__(self) -> Channel:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

        def stream_stream(self, *_: object, **__: object) -> Callable[..., SilentCall]:
            return lambda requests: call

    async def main() -> None:
        listed = Listed(worker_id="d0", role=Role.DECODE, incarnation="i1", address="d0:1")
        client = GrpcWorkerClient(
            listed,
            "router",
            VirtualClock(),
            WorkerSet(MODEL),
            heartbeat_s=1.0,
            timeout_s=3.0,
            open_channel=lambda address: Channel(),  # type: ignore[arg-type, return-value]
        )
        life = asyncio.create_task(client.run())
        call.end_router = life.cancel
        with pytest.raises(asyncio.CancelledError):
            await life

    call = SilentCall(Response(welcome=ScriptedWorker().welcome()))
    run_virtual(main())


def test_a_session_that_fails_by_a_fault_of_ours_ends_the_connector() -> None:
    async def main() -> None:
        def open_channel(address: str) -> grpc.aio.Channel:
            raise RuntimeError("a fault of ours")

        discovery = Discovery()
        discovery.set(record(1))
        connector = Connector(
            WorkerSet(MODEL),
            discovery,
            "router",
            VirtualClock(),
            heartbeat_s=1.0,
            worker_timeout_s=3.0,
            open_channel=open_channel,
        )
        with pytest.raises(ExceptionGroup, match="unhandled errors"):
            await asyncio.wait_for(connector.run(), 10)

    run_virtual(main())


def test_nobody_at_the_address() -> None:
    async def test(router: Router, worker: ScriptedWorker, port: int) -> None:
        router.discovery.set(record(1))
        await router.until_state(lambda state: state.startswith("connecting: UNAVAILABLE: "))
        assert worker.num_sessions == 0

    run(test)


def test_a_worker_that_cannot_be_connected_to_is_told_once_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    num_tries = 0

    def open_channel(address: str) -> grpc.aio.Channel:
        nonlocal num_tries
        num_tries += 1
        return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials())

    async def test(router: Router, worker: ScriptedWorker, port: int) -> None:
        router.discovery.set(record(port))
        await router.until_state(lambda state: num_tries > 2 and state.startswith("connecting: TLS_FAILED: "))
        hint = "; it has no TLS, or a certificate of another authority, or one without the name (--tls-peer-name)"
        assert router.state().endswith(hint)
        (told,) = [r.getMessage() for r in caplog.records if r.name == "pdserve.router.connector"]
        assert told == f"cannot connect to decode worker d0 at 127.0.0.1:{port}: {router.state()[12:]}"
        assert "send the request again" not in caplog.text

    run(test, open_channel=open_channel)


def test_the_log_says_that_a_worker_is_gone_without_advice_for_clients(caplog: pytest.LogCaptureFixture) -> None:
    async def test(router: Router, worker: ScriptedWorker, port: int) -> None:
        router.discovery.set(record(port))
        await router.until("ready")
        worker.outgoing.put_nowait(None)
        await router.until("connecting")
        await router.until("ready")
        assert f"decode worker d0 at 127.0.0.1:{port} " in caplog.text
        assert "send the request again" not in caplog.text

    run(test)
