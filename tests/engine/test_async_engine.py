"""AsyncEngine: nothing is dropped, idle means asleep, expiry wakes, and a death reaches the consumer."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable

import pytest

from pdserve.core.errors import EngineError
from pdserve.engine.async_engine import AsyncEngine
from pdserve.engine.step import (
    Abort,
    Add,
    Event,
    ReservationRefused,
    Reserve,
    RunnerOutput,
    SchedulerOutput,
    SequenceAborted,
    SequenceFailed,
    StepEvents,
    TokensSampled,
)
from tests.engine.engines import Engine, Streams, request

LIMIT_S = 20.0


def drive(engine: Engine, use: Callable[[AsyncEngine], Awaitable[None]]) -> None:
    """Runs `use` on a started AsyncEngine, which is stopped afterwards."""

    async def main() -> None:
        running = AsyncEngine(engine.core, time.monotonic)
        running.start()
        try:
            async with asyncio.timeout(LIMIT_S):
                await use(running)
        finally:
            await running.stop(LIMIT_S)

    asyncio.run(main())
    engine.core.check()


async def until(engine: AsyncEngine, stop: Callable[[Event], bool]) -> list[StepEvents]:
    """Reads outputs up to the item with an event that `stop` accepts."""
    items: list[StepEvents] = []
    async for item in engine.outputs():
        items.append(item)
        if any(map(stop, item.events)):
            return items
    raise AssertionError("the engine stopped")


def test_streams_arrive_whole_one_item_per_step() -> None:
    async def use(engine: AsyncEngine) -> None:
        requests = [request(f"r{i}", range(i + 1), 20) for i in range(6)]
        for r in requests:
            engine.send(Add(r))
        streams = Streams()
        steps: list[int] = []
        async for item in engine.outputs():
            streams.read(item.events)
            steps += [item.step] if item.num_tokens else []
            if len(streams.finished) == len(requests):
                break
        streams.check(requests)
        assert steps == list(range(1, len(steps) + 1))
        assert engine.load().num_running == 0 and engine.healthy(LIMIT_S)

    drive(Engine(64, max_num_seqs=6), use)


def test_commands_wake_an_idle_engine() -> None:
    async def use(engine: AsyncEngine) -> None:
        for i in range(5):
            engine.send(Abort(f"unknown{i}"))
            items = await until(engine, lambda e: isinstance(e, SequenceAborted))
            assert all(item.num_tokens == 0 and item.step == 0 for item in items)

    drive(Engine(8), use)


def test_an_idle_engine_takes_no_steps() -> None:
    engine = Engine(8)
    calls: list[float] = []
    schedule = engine.core.schedule

    def counted(now: float) -> StepEvents:
        calls.append(now)
        return schedule(now)

    engine.core.schedule = counted  # type: ignore[method-assign]

    async def use(running: AsyncEngine) -> None:
        running.send(Add(request("a", [1], 3)))
        await until(running, lambda e: isinstance(e, TokensSampled) and e.finish_reason is not None)
        running.send(Abort("unknown"))
        await until(running, lambda e: isinstance(e, SequenceAborted))

    drive(engine, use)
    assert len(calls) <= 6  # three tokens, the look that finds nothing, before and after the abort


def test_a_reservation_expires_without_any_command() -> None:
    async def use(engine: AsyncEngine) -> None:
        engine.send(Reserve(request("a", range(20), 9), time.monotonic() + LIMIT_S))
        engine.send(Reserve(request("b", range(20), 9), time.monotonic() + 0.05))
        items = await until(engine, lambda e: isinstance(e, ReservationRefused))
        assert items[-1].events[-1] == ReservationRefused("b", 1.0)

    drive(Engine(8), use)


class BrokenRunner:
    """Fails."""

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """See `Runner`."""
        raise RuntimeError("device lost")


def test_a_death_fails_every_sequence_and_reaches_the_consumer() -> None:
    engine = Engine(8)
    engine.core._runner = BrokenRunner()

    async def use(running: AsyncEngine) -> None:
        running.send(Add(request("a", [1], 3)))
        events: list[Event] = []
        with pytest.raises(EngineError, match="device lost"):
            async for item in running.outputs():
                events += item.events
        assert [e.key for e in events if isinstance(e, SequenceFailed)] == ["a"]
        assert not running.healthy(LIMIT_S)
        with pytest.raises(EngineError, match="device lost"):
            running.send(Abort("a"))

    drive(engine, use)


class Panic(BaseException):
    """As that of a library written in Rust: no Exception."""


def test_a_panic_is_a_death_too() -> None:
    engine = Engine(8)

    def panic(output: SchedulerOutput) -> RunnerOutput:
        raise Panic("lost its mind")

    engine.runner.execute = panic  # type: ignore[method-assign]

    async def main() -> None:
        running = AsyncEngine(engine.core, time.monotonic)
        running.start()
        running.send(Add(request("a", [1], 3)))
        with pytest.raises(EngineError, match="lost its mind"):
            async with asyncio.timeout(LIMIT_S):
                async for _ in running.outputs():
                    pass
        assert not running.healthy(LIMIT_S)
        await running.stop(LIMIT_S)

    asyncio.run(main())


def test_a_step_that_does_not_end_is_unhealthy() -> None:
    engine, entered, leave = Engine(8), threading.Event(), threading.Event()
    execute = engine.runner.execute

    def slow(output: SchedulerOutput) -> RunnerOutput:
        entered.set()
        assert leave.wait(LIMIT_S)
        return execute(output)

    engine.runner.execute = slow  # type: ignore[method-assign]

    async def use(running: AsyncEngine) -> None:
        assert running.healthy(0.0)
        running.send(Add(request("a", [1], 3)))
        assert await asyncio.to_thread(entered.wait, LIMIT_S)
        assert not running.healthy(0.0) and running.healthy(LIMIT_S)
        with pytest.raises(EngineError, match="did not end"):
            await running.stop(0.01)
        leave.set()

    drive(engine, use)


def test_a_stopped_engine_ends_its_outputs_and_takes_no_commands() -> None:
    async def use(engine: AsyncEngine) -> None:
        await engine.stop()
        assert [item async for item in engine.outputs()] == []
        with pytest.raises(EngineError, match="stopped"):
            engine.send(Abort("a"))

    drive(Engine(8), use)
