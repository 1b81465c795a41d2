"""Pages are withdrawn and rewritten at any moment of a pull, without checksums: a pull that succeeds brought the bytes
of its own use of each page, and one that ended writes nothing more.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from pdserve.core.errors import TransferError
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.transport import SourcePageRef

from .planes import PATIENT_S, PLANES, Plane, planes
from .world import LAYOUT, run

NUM_PAGES, NUM_AT_ONCE = 64, 8
POISON, FREED = np.uint64(0xDEAD), np.uint64(0xBEEF)


class Race:
    """Both ends of a plane, and owners of pages that reuse them at once."""

    def __init__(self, plane: Plane, seed: int) -> None:
        self.rng = random.Random(seed)
        self.there, self.here = KvPool(LAYOUT, NUM_PAGES), KvPool(LAYOUT, NUM_PAGES)
        self.source = plane.source(self.there, 0)
        self.sink = plane.sink(self.here, [self.source], PATIENT_S)
        self.token = self.source.new_reader()
        self.pages_there, self.pages_here = (
            np.frombuffer(pool.buffer, np.uint64).reshape(NUM_PAGES, -1) for pool in (self.there, self.here)
        )
        self.generations = [0] * NUM_PAGES
        self.free_there, self.free_here = list(range(NUM_PAGES)), list(range(NUM_PAGES))
        self.num_good = self.num_failed = 0

    async def transfer(self, number: int) -> None:
        """One transfer of a few pages, disturbed or not."""
        num_pages = self.rng.randint(1, NUM_PAGES // NUM_AT_ONCE)
        sources = [self.free_there.pop(0) for _ in range(num_pages)]
        destinations = [self.free_here.pop(0) for _ in range(num_pages)]
        contents = [np.uint64(1_000_000 + number * NUM_PAGES + page) for page in sources]
        for page, content in zip(sources, contents, strict=True):
            self.generations[page] += 1
            self.pages_there[page] = content
        refs = [SourcePageRef(page, self.generations[page], 0) for page in sources]
        self.source.publish(f"t{number}", self.token, refs)
        pull = asyncio.create_task(self.sink.pull(self.source.address, self.token, f"t{number}", refs, destinations))
        if number % 5:  # every fifth is left alone, and another fifth disturbed before it begins
            if number % 5 > 1:
                await asyncio.sleep(self.rng.choice([0, 0, 0.0002, 0.0005, 0.001]))
            if self.rng.random() < 0.3:
                pull.cancel()
            await self.source.withdraw(f"t{number}")
            await asyncio.to_thread(self.write, sources)  # beside the threads that copy
        try:
            await pull
        except (TransferError, asyncio.CancelledError) as e:
            assert isinstance(e, asyncio.CancelledError) or e.reason == "ERR_STALE" or "GONE" in e.reason, e.reason
            self.num_failed += 1
        else:
            for destination, content in zip(destinations, contents, strict=True):
                assert (self.pages_here[destination] == content).all(), "bytes of another use"
            self.num_good += 1
        await self.source.withdraw(f"t{number}")
        self.pages_here[destinations] = FREED
        self.free_there += sources
        self.free_here += destinations

    def write(self, sources: list[int]) -> None:
        """Writes pages anew; numpy lets other threads run meanwhile."""
        for page in sources:
            np.copyto(self.pages_there[page], POISON)

    def free_are_untouched(self) -> Any:
        """Nobody wrote into pages after their pull had ended."""
        free = self.pages_here[self.free_here]
        return ((free == FREED) | (free == 0)).all()


@planes([plane for plane in PLANES if plane.sees_asks])
@pytest.mark.parametrize("number", [60, pytest.param(2_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_reuse_at_any_moment_of_a_pull(plane: Plane, number: int) -> None:
    async def body() -> None:
        race, numbers = Race(plane, number), iter(range(number))

        async def one_after_another() -> None:
            for i in numbers:
                await race.transfer(i)
                assert race.free_are_untouched()

        await asyncio.gather(*(one_after_another() for _ in range(NUM_AT_ONCE)))
        assert race.num_good > number / 10 and race.num_failed > number / 10
        await race.sink.close()
        race.source.close()

    run(body(), 600)
