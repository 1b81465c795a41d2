"""PreparationGate in an AsyncEngine: what is not ready stays out, in order, and can be aborted, fail or be too late."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future

import pytest

from pdserve.core.errors import RequestError
from pdserve.core.sampling import SamplingParams
from pdserve.engine.async_engine import AsyncEngine
from pdserve.engine.preparation import PreparationGate
from pdserve.engine.step import (
    Abort,
    Add,
    Command,
    Event,
    MarkReserved,
    Reserve,
    SequenceAborted,
    SequenceFailed,
    TokensSampled,
)
from tests.engine.engines import Engine, request

LIMIT_S = 20.0


class Slow:
    """A `Preparation` that a test ends."""

    def __init__(self) -> None:
        self.future: Future[None] = Future()
        self.given_up = False

    def result(self, timeout_s: float) -> None:
        self.future.result(timeout_s)

    def done(self) -> bool:
        return self.future.done()

    def on_done(self, call: Callable[[], None]) -> None:
        self.future.add_done_callback(lambda _: call())

    def give_up(self) -> None:
        self.given_up = True


def drive(use: Callable[[AsyncEngine, Slow], Awaitable[None]], wait_s: float = LIMIT_S) -> None:
    """Runs `use` on an engine in which requests with top_k = 7 have to wait."""
    engine, slow = Engine(16), Slow()

    def prepare(params: SamplingParams) -> Slow | None:
        return slow if params.top_k == 7 else None

    async def main() -> None:
        running = AsyncEngine(engine.core, time.monotonic, prepare, wait_s)
        running.start()
        try:
            async with asyncio.timeout(LIMIT_S):
                await use(running, slow)
        finally:
            await running.stop(LIMIT_S)

    asyncio.run(main())
    engine.core.check()


async def until(engine: AsyncEngine, stop: Callable[[Event], bool]) -> list[Event]:
    events: list[Event] = []
    async for item in engine.outputs():
        events += item.events
        if any(map(stop, item.events)):
            return events
    raise AssertionError("the engine stopped")


def finished(key: str) -> Callable[[Event], bool]:
    return lambda e: isinstance(e, TokensSampled) and e.key == key and e.finish_reason is not None


def test_others_go_on_while_one_waits_and_then_it_runs() -> None:
    async def use(engine: AsyncEngine, slow: Slow) -> None:
        engine.send(Add(request("slow", [1, 2], 3, top_k=7)))
        engine.send(Add(request("quick", [1, 2], 3)))
        events = await until(engine, finished("quick"))
        assert {e.key for e in events} == {"quick"}
        slow.future.set_result(None)
        await until(engine, finished("slow"))

    drive(use)


def test_commands_of_a_waiting_request_follow_it_in_order() -> None:
    async def use(engine: AsyncEngine, slow: Slow) -> None:
        engine.send(Add(request("slow", [1, 2], 3, top_k=7), handoff=True))
        engine.send(MarkReserved("slow"))
        slow.future.set_result(None)
        await until(engine, lambda e: isinstance(e, TokensSampled))
        engine.send(Abort("slow"))
        await until(engine, lambda e: isinstance(e, SequenceAborted) and e.known)

    drive(use)


def test_a_waiting_request_is_aborted_at_once_and_given_up() -> None:
    async def use(engine: AsyncEngine, slow: Slow) -> None:
        engine.send(Add(request("slow", [1, 2], 3, top_k=7)))
        engine.send(Abort("slow"))
        events = await until(engine, lambda e: isinstance(e, SequenceAborted))
        assert events == [SequenceAborted("slow", True)] and slow.given_up
        slow.future.set_result(None)
        engine.send(Add(request("quick", [1, 2], 3)))
        events = await until(engine, finished("quick"))
        assert {e.key for e in events} == {"quick"}

    drive(use)


def test_what_is_held_counts_as_waiting() -> None:
    async def use(engine: AsyncEngine, slow: Slow) -> None:
        engine.send(Add(request("slow", [1, 2], 3, top_k=7), forks=(request("fork", [1, 2], 3, top_k=7),)))
        assert engine.load().num_waiting == 2
        engine.send(Add(request("quick", [1, 2], 1)))
        async for item in engine.outputs():
            assert item.load.num_waiting == 2
            if any(map(finished("quick"), item.events)):
                break
        slow.future.set_result(None)
        await until(engine, finished("fork"))
        assert engine.load().num_waiting == 0

    drive(use)


def test_a_reservation_waits_for_pages_only_after_its_grammar() -> None:
    passed: list[Command] = []
    slow, clock = Slow(), [100.0]
    gate = PreparationGate(
        lambda _: slow, passed.extend, lambda *_: None, lambda: clock[0], lambda *_: None, wait_s=15.0
    )
    gate.send(Reserve(request("slow", [1, 2], 3), expires_s=105.0))
    clock[0] = 109.0
    slow.future.set_result(None)
    assert passed == [Reserve(request("slow", [1, 2], 3), expires_s=114.0)] and gate.num_held == 0


def test_a_failed_preparation_fails_the_request_with_its_reason() -> None:
    async def use(engine: AsyncEngine, slow: Slow) -> None:
        engine.send(Add(request("slow", [1, 2], 3, top_k=7)))
        slow.future.set_exception(RequestError("bad form", reason="BAD"))
        events = await until(engine, lambda e: isinstance(e, SequenceFailed))
        assert events == [SequenceFailed("slow", "INVALID_ARGUMENT", "BAD", "bad form")]
        with pytest.raises(RequestError, match="bad form"):  # known now: refused at once
            engine.send(Add(request("again", [1, 2], 3, top_k=7)))

    drive(use)


def test_a_request_that_is_not_ready_in_time_fails() -> None:
    async def use(engine: AsyncEngine, slow: Slow) -> None:
        engine.send(Add(request("slow", [1, 2], 3, top_k=7)))
        [event] = await until(engine, lambda e: isinstance(e, SequenceFailed))
        assert isinstance(event, SequenceFailed) and slow.given_up
        assert (event.status, event.reason) == ("RESOURCE_EXHAUSTED", "GRAMMAR_NOT_READY")

    drive(use, wait_s=0.01)
