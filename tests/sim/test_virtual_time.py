"""The virtual clock: waits cost nothing, order is by time, a wait for ever is an error."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.bench.virtual_time import StuckError, VirtualClock, run_virtual


def test_waits_cost_nothing_and_keep_their_order() -> None:
    async def main() -> list[tuple[float, str]]:
        clock, log = VirtualClock(), []

        async def wait(seconds: float, name: str) -> None:
            await clock.sleep(seconds)
            log.append((clock.now(), name))

        await asyncio.gather(wait(1e6, "late"), wait(5, "soon"), wait(0, "now"))
        return log

    assert run_virtual(main()) == [(0.0, "now"), (5.0, "soon"), (1e6, "late")]


def test_timeout_comes_at_its_time() -> None:
    async def main() -> float:
        clock = VirtualClock()
        with pytest.raises(TimeoutError):
            await clock.wait_for(asyncio.Event().wait(), 30)
        return clock.now()

    assert run_virtual(main()) == 30.0


def test_waiting_for_ever_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(StuckError):
        run_virtual(main())
