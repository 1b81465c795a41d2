"""The blocking and the async client against a scripted router: one set of behaviours, both faces."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import grpc
import pytest

from pdserve.client import (
    AsyncClient,
    AsyncTokenStream,
    Cancelled,
    Client,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    ServerError,
    Unavailable,
)
from pdserve.client.exchange import ControlTries
from pdserve.v1 import common_pb2
from tests.client.scripted import WAIT_S, accepted, delta, endless, finished, hello, refuse, serving, silent

CLOSED_PORT = "127.0.0.1:1"  # privileged and unused: refuses connections


def ask(face: str, addresses: Any, *args: Any, **options: Any) -> Any:
    """`generate` through one of the two faces."""
    if face == "sync":
        with Client(addresses) as client:
            return client.generate(*args, **options)

    async def main() -> Any:
        async with AsyncClient(addresses) as client:
            return await client.generate(*args, **options)

    return asyncio.run(main())


faces = pytest.mark.parametrize("face", ["sync", "async"])


@faces
def test_generate_gives_the_whole_result(face: str) -> None:
    with serving(hello) as (router, address):
        result = ask(face, address, "Hi", max_tokens=5, temperature=0, stop="x", request_id="mine", model="m")
    assert (result.text, result.token_ids, result.finish_reason, result.stop_reason) == (
        "Hello",
        (10, 11, 12),
        "stop",
        "2",
    )
    assert (result.request_id, result.model, result.seed) == ("mine", "m", 7)
    assert (result.usage.prompt_tokens, result.usage.completion_tokens, result.usage.cached_tokens) == (3, 3, 1)
    assert (result.timings.queue_s, result.timings.ttft_s, result.timings.decode_s) == (0.5, 1.5, None)
    [sent] = router.requests
    assert sent.text == "Hi" and sent.sampling.max_tokens == 5 and sent.sampling.stop == ["x"] and sent.model == "m"
    assert sent.sampling.HasField("temperature") and not sent.sampling.HasField("top_p")


def _choice(choice: int, index: int, token: int, text: str, reason: int = 0, stop: str = "") -> Any:
    event = delta(index, [token], text)
    event.delta.choice, event.delta.finish_reason, event.delta.stop_reason = choice, reason, stop
    return event


@faces
def test_n_choices_come_mixed_and_the_result_has_them_all(face: str) -> None:
    def script(request: Any, context: Any) -> Any:
        yield accepted(request)
        yield _choice(1, 0, 20, "x", common_pb2.FINISH_REASON_LENGTH)
        yield _choice(0, 0, 10, "a")
        yield _choice(0, 1, 11, "b", common_pb2.FINISH_REASON_STOP, "2")
        yield finished(3)

    with serving(script) as (_, address):
        result = ask(face, address, "Hi", n=3)
    assert [(c.text, c.token_ids, c.finish_reason, c.stop_reason) for c in result.choices] == [
        ("ab", (10, 11), "stop", "2"),
        ("x", (20,), "length", None),
        ("", (), "stop", "2"),
    ]
    assert (result.text, result.token_ids, result.finish_reason) == ("ab", (10, 11), "stop")


@faces
def test_a_choice_that_was_not_asked_for_breaks_the_stream(face: str) -> None:
    def script(request: Any, context: Any) -> Any:
        yield accepted(request)
        yield _choice(2, 0, 20, "x")

    with serving(script) as (_, address), pytest.raises(ServerError, match="choice 2 of 2"):
        ask(face, address, "Hi", n=2)


def test_stream_gives_deltas_then_the_result() -> None:
    with serving(hello) as (router, address), Client(address) as client:
        stream = client.stream(prompt_token_ids=[1, 2])
        with pytest.raises(RuntimeError, match="not ended"):
            _ = stream.result
        deltas = list(stream)
        assert [(d.index, d.token_ids, d.text) for d in deltas] == [(0, (10,), "Hel"), (1, (11, 12), "lo")]
        assert stream.result.text == "Hello" and stream.request_id == router.requests[0].request_id != ""
        assert router.cancels.empty()


def test_chat_sends_the_messages() -> None:
    with serving(hello) as (router, address), Client(address) as client:
        client.chat([{"role": "user", "content": "Hi"}], max_tokens=1)
        assert [(m.role, m.content) for m in router.requests[0].chat.messages] == [("user", "Hi")]


@faces
@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("INVALID_ARGUMENT", InvalidRequest),
        ("NOT_FOUND", NotFound),
        ("RESOURCE_EXHAUSTED", Overloaded),
        ("UNAVAILABLE", Unavailable),
        ("CANCELLED", Cancelled),
        ("INTERNAL", ServerError),
        ("DATA_LOSS", ServerError),
    ],
)
def test_status_becomes_a_typed_error(face: str, code: str, error: type) -> None:
    def script(request, context):  # type: ignore[no-untyped-def]
        refuse(context, grpc.StatusCode[code], "what to do", "WHY", 1500)
        yield

    with serving(script) as (_, address), pytest.raises(error) as caught:
        ask(face, address, "Hi", request_id="r1")
    e = caught.value
    assert (e.status, e.reason, e.message, e.retry_after_s, e.request_id) == (code, "WHY", "what to do", 1.5, "r1")


@faces
def test_an_error_after_tokens_is_not_retried(face: str) -> None:
    def script(request, context):  # type: ignore[no-untyped-def]
        yield accepted(request)
        yield delta(0, [1], "a")
        refuse(context, grpc.StatusCode.UNAVAILABLE, "the decode worker died", "WORKER_DIED")

    with serving(script) as (one, a), serving(script) as (two, b):
        with pytest.raises(Unavailable, match="worker died"):
            ask(face, [a, b], "Hi")
        assert len(one.requests) + len(two.requests) == 1


@faces
@pytest.mark.parametrize(
    "script",
    [
        lambda r, c: iter([accepted(r), delta(0, [1], "a")]),
        lambda r, c: iter([delta(0, [1], "a")]),
        lambda r, c: iter([accepted(r), delta(1, [1], "a"), finished(1)]),
        lambda r, c: iter([accepted(r), finished(0), delta(0, [1], "a")]),
        lambda r, c: iter([accepted(r), finished(0, common_pb2.FINISH_REASON_UNSPECIFIED)]),
    ],
    ids=["cut", "no accepted", "gap", "after the end", "no reason"],
)
def test_a_broken_stream_never_looks_finished(face: str, script: Any) -> None:
    with serving(script) as (_, address), pytest.raises(ServerError) as caught:
        ask(face, address, "Hi")
    assert caught.value.reason == "PROTOCOL_ERROR"


@faces
def test_deadline(face: str) -> None:
    with serving(silent) as (router, address):
        with pytest.raises(DeadlineExceeded, match="no whole answer within timeout_s=1; allow more time"):
            ask(face, address, "Hi", timeout_s=1.0)
        router.ended.get(timeout=WAIT_S)


@faces
def test_the_next_router_is_tried_before_the_first_event(face: str) -> None:
    def draining(request, context):  # type: ignore[no-untyped-def]
        refuse(context, grpc.StatusCode.UNAVAILABLE, "draining", "DRAINING")
        yield

    with serving(draining) as (_, a), serving(hello) as (router, b):
        assert ask(face, [CLOSED_PORT, a, b], "Hi").text == "Hello"
        assert ask(face, [CLOSED_PORT, a, b], "Hi", request_id="mine").request_id == "mine"
        assert [r.request_id == "mine" for r in router.requests] == [False, True]
        with pytest.raises(Unavailable) as caught:  # a router's own word beats "connection refused"
            ask(face, [a, CLOSED_PORT], "Hi")
        assert caught.value.reason == "DRAINING"


@faces
def test_nobody_there_names_the_addresses(face: str) -> None:
    with pytest.raises(Unavailable) as caught:
        ask(face, [CLOSED_PORT, "127.0.0.1:2"], "Hi")
    assert CLOSED_PORT in caught.value.message and "127.0.0.1:2" in caught.value.message
    assert caught.value.reason == "UNREACHABLE"


def test_requests_start_at_each_router_in_turn() -> None:
    with serving(hello) as (one, a), serving(hello) as (two, b), Client([a, b]) as client:
        for _ in range(4):
            client.generate("Hi")
        assert (len(one.requests), len(two.requests)) == (2, 2)


@pytest.mark.parametrize("how", ["break", "with", "close", "exception"])
def test_leaving_a_stream_cancels_explicitly(how: str) -> None:
    with serving(endless) as (router, address), Client(address) as client:
        request_id = leave(client, how)
        assert router.cancels.get(timeout=WAIT_S) == request_id
        assert router.ended.get(timeout=WAIT_S) == request_id
        assert router.cancels.empty()


def leave(client: Client, how: str) -> str:
    stream = client.stream("Hi")
    if how == "with":
        with stream:
            next(stream)
    elif how == "close":
        next(stream)
        stream.close()
        assert list(stream) == []
    elif how == "break":
        for _ in stream:
            break
    else:
        with pytest.raises(ZeroDivisionError), stream:
            for d in stream:
                _ = 1 / d.index
    return stream.request_id


def test_an_abandoned_stream_is_cancelled_and_a_finished_one_is_not() -> None:
    with serving(endless) as (router, address), Client(address) as client:
        for _ in client.stream("Hi", request_id="left"):
            break
        gc.collect()
        assert router.cancels.get(timeout=WAIT_S) == "left"
        router.script = hello
        list(client.stream("Hi", request_id="whole"))
        gc.collect()
    assert router.cancels.empty()


async def read(stream: AsyncTokenStream, first: asyncio.Event) -> None:
    async for _ in stream:
        first.set()


@pytest.mark.parametrize("how", ["break", "with", "aclose", "task"])
def test_leaving_an_async_stream_cancels_explicitly(how: str) -> None:
    async def main(address: str) -> str:
        async with AsyncClient(address) as client:
            stream = client.stream("Hi")
            if how == "task":
                first = asyncio.Event()
                task = asyncio.create_task(read(stream, first))
                await asyncio.wait_for(first.wait(), WAIT_S)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            elif how == "with":
                async with stream:
                    await anext(stream)
            else:
                async for _ in stream:
                    break
                if how == "aclose":
                    await stream.aclose()
            request_id = stream.request_id
            del stream
            gc.collect()
            assert await asyncio.to_thread(router.cancels.get, timeout=WAIT_S) == request_id
            return request_id

    with serving(silent) as (router, address):
        request_id = asyncio.run(main(address))
        assert router.ended.get(timeout=WAIT_S) == request_id
        assert router.cancels.empty()


@faces
def test_closing_the_client_ends_a_running_stream_with_a_typed_error(face: str) -> None:
    async def main(address: str) -> None:
        first = asyncio.Event()
        client = AsyncClient(address)
        task = asyncio.create_task(read(client.stream("Hi"), first))
        await asyncio.wait_for(first.wait(), WAIT_S)
        await client.close()
        with pytest.raises(Cancelled):
            await asyncio.wait_for(task, WAIT_S)

    with serving(silent) as (_, address):
        if face == "async":
            asyncio.run(main(address))
            return
        client = Client(address)
        stream = client.stream("Hi")
        next(stream)
        client.close()
        with pytest.raises(Cancelled):
            next(stream)


def test_cancel_from_another_thread_ends_the_stream_with_its_reason() -> None:
    cancelled = threading.Event()

    def script(request, context):  # type: ignore[no-untyped-def]
        yield accepted(request)
        yield delta(0, [1], "a")
        assert cancelled.wait(WAIT_S)
        yield finished(1, common_pb2.FINISH_REASON_CANCELLED)

    with serving(script) as (router, address), Client(address) as client, client.stream("Hi") as stream:
        next(stream)
        thread = threading.Thread(target=lambda: (stream.cancel(), cancelled.set()))
        thread.start()
        assert list(stream) == [] and stream.result.finish_reason == "cancelled" and stream.result.text == "a"
        thread.join(WAIT_S)
        assert router.cancels.get(timeout=WAIT_S) == stream.request_id


def test_one_client_serves_many_threads() -> None:
    texts: list[str] = []
    with serving(hello) as (_, address), Client(address) as client:
        threads = [threading.Thread(target=lambda: texts.append(client.generate("Hi").text)) for _ in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(WAIT_S)
    assert texts == ["Hello"] * 8


@faces
def test_control_calls(face: str) -> None:
    async def everything(client: Any) -> list[Any]:
        async def value(x: Any) -> Any:
            return await x if asyncio.iscoroutine(x) else x

        return [
            await value(client.cancel("r")),
            await value(client.get_request("r")),
            await value(client.delete_request("r")),
            await value(client.models()),
        ]

    async def main(address: str) -> list[Any]:
        if face == "sync":
            with Client(address) as client:
                return await everything(client)
        async with AsyncClient(address) as client:
            return await everything(client)

    with serving(hello) as (_, address):
        cancelled, record, deleted, models = asyncio.run(main(address))
    assert cancelled is True and deleted is True
    assert (record.state, record.attempt, record.error) == ("failed", 2, "WORKER_DIED: gone")
    assert (record.prefill_worker_id, record.decode_worker_id, record.finish_reason) == ("p0", None, None)
    assert (models[0].name, models[0].ready, models[0].workers[0].role) == ("m", True, "decode")


def test_cancel_asks_every_router() -> None:
    with serving(hello) as (one, a), serving(hello) as (two, b), Client([a, b]) as client:
        with pytest.raises(NotFound):
            client.cancel("unknown-1")
        assert (one.cancels.qsize(), two.cancels.qsize()) == (1, 1)
    with serving(hello) as (_, a), Client([a, CLOSED_PORT]) as client, pytest.raises(Unavailable):
        client.cancel("unknown-1")  # the silent router might know it


def test_a_closed_client_says_so() -> None:
    client = Client(CLOSED_PORT)
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.generate("Hi")


def test_a_control_call_that_hangs_is_told_in_our_words() -> None:
    tries = ControlTries(("a:1",), None, everywhere=False)
    with pytest.raises(DeadlineExceeded, match="the router did not answer in time"):
        tries.failed("DEADLINE_EXCEEDED", "Deadline Exceeded", ())
    with pytest.raises(DeadlineExceeded, match="the store is slow"):
        tries.failed("DEADLINE_EXCEEDED", "the store is slow", (("pdserve-reason", "STORE_SLOW"),))
