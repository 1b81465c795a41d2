"""`pdserve bench serve`: the loop on a virtual clock, the numbers by hand, both backends, and the report."""

from __future__ import annotations

import asyncio
import heapq
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import grpc
import httpx2
import pytest

from pdserve.bench.backends import Generation, OpenAIBackend
from pdserve.bench.load import Outcome, RequestFailed, run_load
from pdserve.bench.metrics import meets, percentile, summarize, values_ms
from pdserve.bench.workload import Item
from pdserve.cli import __main__ as cli
from tests.client.scripted import hello, refuse, serving

T = TypeVar("T")


class StepClock:
    """Virtual time: jumps to the earliest sleeper once nothing else can run."""

    def __init__(self) -> None:
        self.time = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._count = 0

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._count += 1
        heapq.heappush(self._sleepers, (self.time + seconds, self._count, future))
        await future

    async def wait_for(self, awaitable: Awaitable[T], timeout_s: float | None) -> T:
        return await awaitable

    async def drive(self, task: asyncio.Task[T]) -> T:
        while not task.done():
            for _ in range(20):  # let everything that can run do so
                await asyncio.sleep(0)
            if self._sleepers:
                self.time, _, future = heapq.heappop(self._sleepers)
                future.set_result(None)
        return task.result()


class SlowBackend:
    """Two tokens, one second apart; a prompt that starts with 0 is refused at once."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self.running = 0
        self.most = 0

    async def send(self, item: Item, on_output: Callable[[], None]) -> int:
        if item.prompt_token_ids[0] == 0:
            raise RequestFailed("RESOURCE_EXHAUSTED QUEUE_FULL")
        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(2):
            await self._clock.sleep(1.0)
            on_output()
        self.running -= 1
        return 2


def run(items: list[Item], limit: int | None) -> tuple[list[Outcome], SlowBackend, list[Outcome]]:
    async def main() -> tuple[list[Outcome], SlowBackend, list[Outcome]]:
        clock, ended = StepClock(), list[Outcome]()
        backend = SlowBackend(clock)
        task = asyncio.create_task(run_load(items, backend, clock, limit, ended.append))
        return await clock.drive(task), backend, ended

    return asyncio.run(main())


def test_open_loop_sends_at_the_arrival_times() -> None:
    outcomes, backend, ended = run([Item(0.0, (1,), 2), Item(0.5, (0,), 2), Item(0.75, (1,), 2)], None)
    assert [o.sent_s for o in outcomes] == [0.0, 0.5, 0.75] and backend.most == 2
    assert [o.error for o in outcomes] == [None, "RESOURCE_EXHAUSTED QUEUE_FULL", None]
    assert outcomes[2].output_s == (1.75, 2.75) and sorted(o.end_s for o in ended) == [0.5, 2.0, 2.75]


def test_closed_loop_never_exceeds_its_limit() -> None:
    outcomes, backend, _ = run([Item(0.0, (1,), 2)] * 6, 2)
    assert backend.most == 2 and sorted(o.sent_s for o in outcomes) == [0, 0, 2, 2, 4, 4]


def outcome(sent: float, outputs: tuple[float, ...], end: float, tokens: int, error: str | None = None) -> Outcome:
    return Outcome(Item(sent, (1, 2), 4), sent, outputs, end, tokens, error)


def test_the_numbers_are_those_of_the_definitions() -> None:
    one = outcome(1.0, (1.5, 1.75, 2.5), 2.5, 5)
    assert values_ms(one, "ttft") == [500] and values_ms(one, "itl") == [250, 750]
    assert values_ms(one, "tpot") == [250] and values_ms(one, "e2el") == [1500]
    assert values_ms(outcome(0, (1.0,), 1.0, 1), "tpot") == [] and values_ms(outcome(0, (), 1.0, 0), "ttft") == []
    assert [percentile([4, 1, 3, 2], p) for p in (0, 50, 90, 100)] == pytest.approx([1, 2.5, 3.7, 4])


def test_goodput_counts_refused_requests_as_missed() -> None:
    fast, slow = outcome(0, (0.1,), 0.2, 1), outcome(0, (0.5,), 4.0, 2)
    refused = outcome(0, (), 0.1, 0, "QUEUE_FULL")
    assert [meets(o, {"ttft": 200}) for o in (fast, slow, refused)] == [True, False, False]
    rows = {r.name: r.value for r in summarize([fast, slow, refused, refused], ["ttft"], [99], {"ttft": 200})}
    assert rows["goodput (TTFT <= 200 ms)"] == pytest.approx(0.25) and rows["requests within the limits"] == 25
    assert rows["failed"] == rows["failed: QUEUE_FULL"] == 2 and rows["output tokens"] == 3
    assert rows["request throughput"] == pytest.approx(0.5) and rows["mean TTFT"] == pytest.approx(300)


def test_nothing_succeeded_is_still_a_report() -> None:
    rows = {r.name: r.value for r in summarize([outcome(0, (), 0, 0, "x")], ["ttft", "itl"], [99], {"ttft": 1})}
    assert rows["mean TTFT"] is None and rows["request throughput"] is None


def openai(body: str, status: int = 200, kind: str = "text/event-stream") -> tuple[int, int, Any]:
    """Tokens, output events and the request that an OpenAI server with this answer got."""
    seen: list[Any] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append(json.loads(request.content))
        return httpx2.Response(status, headers={"content-type": kind}, text=body)

    async def main() -> tuple[int, int, Any]:
        events: list[None] = []
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer)) as client:
            backend = OpenAIBackend(client, "http://h/v1/completions", Generation("m", 0.0, True, 5.0))
            tokens = await backend.send(Item(0, (5, 6), 4), lambda: events.append(None))
        return tokens, len(events), seen[0]

    return asyncio.run(main())


def sse(*chunks: Any) -> str:
    return "".join(f"data: {c if isinstance(c, str) else json.dumps(c)}\n\n" for c in chunks)


def test_openai_stream() -> None:
    first = {"choices": [{"text": "a", "finish_reason": None}]}
    last = {"choices": [{"text": "", "finish_reason": "length"}]}
    usage = {"choices": [], "usage": {"completion_tokens": 4}}
    tokens, events, request = openai(sse(first, first, last, usage, "[DONE]"))
    assert (tokens, events) == (4, 2)
    assert request["prompt"] == [5, 6] and request["max_tokens"] == 4 and request["stream_options"]["include_usage"]
    assert openai(sse(first, last, "[DONE]"))[:2] == (1, 1)


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ("busy", 429, "HTTP 429"),
        (sse({"choices": [{"text": "a"}]}), 200, "the stream was cut"),
        (sse({"error": {"message": "x"}}, "[DONE]"), 200, "error event in the stream"),
        (sse("{"), 200, "an event is not JSON"),
        (sse("[]"), 200, "an event is not a JSON object"),
        (sse({"usage": {"total_tokens": 3}}), 200, "an event is not one of completions"),
        (sse({"choices": ["a"]}), 200, "an event is not one of completions"),
    ],
)
def test_openai_failures_have_reasons(body: str, status: int, reason: str) -> None:
    with pytest.raises(RequestFailed) as caught:
        openai(body, status)
    assert caught.value.reason == reason


def test_openai_answer_that_is_no_stream() -> None:
    with pytest.raises(RequestFailed, match="SSEError"):
        openai("{}", kind="application/json")


def test_bench_serve_against_a_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def script(request, context):  # type: ignore[no-untyped-def]
        if len(router.requests) % 4 == 0:
            refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "full", "QUEUE_FULL")
        yield from hello(request, context)

    with serving(script) as (router, address):
        words = ["bench", "serve", "--router", address, "--num-prompts", "8", "--seed", "5", "--max-concurrency", "3"]
        words += ["--json", "r.json", "--save-result", "--result-filename", "all.json", "--goodput", "ttft:60000"]
        assert cli.main(words) == 0
        prompts = [tuple(r.tokens.token_ids) for r in router.requests]
    assert all(len(p) == 32 and max(p) < 100 for p in prompts), "cut to the model's 64 tokens and its vocabulary"
    report = json.loads((tmp_path / "r.json").read_text())
    assert set(report) == {"title", "command", "commit", "machine", "seed", "rows", "notes"}
    assert report["seed"] == 5 and report["command"].startswith("pdserve bench serve --router")
    assert all(set(row) == {"name", "value", "unit", "goal"} for row in report["rows"])
    rows = {row["name"]: row["value"] for row in report["rows"]}
    assert rows["succeeded"] == 6 and rows["failed: RESOURCE_EXHAUSTED QUEUE_FULL"] == 2 and rows["output tokens"] == 18
    assert "8 of 8 requests were cut" in report["notes"][0]
    assert report["notes"][-1].startswith("TTFT: from sending a request to its first output; ")
    assert len(json.loads((tmp_path / "all.json").read_text())["requests"]) == 8
    assert "median TTFT" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--backend", "openai"], "--base-url"),
        (["--dataset-name", "trace"], "--trace FILE"),
        (["--goodput", "ttft"], "ttft:200"),
        (["--percentile-metrics", "latency"], "unknown latency"),
        (["--metric-percentiles", "101"], "0..100"),
        (["--request-rate", "0"], "not greater than 0"),
        (["--num-promts", "3"], "did you mean --num-prompts"),
    ],
)
def test_wrong_flags(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: Any = cli.main(["bench", "serve", *words])
    except SystemExit as e:
        code = e.code
    assert code == 2 and said in capsys.readouterr().err
