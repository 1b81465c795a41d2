"""One prefill and one decode worker in this process, on real gRPC and tcp, with the fake runner."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from pdserve.core.clock import Clock, MonotonicClock
from pdserve.core.config import ServiceConfig, WorkerConfig
from pdserve.core.errors import PdserveError
from pdserve.core.grpc_server import GrpcServer
from pdserve.core.hashing import token_digest
from pdserve.core.request import Role
from pdserve.core.session import SERVICE_NAME, SessionHandler, SessionServer
from pdserve.core.telemetry import WorkerMetrics
from pdserve.core.tracing import Tracing
from pdserve.core.worker_app import WorkerContext
from pdserve.decode_service.worker import DecodeWorker
from pdserve.engine.config import EngineConfig
from pdserve.prefill_service.worker import PrefillWorker
from pdserve.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from tests.support.worker_client import RouterEnd, fence, router_session

TIMEOUT_S = 20.0


@dataclass
class Running:
    """A worker that serves."""

    worker: PrefillWorker | DecodeWorker
    handler: SessionHandler
    peer: worker_pb2.Peer
    server: GrpcServer
    sessions: SessionServer
    registry: CollectorRegistry
    failures: list[PdserveError]
    stack: AsyncExitStack

    async def all_free(self) -> None:
        """Waits until every page is free and no attempt lives."""
        num_pages = self.handler.welcome().num_pages
        await until(lambda: self.handler.load().num_free_pages == num_pages, f"{self.peer.worker_id} to free its pages")
        async with asyncio.timeout(TIMEOUT_S):
            await self.worker.drain()

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples with these labels."""
        samples = [s for m in self.registry.collect() for s in m.samples if s.name == name]
        return sum(s.value for s in samples if labels.items() <= s.labels.items())


async def until(condition: Callable[[], bool], what: str) -> None:
    """Polls a condition until it holds, with a deadline."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():  # noqa: ASYNC110  what it waits for has no event
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"waited {TIMEOUT_S:g} s for {what}") from None


async def start_worker(
    role: Role, worker_id: str, engine: EngineConfig, config: WorkerConfig | None = None, clock: Clock | None = None
) -> Running:
    """Starts one worker as `core.worker_app` does, without store and signals; `clock` is its service's."""
    config, stack = config or WorkerConfig(), AsyncExitStack()
    registry, failures = CollectorRegistry(), list[PdserveError]()
    service = ServiceConfig()
    server = GrpcServer([SERVICE_NAME], max_message_bytes=service.max_message_bytes)
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
    worker = PrefillWorker(engine) if role is Role.PREFILL else DecodeWorker(engine)
    await server.start()
    stack.push_async_callback(server.stop, 0)
    stack.push_async_callback(worker.stop)
    context = WorkerContext(
        role=role,
        worker_id=worker_id,
        incarnation=f"{worker_id}-incarnation",
        address=address,
        service=service,
        worker=config,
        clock=clock or MonotonicClock(),
        metrics=WorkerMetrics(registry, role.value),
        tracing=Tracing("test", worker_id, None, MonotonicClock()),
        server=server.server,
        fail=failures.append,
    )
    handler, _ = await worker.start(context)
    sessions = SessionServer(handler, MonotonicClock(), heartbeat_s=0.2, metrics=context.metrics)
    worker_pb2_grpc.add_WorkerServicer_to_server(sessions, server.server)  # type: ignore[no-untyped-call]
    stack.push_async_callback(sessions.close, 1.0)
    server.open()
    peer = worker_pb2.Peer(worker_id=worker_id, address=address, incarnation=context.incarnation)
    return Running(worker, handler, peer, server, sessions, registry, failures, stack)


@dataclass
class Heard:
    """What one worker said of one attempt; tokens and text of its first choice."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finished: worker_pb2.SequenceFinished | None = None
    failed: common_pb2.ErrorDetail | None = None
    reservation: worker_pb2.ReservationResult | None = None
    aborted: worker_pb2.Aborted | None = None
    timings: common_pb2.Timings | None = None


class Router:
    """The router's side of one session: keeps what it hears, by request."""

    def __init__(self, end: RouterEnd) -> None:
        self.end = end
        self.heard: dict[str, Heard] = {}
        self.welcome: worker_pb2.Welcome | None = None
        self.step_messages: list[worker_pb2.StepOutputs] = []
        self.over = False
        self._writing = asyncio.Lock()  # gRPC takes one write at a time

    async def send(self, **message: object) -> None:
        """Sends one SessionRequest."""
        async with self._writing:
            await self.end.send(**message)  # type: ignore[no-untyped-call]

    def of(self, request_id: str) -> Heard:
        """What was heard of a request."""
        return self.heard.setdefault(request_id, Heard())

    async def run(self) -> None:
        """Reads until the session ends."""
        try:
            while (message := await self.end.receive(timeout_s=TIMEOUT_S)) is not None:
                self._take(message)
        except PdserveError:
            pass
        finally:
            self.over = True

    def _take(self, message: worker_pb2.SessionResponse) -> None:
        match message.WhichOneof("message"):
            case "welcome":
                self.welcome = message.welcome
            case "reservation":
                self.of(message.reservation.fence.request_id).reservation = message.reservation
            case "aborted":
                self.of(message.aborted.fence.request_id).aborted = message.aborted
            case "step_outputs":
                if message.step_outputs.step:
                    self.step_messages.append(message.step_outputs)
                for output in message.step_outputs.outputs:
                    self._take_output(self.of(output.fence.request_id), output)

    def _take_output(self, heard: Heard, output: worker_pb2.SequenceOutput) -> None:
        assert heard.finished is None and heard.failed is None, f"news after the end: {heard} {output}"
        if output.HasField("delta") and not output.delta.choice:
            if heard.token_ids:
                assert output.delta.text_offset >= len(heard.text)
            heard.token_ids += output.delta.token_ids
            heard.text += output.delta.text
        if output.HasField("timings"):
            heard.timings = output.timings
        if output.HasField("finished"):
            heard.finished = output.finished
        if output.HasField("failed"):
            heard.failed = output.failed


@dataclass
class Pair:
    """Two workers, each with one session of the same router."""

    prefill: Running
    decode: Running
    to_prefill: Router
    to_decode: Router
    at_both: set[str] = field(default_factory=set)  # requests that `submit` sent

    def submission(
        self,
        request_id: str,
        prompt: Sequence[int],
        part: common_pb2.Role = common_pb2.ROLE_PREFILL,
        *,
        emitted: Sequence[int] = (),
        attempt: int = 1,
        epoch: int = 1,
        **sampling: object,
    ) -> worker_pb2.Submit:
        """A right submission."""
        transfer_id = f"t-{request_id}-{attempt}" if epoch == 1 else f"t-{request_id}-{attempt}-{epoch}"
        params = common_pb2.SamplingParams(**{"seed": 1, "temperature": 0, "max_tokens": 16, **sampling})  # type: ignore[arg-type]
        return worker_pb2.Submit(
            fence=fence(request_id, attempt, epoch),
            reservation_id="" if part == common_pb2.ROLE_MIXED else f"r-{request_id}",
            transfer_id="" if part == common_pb2.ROLE_MIXED else transfer_id,
            part=part,
            prefill=self.prefill.peer,
            decode=self.decode.peer,
            prompt_token_ids=prompt,
            emitted_token_ids=emitted,
            prompt_digest=token_digest([*prompt, *emitted]),
            sampling=params,
        )

    async def submit(self, request_id: str, prompt: Sequence[int], **options: object) -> None:
        """Submits both parts at the same time."""
        self.at_both.add(request_id)
        for router, part in ((self.to_prefill, common_pb2.ROLE_PREFILL), (self.to_decode, common_pb2.ROLE_DECODE)):
            await router.send(submit=self.submission(request_id, prompt, part, **options))  # type: ignore[arg-type]

    async def abort(self, router: Router, request_id: str, attempt: int = 1) -> worker_pb2.Aborted:
        """Aborts on one worker and waits for the answer."""
        await router.send(abort=worker_pb2.Abort(fence=fence(request_id, attempt), reason="CLIENT_CANCELLED"))
        await until(lambda: router.of(request_id).aborted is not None, "Aborted")
        aborted = router.of(request_id).aborted
        assert aborted is not None
        return aborted

    async def ended(self, request_id: str) -> tuple[Heard, Heard]:
        """Waits until the decode worker, or the prefill worker with the first token, ended the request."""

        def over() -> bool:
            p, d = self.to_prefill.of(request_id), self.to_decode.of(request_id)
            return any(h.finished is not None or h.failed is not None for h in (p, d))

        await until(over, f"the end of {request_id}")
        p, d = self.to_prefill.of(request_id), self.to_decode.of(request_id)
        if d.finished is not None and request_id in self.at_both:  # its session may be read later than the other
            await until(lambda: p.timings is not None or p.finished is not None, f"prefill's part of {request_id}")
        return p, d

    async def all_free(self) -> None:
        """Both workers are as if nothing had been."""
        await self.prefill.all_free()
        await self.decode.all_free()
        assert not self.prefill.failures and not self.decode.failures


def engine_config(**options: object) -> EngineConfig:
    """A small fake engine."""
    values = {"runner": "fake", "model": "fake", "num_pages": 512, "max_num_batched_tokens": 256, "max_num_seqs": 64}
    return EngineConfig(**{**values, **options})  # type: ignore[arg-type]


@asynccontextmanager
async def connect(running: Running, router_id: str = "router-1") -> AsyncIterator[Router]:
    """A router's session with a worker, read in the background, with signs of life."""
    async with router_session(running.peer.address, router_id) as end:
        router = Router(end)
        reader = asyncio.create_task(router.run())
        beating = asyncio.create_task(_heartbeats(router))
        try:
            await until(lambda: router.welcome is not None, "Welcome")
            yield router
        finally:
            beating.cancel()
            reader.cancel()
            for ended in await asyncio.gather(beating, reader, return_exceptions=True):
                assert ended is None or isinstance(ended, (asyncio.CancelledError, PdserveError)), repr(ended)


async def _heartbeats(router: Router) -> None:
    while not router.over:
        await router.send(heartbeat=worker_pb2.RouterHeartbeat())
        await asyncio.sleep(0.5)


@asynccontextmanager
async def pair(
    prefill: EngineConfig | None = None,
    decode: EngineConfig | None = None,
    worker: WorkerConfig | None = None,
    decode_role: Role = Role.DECODE,
    prefill_clock: Clock | None = None,
) -> AsyncIterator[Pair]:
    """Starts two workers and connects to both."""
    async with AsyncExitStack() as stack:
        p = await start_worker(Role.PREFILL, "prefill-0", prefill or engine_config(), worker, prefill_clock)
        await stack.enter_async_context(p.stack)
        d = await start_worker(decode_role, "decode-0", decode or engine_config(), worker)
        await stack.enter_async_context(d.stack)
        to_prefill = await stack.enter_async_context(connect(p))
        to_decode = await stack.enter_async_context(connect(d))
        yield Pair(p, d, to_prefill, to_decode)
