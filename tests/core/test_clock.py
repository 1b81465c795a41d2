"""Waits with a limit: the result, the time-out, and a cancellation that comes together with the result."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.core.clock import MonotonicClock


def test_result_and_time_out() -> None:
    async def main() -> None:
        clock = MonotonicClock()
        assert await clock.wait_for(asyncio.sleep(0, "done"), 5) == "done"
        future = asyncio.get_running_loop().create_future()
        with pytest.raises(TimeoutError):
            await clock.wait_for(future, 0.001)
        assert future.cancelled()

    asyncio.run(main())


@pytest.mark.parametrize("ticks", range(4))
def test_a_cancellation_that_comes_with_the_result_is_not_lost(ticks: int) -> None:
    async def main() -> None:
        news = asyncio.Event()

        async def keep() -> None:
            await MonotonicClock().wait_for(news.wait(), 60)
            await asyncio.Event().wait()

        keeper = asyncio.create_task(keep())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        news.set()
        for _ in range(ticks):
            await asyncio.sleep(0)
        keeper.cancel()
        _, waiting = await asyncio.wait([keeper], timeout=5)
        keeper.cancel()
        assert not waiting
        assert keeper.cancelled()

    asyncio.run(main())
