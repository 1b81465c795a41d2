"""The host process of `pdserve bench gil`: what a worker's event loop does for every step, on a real gRPC stream."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any

import grpc.aio

from pdserve.bench.gil_engine import PROMPT_TOKENS, Case, build_core, commands, engine_main, sampling
from pdserve.core.errors import EngineError
from pdserve.core.output_stage import OutputState
from pdserve.core.tokenizer import Tokenizer
from pdserve.engine.async_engine import AsyncEngine
from pdserve.engine.fake import FAKE_VOCAB_SIZE
from pdserve.engine.step import StepEvents, TokensSampled
from pdserve.v1 import common_pb2, worker_pb2, worker_pb2_grpc

WAIT_S = 120.0


def host_main(connection: Connection, case: Case, mode: str) -> None:
    """Serves one run: sends its port, streams to the first session, then sends the decode steps' times in seconds."""
    asyncio.run(_serve(connection, case, mode))


async def _serve(connection: Connection, case: Case, mode: str) -> None:
    source = ProcessSource(case) if mode == "process" else ThreadSource(case)
    host = Host(case, source, streams=mode != "alone")
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(host, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        connection.send(port)
        await asyncio.wait_for(host.done.wait(), WAIT_S * 5)
        await server.stop(5.0)
        connection.send(host.durations_s)
    finally:
        await server.stop(0)
        await source.stop()


class ThreadSource:
    """The engine as a thread of this process.

    Args:
        case: What is run.
    """

    def __init__(self, case: Case) -> None:
        self._case = case
        self._engine = AsyncEngine(build_core(case), time.monotonic)

    async def steps(self) -> AsyncIterator[StepEvents]:
        """Starts the requests and yields every step; endless."""
        for command in commands(self._case):
            self._engine.send(command)
        self._engine.start()  # only now, so that all prompts are in the first step
        async for events in self._engine.outputs():
            yield events

    async def stop(self) -> None:
        """Ends the thread."""
        await self._engine.stop()


class ProcessSource:
    """The engine as a process: one pickled StepEvents per step comes through a pipe.

    Args:
        case: What is run.
    """

    def __init__(self, case: Case) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=engine_main, args=(theirs, case), name="gil-engine")
        self._process.start()
        theirs.close()
        if not self._pipe.poll(WAIT_S):
            raise EngineError("the engine process did not start")
        self._pipe.recv()

    async def steps(self) -> AsyncIterator[StepEvents]:
        """Starts the requests and yields every step."""
        queue: asyncio.Queue[StepEvents | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def readable() -> None:
            while self._pipe.poll():
                item = self._pipe.recv()
                queue.put_nowait(item)
                if item is None:
                    loop.remove_reader(self._pipe.fileno())
                    return

        loop.add_reader(self._pipe.fileno(), readable)
        self._pipe.send(None)
        while (item := await queue.get()) is not None:
            yield item

    async def stop(self) -> None:
        """Ends the process."""
        await asyncio.to_thread(self._process.join, 5.0)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()


class Host(worker_pb2_grpc.WorkerServicer):
    """Streams the steps of a source to the first session.

    Args:
        case: What is run.
        source: The engine.
        streams: False: only drain the source (the engine alone).
    """

    def __init__(self, case: Case, source: ThreadSource | ProcessSource, streams: bool) -> None:
        self.done = asyncio.Event()
        self.durations_s: list[float] = []
        self._case = case
        self._source = source
        self._streams = streams
        directory = case.tokenizer_dir
        tokenizer = Tokenizer.from_dir(directory) if directory else Tokenizer.fake(FAKE_VOCAB_SIZE)
        params = sampling(case)
        self._outputs = {
            str(i): OutputState(common_pb2.Fence(request_id=f"r{i}", attempt=1), tokenizer, params, PROMPT_TOKENS)
            for i in range(case.num_streams)
        }

    async def Session(self, requests: Any, context: Any) -> AsyncIterator[worker_pb2.SessionResponse]:
        """One message per step, as a worker sends them."""
        running = self._case.num_streams
        async for step in self._source.steps():
            if step.num_tokens == self._case.num_streams:
                self.durations_s.append(step.duration_s)
            sampled = [event for event in step.events if isinstance(event, TokensSampled)]
            running -= sum(event.finish_reason is not None for event in sampled)
            if self._streams and sampled:
                yield self._fan_out(step, sampled)
            if running == 0:
                break
        self.done.set()

    def _fan_out(self, step: StepEvents, sampled: list[TokensSampled]) -> worker_pb2.SessionResponse:
        outputs = [
            self._outputs[event.key].push(event.token_ids, finish_reason=event.finish_reason).message
            for event in sampled
        ]
        return worker_pb2.SessionResponse(
            step_outputs=worker_pb2.StepOutputs(
                step=step.step,
                outputs=outputs,
                load=worker_pb2.Load(
                    num_running=step.load.num_running,
                    num_waiting=step.load.num_waiting,
                    num_free_pages=step.load.num_free_pages,
                ),
            )
        )
