"""A router whose every answer the test writes: real gRPC on a free port, no engine behind it."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from pdserve.v1 import common_pb2, inference_pb2, inference_pb2_grpc

Script = Callable[[Any, Any], Iterator[inference_pb2.GenerateResponse]]
WAIT_S = 10.0


class ScriptedInference(inference_pb2_grpc.InferenceServicer):
    """Runs `script` for Generate and records what arrives.

    Attributes:
        requests: Every GenerateRequest.
        cancels: Every cancelled request id.
        ended: One entry per Generate call that ended, however it did.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[Any] = []
        self.cancels: queue.Queue[str] = queue.Queue()
        self.ended: queue.Queue[str] = queue.Queue()
        self.known: dict[str, str] = {}

    def Generate(self, request, context):  # type: ignore[no-untyped-def]
        self.requests.append(request)
        context.add_callback(lambda: self.ended.put(request.request_id))
        yield from self.script(request, context)

    def Cancel(self, request, context):  # type: ignore[no-untyped-def]
        self.cancels.put(request.request_id)
        if request.request_id.startswith("unknown"):
            refuse(context, grpc.StatusCode.NOT_FOUND, "no such request", "UNKNOWN_REQUEST")
        return inference_pb2.CancelResponse(cancelled=True)

    def GetRequest(self, request, context):  # type: ignore[no-untyped-def]
        return inference_pb2.GetRequestResponse(
            request_id=request.request_id,
            state=inference_pb2.REQUEST_STATE_FAILED,
            attempt=2,
            prefill_worker_id="p0",
            error=common_pb2.ErrorDetail(reason="WORKER_DIED", message="gone"),
        )

    def DeleteRequest(self, request, context):  # type: ignore[no-untyped-def]
        return inference_pb2.DeleteRequestResponse(deleted=True)

    def ListModels(self, request, context):  # type: ignore[no-untyped-def]
        worker = inference_pb2.WorkerInfo(worker_id="d0", role=common_pb2.ROLE_DECODE, state="ready", num_pages=8)
        model = inference_pb2.Model(name="m", max_model_len=64, vocab_size=100, ready=True, workers=[worker])
        return inference_pb2.ListModelsResponse(models=[model])


@contextmanager
def serving(script: Script) -> Iterator[tuple[ScriptedInference, str]]:
    """The servicer and its address, while the block runs."""
    server = grpc.server(ThreadPoolExecutor(16))
    servicer = ScriptedInference(script)
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        assert server.stop(0).wait(WAIT_S)


def refuse(context: Any, code: grpc.StatusCode, message: str, reason: str, retry_after_ms: int = 0) -> None:
    """Ends the call as `core.grpc_server` does."""
    metadata = [("pdserve-reason", reason)]
    if retry_after_ms:
        metadata.append(("pdserve-retry-after-ms", str(retry_after_ms)))
    context.set_trailing_metadata(tuple(metadata))
    context.abort(code, message)


def accepted(request: Any, seed: int = 7) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        accepted=inference_pb2.Accepted(request_id=request.request_id, prompt_tokens=3, model="m", seed=seed)
    )


def delta(index: int, token_ids: list[int], text: str) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(delta=common_pb2.Delta(index=index, token_ids=token_ids, text=text))


def finished(tokens: int, reason: int = common_pb2.FINISH_REASON_STOP) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        finished=inference_pb2.Finished(
            finish_reason=reason,
            stop_reason="2",
            usage=common_pb2.Usage(prompt_tokens=3, completion_tokens=tokens, cached_tokens=1),
            timings=common_pb2.Timings(queue_s=0.5, ttft_s=1.5),
        )
    )


def hello(request: Any, context: Any) -> Iterator[inference_pb2.GenerateResponse]:
    """Accepted, two deltas, finished."""
    yield accepted(request)
    yield delta(0, [10], "Hel")
    yield delta(1, [11, 12], "lo")
    yield finished(3)


def endless(request: Any, context: Any) -> Iterator[inference_pb2.GenerateResponse]:
    """Tokens until the call ends; the client's flow control sets the pace."""
    yield accepted(request)
    index = 0
    while context.is_active():
        yield delta(index, [index], "x" * 1000)
        index += 1


def silent(request: Any, context: Any) -> Iterator[inference_pb2.GenerateResponse]:
    """Accepted and one token, then nothing until the call ends."""
    done: queue.Queue[None] = queue.Queue()
    context.add_callback(lambda: done.put(None))
    yield accepted(request)
    yield delta(0, [1], "a")
    done.get(timeout=WAIT_S)
