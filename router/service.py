"""The public API `pdserve.v1.Inference`: messages in, one request's events out. Decisions live elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc

from pdserve.core.clock import Clock
from pdserve.core.errors import CancelledError, PdserveError, UnavailableError, UnimplementedError, UnknownError
from pdserve.core.sampling_proto import sampling_from_proto
from pdserve.core.structured import check_structured
from pdserve.core.telemetry import RouterMetrics
from pdserve.core.text_stream import echo_text
from pdserve.core.tokenizer import Tokenizer
from pdserve.core.tracing import REQUEST_ID, Tracing, request_attributes
from pdserve.router.admission import Admitted, admit, check_envelope, check_prompt_length, check_request_id
from pdserve.router.open_request import OpenRequest
from pdserve.router.orchestrator import Orchestrator
from pdserve.router.record import PHASES, TERMINAL_PHASE, RequestRecord, RequestState
from pdserve.router.request_store import RequestStore, still_running_error
from pdserve.router.trace import RequestReport
from pdserve.router.worker_set import WorkerSet
from pdserve.router.worker_table import Limits, WorkerRow
from pdserve.v1 import common_pb2, inference_pb2, inference_pb2_grpc

SERVICE_NAME = "pdserve.v1.Inference"
INLINE_TOKENISE_BYTES = 4096
"""Longer requests are tokenised in a thread: the loop carries every other stream meanwhile."""
FOREVER_S = 1e8
"""gRPC says "no deadline" as a very distant one."""

Context = grpc.aio.ServicerContext[Any, Any]
_ROLES = {"prefill": common_pb2.ROLE_PREFILL, "decode": common_pb2.ROLE_DECODE, "mixed": common_pb2.ROLE_MIXED}
_FINISH = {
    "stop": common_pb2.FINISH_REASON_STOP,
    "length": common_pb2.FINISH_REASON_LENGTH,
    "cancelled": common_pb2.FINISH_REASON_CANCELLED,
}


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Servicer of `pdserve.v1.Inference`.

    Args:
        model: Served model name.
        orchestrator: Runs requests.
        store: Request records.
        workers: For `ListModels`.
        tokenizer: Gives the tokenizer of a vocabulary (only the fake one depends on it).
        tracing: The process's tracer.
        metrics: The router's metrics.
        clock: Time.
    """

    def __init__(
        self,
        model: str,
        orchestrator: Orchestrator,
        store: RequestStore,
        workers: WorkerSet,
        tokenizer: Callable[[Limits], Tokenizer],
        tracing: Tracing,
        metrics: RouterMetrics,
        clock: Clock,
    ) -> None:
        self._model = model
        self._orchestrator = orchestrator
        self._store = store
        self._workers = workers
        self._tokenizer = tokenizer
        self._tracing = tracing
        self._metrics = metrics
        self._clock = clock

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """See inference.proto."""
        with self._orchestrator.call():
            opened = await self._open(request, context)
            admitted = opened.admitted
            try:
                yield inference_pb2.GenerateResponse(
                    accepted=inference_pb2.Accepted(
                        request_id=admitted.request_id,
                        prompt_tokens=len(admitted.prompt_token_ids),
                        model=admitted.model,
                        seed=admitted.sampling.seed,
                    )
                )
                if admitted.echo:
                    yield inference_pb2.GenerateResponse(prompt=inference_pb2.Prompt(text=admitted.echo))
                while True:
                    match await opened.stream.next():
                        case common_pb2.Delta() as delta:
                            yield inference_pb2.GenerateResponse(delta=delta)
                        case common_pb2.PromptLogprobs() as told:
                            yield inference_pb2.GenerateResponse(prompt=inference_pb2.Prompt(logprobs=told))
                        case finished:
                            yield inference_pb2.GenerateResponse(finished=finished)
                            return
            finally:
                opened.cancel("CLIENT_DISCONNECTED")  # means nothing once the request has ended

    async def Attach(self, request: inference_pb2.AttachRequest, context: Context) -> None:
        """See inference.proto."""
        raise UnimplementedError("Attach is not built yet; send the request again under a new request_id")

    async def Cancel(self, request: inference_pb2.CancelRequest, context: Context) -> inference_pb2.CancelResponse:
        """See inference.proto."""
        check_request_id(request.request_id)
        if opened := self._orchestrator.find(request.request_id):
            opened.cancel("CLIENT_CANCELLED")
            return inference_pb2.CancelResponse(cancelled=True)
        try:
            record = await self._store.get(request.request_id)
        except UnknownError:
            return inference_pb2.CancelResponse(cancelled=False)
        if not _has_ended(record):
            raise UnavailableError(
                f"request {record.request_id!r} is owned by router {record.owner}; send Cancel there",
                reason="OTHER_OWNER",
            )
        return inference_pb2.CancelResponse(cancelled=False)

    async def GetRequest(
        self, request: inference_pb2.GetRequestRequest, context: Context
    ) -> inference_pb2.GetRequestResponse:
        """See inference.proto."""
        check_request_id(request.request_id)
        record = await self._store.get(request.request_id)
        response = _record_to_proto(record)
        if opened := self._orchestrator.find(request.request_id):
            response.emitted_tokens = opened.progress.num_tokens
        return response

    async def DeleteRequest(
        self, request: inference_pb2.DeleteRequestRequest, context: Context
    ) -> inference_pb2.DeleteRequestResponse:
        """See inference.proto."""
        check_request_id(request.request_id)
        if self._orchestrator.find(request.request_id):
            raise still_running_error(request.request_id)
        deleted = await self._store.delete(request.request_id)
        return inference_pb2.DeleteRequestResponse(deleted=deleted)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        """See inference.proto."""
        limits = self._workers.table.limits() or Limits(0, 0)
        model = inference_pb2.Model(
            name=self._model,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            ready=self._orchestrator.can_serve(),
            workers=[_worker_to_proto(row) for row in self._workers.table.rows()],
        )
        return inference_pb2.ListModelsResponse(models=[model])

    # ---- admission

    async def _open(self, request: inference_pb2.GenerateRequest, context: Context) -> OpenRequest:
        arrival_s = self._clock.now()
        left_s = context.time_remaining()
        deadline_s = arrival_s + left_s if left_s is not None and left_s < FOREVER_S else None
        chat = request.WhichOneof("prompt") == "chat"
        attributes = request_attributes(self._model, chat=chat)
        span = self._tracing.start_request(
            f"{attributes['gen_ai.operation.name']} {self._model}",
            arrival_s,
            traceparent=_traceparent(context),
            attributes=attributes,
        )
        report = RequestReport(span, self._tracing, self._metrics, self._clock)
        try:
            admitted = await self._admit(request)
            span.set({**request_attributes(self._model, admitted.sampling, chat=chat), REQUEST_ID: admitted.request_id})
        except PdserveError as e:
            report.refused(e)
            raise
        except asyncio.CancelledError:
            report.refused(CancelledError("the client left before its request was accepted"))
            raise
        return await self._orchestrator.open(admitted, arrival_s=arrival_s, deadline_s=deadline_s, trace=report)

    async def _admit(self, request: inference_pb2.GenerateRequest) -> Admitted:
        self._orchestrator.check_open()
        check_envelope(request, self._model)
        sampling = sampling_from_proto(request.sampling)
        limits = await self._orchestrator.limits()
        if sampling.structured_outputs is not None:  # a hostile one takes up to a second
            await asyncio.to_thread(check_structured, sampling.structured_outputs, self._tokenizer(limits))
        admitted = admit(
            request,
            request_id=request.request_id or self._orchestrator.new_id(),
            model=self._model,
            prompt_token_ids=await self._tokenise(request, limits),
            sampling=sampling,
            limits=limits,
            drawn_seed=self._orchestrator.new_seed(),
        )
        return replace(admitted, echo=await self._echo(request, admitted, limits)) if sampling.echo else admitted

    async def _echo(self, request: inference_pb2.GenerateRequest, admitted: Admitted, limits: Limits) -> str:
        prompt = request.text if request.WhichOneof("prompt") == "text" else None
        args = self._tokenizer(limits), prompt, admitted.prompt_token_ids, admitted.sampling
        inline = request.ByteSize() <= INLINE_TOKENISE_BYTES
        return echo_text(*args) if inline else await asyncio.to_thread(echo_text, *args)

    async def _tokenise(self, request: inference_pb2.GenerateRequest, limits: Limits) -> list[int]:
        form = request.WhichOneof("prompt")
        if form == "tokens":
            check_prompt_length(len(request.tokens.token_ids), limits)  # before millions of them are copied
            return list(request.tokens.token_ids)
        tokenizer = self._tokenizer(limits)

        def encode() -> list[int]:
            if form == "text":
                return tokenizer.encode(request.text)
            return tokenizer.encode_chat([{"role": m.role, "content": m.content} for m in request.chat.messages])

        return encode() if request.ByteSize() <= INLINE_TOKENISE_BYTES else await asyncio.to_thread(encode)


def _traceparent(context: Context) -> str:
    metadata = dict(context.invocation_metadata() or ())
    value = metadata.get("traceparent", "")
    return value if isinstance(value, str) else ""


def _has_ended(record: RequestRecord) -> bool:
    return PHASES[record.state] == TERMINAL_PHASE


def _record_to_proto(record: RequestRecord) -> inference_pb2.GetRequestResponse:
    response = inference_pb2.GetRequestResponse(
        request_id=record.request_id,
        state=f"REQUEST_STATE_{record.state.name}",
        attempt=record.attempt,
        owner_epoch=record.owner_epoch,
        prefill_worker_id=record.prefill_worker,
        decode_worker_id=record.decode_worker,
        emitted_tokens=record.emitted_tokens,
        finish_reason=_FINISH.get(record.finish_reason, common_pb2.FINISH_REASON_UNSPECIFIED),
        model=record.model,
    )
    if record.state is RequestState.FAILED:
        response.error.CopyFrom(
            common_pb2.ErrorDetail(status=record.error_status, reason=record.error_reason, message=record.error_message)
        )
    return response


def _worker_to_proto(row: WorkerRow) -> inference_pb2.WorkerInfo:
    return inference_pb2.WorkerInfo(
        worker_id=row.worker_id,
        role=_ROLES[row.role.value],
        incarnation=row.incarnation,
        address=row.address,
        state=row.state,
        num_running=row.load.num_running,
        num_waiting=row.load.num_waiting,
        num_free_pages=row.load.num_free_pages,
        num_pages=row.num_pages,
    )
