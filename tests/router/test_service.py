"""The public API over a real gRPC server, with fake workers and store behind it."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from pdserve.core.clock import MonotonicClock
from pdserve.core.errors import PdserveError
from pdserve.core.grpc_server import GrpcServer, error_from_rpc
from pdserve.core.telemetry import RouterMetrics
from pdserve.core.tokenizer import ChatMessages, Tokenizer
from pdserve.core.tracing import Tracing
from pdserve.router.config import RouterConfig
from pdserve.router.orchestrator import Orchestrator
from pdserve.router.output_stream import MAX_MERGED_TOKENS
from pdserve.router.policy import least_loaded
from pdserve.router.record import RequestState
from pdserve.router.service import INLINE_TOKENISE_BYTES, SERVICE_NAME, InferenceService
from pdserve.router.store_fake import FakeStore
from pdserve.router.worker_fake import FakeWorkerClient
from pdserve.router.worker_set import WorkerSet
from pdserve.router.worker_table import Limits
from pdserve.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.router.test_worker_table import MODEL, facts
from tests.router.world import ROLES, tokens

pb = inference_pb2
DEADLINE_S = 10.0


class Served:
    """A router's API with one fake MIXED worker."""

    orchestrator: Orchestrator

    def __init__(self, stub: inference_pb2_grpc.InferenceAsyncStub, workers: WorkerSet) -> None:
        self.stub = stub
        self.workers = workers
        self.store = FakeStore()
        self.worker = FakeWorkerClient("m0")
        self.prometheus = CollectorRegistry()
        self.tokenised_in: list[str] = []
        """Threads that tokenised."""

    def tokenizer(self, limits: Limits) -> Tokenizer:
        self.tokenised_in.clear()
        threads, tokenizer = self.tokenised_in, Tokenizer.fake(limits.vocab_size)

        class Watched(Tokenizer):
            def __init__(self) -> None:
                self.can_constrain = True

            def encode(self, text: str) -> list[int]:
                threads.append(threading.current_thread().name)
                return tokenizer.encode(text)

            def encode_chat(self, messages: ChatMessages) -> list[int]:
                threads.append(threading.current_thread().name)
                return tokenizer.encode_chat(messages)

        return Watched()

    async def submitted(self, request_id: str) -> None:
        """Waits until the worker has the request."""
        await until(lambda: (request_id, 1) in self.worker.submits)

    async def gone(self, request_id: str) -> None:
        """Waits until the worker has the request no more."""
        await until(lambda: (request_id, 1) not in self.worker.submits)

    async def ended_unread(self, request_id: str) -> None:
        """Ends a request with more output than gRPC holds for a client that does not read."""
        text, ids = "x" * (1 << 19), [1] * MAX_MERGED_TOKENS
        await self.submitted(request_id)
        for i in range(16):
            output = tokens(i * len(ids), *ids, text=text, at=i * len(text), finish=i == 15)
            self.worker.output(request_id, output)
        await until(lambda: self.store.records[request_id].state is RequestState.FINISHED)

    def ended(self, outcome: str) -> float:
        samples = [s for m in self.prometheus.collect() for s in m.samples]
        return sum(
            s.value
            for s in samples
            if s.name == "pdserve_router_requests_total" and s.labels["finish_reason"] == outcome
        )


async def until(condition: Callable[[], bool]) -> None:
    """Polls; `run` sets the deadline."""
    while not condition():  # noqa: ASYNC110 - the fakes have no event to wait for
        await asyncio.sleep(0.001)


@asynccontextmanager
async def serve(
    *, with_worker: bool = True, max_queue: int = 100, no_worker_timeout_s: float = 0.05
) -> AsyncIterator[Served]:
    server = GrpcServer([SERVICE_NAME], max_message_bytes=1 << 20)
    port = server.bind("127.0.0.1", 0)
    clock, workers = MonotonicClock(), WorkerSet(MODEL)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        served = Served(inference_pb2_grpc.InferenceStub(channel), workers)  # type: ignore[no-untyped-call]
        if with_worker:
            workers.session_open(served.worker, facts("m0", ROLES["m"], max_model_len=4096, num_pages=4096))
        config = RouterConfig(no_worker_timeout_s=no_worker_timeout_s, max_queue=max_queue)
        orchestrator = Orchestrator(config, "r0", clock, served.store, workers, least_loaded(), random.Random(1))
        served.orchestrator = orchestrator
        inference_pb2_grpc.add_InferenceServicer_to_server(  # type: ignore[no-untyped-call]
            InferenceService(
                MODEL,
                orchestrator,
                served.store,
                workers,
                served.tokenizer,
                Tracing("router", "r0", None, clock),
                RouterMetrics(served.prometheus),
                clock,
            ),
            server.server,
        )
        await server.start()
        server.open()
        try:
            yield served
        finally:
            await server.stop(0)


def run(test: Callable[[Served], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), serve(**options) as served:
            await test(served)

    asyncio.run(main())


def generate(request_id: str = "r", **fields: object) -> inference_pb2.GenerateRequest:
    if not fields.keys() & {"text", "chat", "tokens"}:
        fields["text"] = "t1 t2 t3"
    fields.setdefault("sampling", common_pb2.SamplingParams(max_tokens=3, temperature=0.0))
    return pb.GenerateRequest(request_id=request_id, **fields)  # type: ignore[arg-type]


async def error_of(awaitable: Awaitable[object]) -> PdserveError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return error_from_rpc(caught.value)


def test_a_stream_and_its_record() -> None:
    async def test(s: Served) -> None:
        call = s.stub.Generate(generate())
        accepted = (await call.read()).accepted
        assert (accepted.request_id, accepted.prompt_tokens, accepted.model) == ("r", 3, MODEL)
        await s.submitted("r")
        submit = s.worker.submits["r", 1]
        assert list(submit.prompt_token_ids) == [1, 2, 3]
        assert submit.sampling.seed == accepted.seed
        s.worker.output("r", tokens(0, 10, text="a"))
        assert (await call.read()).delta.text == "a"
        running = await s.stub.GetRequest(pb.GetRequestRequest(request_id="r"))
        assert (running.state, running.emitted_tokens) == (pb.REQUEST_STATE_DECODING, 1)
        error = await error_of(s.stub.DeleteRequest(pb.DeleteRequestRequest(request_id="r")))
        assert (error.status, error.reason) == ("FAILED_PRECONDITION", "STILL_RUNNING")
        s.worker.output("r", tokens(1, 11, 12, at=1, finish=True))
        assert list((await call.read()).delta.token_ids) == [11, 12]
        assert (await call.read()).finished.usage.completion_tokens == 3
        assert await call.read() == grpc.aio.EOF
        ended = await s.stub.GetRequest(pb.GetRequestRequest(request_id="r"))
        assert (ended.state, ended.finish_reason) == (pb.REQUEST_STATE_FINISHED, common_pb2.FINISH_REASON_LENGTH)
        assert (await s.stub.DeleteRequest(pb.DeleteRequestRequest(request_id="r"))).deleted
        assert not (await s.stub.DeleteRequest(pb.DeleteRequestRequest(request_id="r"))).deleted
        assert s.ended("length") == 1

    run(test)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tokens": common_pb2.TokenPrompt(token_ids=[5, 6])}, [5, 6]),
        ({"chat": common_pb2.ChatPrompt(messages=[common_pb2.ChatMessage(role="t7", content="t8")])}, [7, 8]),
        ({"text": "t4 " * (INLINE_TOKENISE_BYTES // 3 + 1)}, [4] * (INLINE_TOKENISE_BYTES // 3 + 1)),
    ],
    ids=["ids", "chat", "long text"],
)
def test_prompt_in_each_form(fields: dict[str, object], expected: list[int]) -> None:
    async def test(s: Served) -> None:
        call = s.stub.Generate(generate(**fields))
        await s.submitted("r")
        assert list(s.worker.submits["r", 1].prompt_token_ids)[: len(expected)] == expected
        call.cancel()
        await s.gone("r")

    run(test)


def test_a_bad_structure_is_refused_before_a_worker_hears_of_it() -> None:
    def asked(**form: object) -> common_pb2.SamplingParams:
        return common_pb2.SamplingParams(max_tokens=3, structured_outputs=common_pb2.StructuredOutputs(**form))  # type: ignore[arg-type]

    async def test(s: Served) -> None:
        for form, word in (
            ({"regex": "("}, "unclosed"),
            ({"json": '{"type": "x"}'}, "Invalid type"),
            ({}, "exactly one"),
        ):
            error = await error_of(s.stub.Generate(generate(sampling=asked(**form))).read())
            assert (error.status, error.reason) == ("INVALID_ARGUMENT", "BAD_STRUCTURED_OUTPUTS")
            assert word in error.message
        assert not s.worker.submits
        call = s.stub.Generate(generate(sampling=asked(regex="a+")))
        await s.submitted("r")
        assert s.worker.submits["r", 1].sampling.structured_outputs.regex == "a+"
        call.cancel()
        await s.gone("r")

    run(test)


@pytest.mark.parametrize(
    ("messages", "inline"),
    [
        ([("user", "t1")] * 3, True),
        ([("user", "t1 " * (INLINE_TOKENISE_BYTES // 3 + 1))], False),
        ([("t1", "")] * 2000, False),
    ],
    ids=["short", "long", "many"],
)
def test_only_short_requests_are_tokenised_on_the_loop(messages: list[tuple[str, str]], inline: bool) -> None:
    async def test(s: Served) -> None:
        chat = common_pb2.ChatPrompt(messages=[common_pb2.ChatMessage(role=r, content=c) for r, c in messages])
        await s.stub.Generate(generate(chat=chat)).read()
        assert (s.tokenised_in == [threading.current_thread().name]) is inline

    run(test)


def test_a_client_that_does_not_read_counts_until_it_leaves() -> None:
    async def test(s: Served) -> None:
        stalled = s.stub.Generate(generate("stalled"))
        await s.ended_unread("stalled")
        error = await error_of(s.stub.Generate(generate("more")).read())
        assert (error.status, error.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
        messages = [m async for m in stalled]
        assert len(messages) == 1 + 16 + 1
        assert messages[-1].HasField("finished")
        assert (await s.stub.Generate(generate("more")).read()).HasField("accepted")

    run(test, max_queue=1)


def test_a_drain_waits_for_a_client_that_still_reads() -> None:
    async def test(s: Served) -> None:
        slow = s.stub.Generate(generate())
        await s.ended_unread("r")
        draining = asyncio.create_task(s.orchestrator.drain(60.0))
        error = await error_of(s.stub.Generate(generate("late")).read())
        assert (error.status, error.reason) == ("UNAVAILABLE", "DRAINING")
        assert not draining.done()
        messages = [m async for m in slow]
        assert messages[-1].HasField("finished")
        await draining

    run(test)


def test_a_client_that_leaves_before_it_is_accepted_is_counted_once() -> None:
    async def test(s: Served) -> None:
        waiting = s.stub.Generate(generate())
        reading = asyncio.create_task(waiting.read())
        await until(lambda: s.orchestrator.num_queued == 1)
        waiting.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await until(lambda: s.ended("refused") == 1)
        assert s.ended("cancelled") == 0

    run(test, with_worker=False, no_worker_timeout_s=60.0)


def test_cancel_ends_the_stream_properly_and_is_idempotent() -> None:
    async def test(s: Served) -> None:
        call = s.stub.Generate(generate())
        await s.submitted("r")
        assert (await s.stub.Cancel(pb.CancelRequest(request_id="r"))).cancelled
        assert (await call.read()).HasField("accepted")
        assert (await call.read()).finished.finish_reason == common_pb2.FINISH_REASON_CANCELLED
        assert not (await s.stub.Cancel(pb.CancelRequest(request_id="r"))).cancelled
        assert not (await s.stub.Cancel(pb.CancelRequest(request_id="never-seen"))).cancelled
        assert s.worker.aborted == [("r", 1, "CLIENT_CANCELLED")]

    run(test)


@pytest.mark.parametrize("how", ["disconnect", "deadline"])
def test_client_that_goes_away_is_cancelled_on_the_worker(how: str) -> None:
    async def test(s: Served) -> None:
        call = s.stub.Generate(generate(), timeout=1.0 if how == "deadline" else None)
        await s.submitted("r")
        submit = s.worker.submits["r", 1]
        assert (0 < submit.deadline_ms <= 1000) if how == "deadline" else submit.deadline_ms == 0
        if how == "disconnect":
            call.cancel()
        await s.gone("r")
        assert [a[:2] for a in s.worker.aborted] == [("r", 1)]
        await until(lambda: s.store.records["r"].state is RequestState.CANCELLED)

    run(test)


BAD: list[tuple[dict[str, object], str, str]] = [
    ({"text": ""}, "INVALID_ARGUMENT", "EMPTY_PROMPT"),
    ({"chat": common_pb2.ChatPrompt()}, "INVALID_ARGUMENT", "EMPTY_PROMPT"),
    ({"tokens": common_pb2.TokenPrompt(token_ids=[1] * 4096)}, "INVALID_ARGUMENT", "PROMPT_TOO_LONG"),
    ({"tokens": common_pb2.TokenPrompt(token_ids=[2**32 - 1])}, "INVALID_ARGUMENT", "BAD_TOKEN_ID"),
    ({"model": "x"}, "NOT_FOUND", "UNKNOWN_MODEL"),
    ({"sampling": common_pb2.SamplingParams(top_p=0)}, "INVALID_ARGUMENT", "BAD_PARAMETER"),
    ({"sampling": common_pb2.SamplingParams(temperature=float("nan"))}, "INVALID_ARGUMENT", "BAD_PARAMETER"),
    ({"sampling": common_pb2.SamplingParams(max_tokens=-1)}, "INVALID_ARGUMENT", "BAD_PARAMETER"),
    ({"sampling": common_pb2.SamplingParams(stop_token_ids=[1] * 257)}, "INVALID_ARGUMENT", "BAD_PARAMETER"),
    ({"sampling": common_pb2.SamplingParams(prompt_logprobs=21)}, "INVALID_ARGUMENT", "BAD_PARAMETER"),
    ({"priority": 101}, "INVALID_ARGUMENT", "BAD_PRIORITY"),
]


def test_refused_with_status_and_reason_and_well_afterwards() -> None:
    async def test(s: Served) -> None:
        for fields, status, reason in BAD:
            error = await error_of(s.stub.Generate(generate(**fields)).read())
            assert (error.status, error.reason) == (status, reason)
        assert s.ended("refused") == len(BAD)
        assert s.store.records == {}
        s.store.down = True
        error = await error_of(s.stub.Generate(generate()).read())
        assert (error.status, error.reason) == ("UNAVAILABLE", "STORE_UNAVAILABLE")
        s.store.down = False
        assert (await s.stub.Generate(generate()).read()).HasField("accepted")
        error = await error_of(s.stub.Generate(generate()).read())
        assert (error.status, error.reason) == ("ALREADY_EXISTS", "REQUEST_EXISTS")

    run(test)


def test_attach_unknown_requests_and_models() -> None:
    async def test(s: Served) -> None:
        error = await error_of(s.stub.Attach(pb.AttachRequest(request_id="r")).read())
        assert error.status == "UNIMPLEMENTED"
        error = await error_of(s.stub.GetRequest(pb.GetRequestRequest(request_id="r")))
        assert (error.status, error.reason) == ("NOT_FOUND", "UNKNOWN_REQUEST")
        error = await error_of(s.stub.GetRequest(pb.GetRequestRequest(request_id="a b")))
        assert (error.status, error.reason) == ("INVALID_ARGUMENT", "BAD_REQUEST_ID")
        (model,) = (await s.stub.ListModels(pb.ListModelsRequest())).models
        assert (model.name, model.ready, model.vocab_size, model.max_model_len) == (MODEL, True, 100, 4096)
        assert [(w.worker_id, w.state) for w in model.workers] == [("m0", "ready")]

    run(test)


def test_no_worker() -> None:
    async def test(s: Served) -> None:
        error = await error_of(s.stub.Generate(generate()).read())
        assert (error.status, error.reason) == ("UNAVAILABLE", "NO_WORKER")
        assert error.retry_after_s
        (model,) = (await s.stub.ListModels(pb.ListModelsRequest())).models
        assert not model.ready

    run(test, with_worker=False)
