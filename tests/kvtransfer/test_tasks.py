"""Work in threads that must be over before its caller goes on."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from pdserve.kvtransfer.tasks import until_over

from .world import run


@pytest.mark.parametrize("fails", [False, True])
def test_a_cancelled_caller_goes_on_when_the_work_is_over_and_hears_of_its_cancellation_only(fails: bool) -> None:
    async def body() -> None:
        entered, gate, stops = threading.Event(), threading.Event(), list[None]()

        def work() -> int:
            entered.set()
            assert gate.wait(20)
            if fails:
                raise ValueError("nobody is told")
            return 1

        with ThreadPoolExecutor(1) as threads:
            caller = asyncio.create_task(until_over(threads.submit(work), lambda: stops.append(None)))
            await asyncio.to_thread(entered.wait, 20)
            for _ in range(3):
                caller.cancel()
                await asyncio.wait([caller], timeout=0.01)
                assert not caller.done() and len(stops) == 1
            gate.set()
            with pytest.raises(asyncio.CancelledError):
                await caller

    run(body())


def test_work_that_no_thread_has_begun_may_be_cancelled() -> None:
    async def body() -> None:
        work = Future[int]()
        caller = asyncio.create_task(until_over(work, work.cancel))
        await asyncio.sleep(0)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert work.cancelled()

    run(body())


def test_what_the_work_returns_or_raises_is_told() -> None:
    async def body() -> None:
        with ThreadPoolExecutor(1) as threads:
            assert await until_over(threads.submit(int, "7"), lambda: None) == 7
            with pytest.raises(ValueError, match="literal"):
                await until_over(threads.submit(int, "x"), lambda: None)

    run(body())
