"""Experiment: how many pages of a prompt follow each other in the pool, by how full it is and how pages are chosen.

Prompts of a trace come one after the other; when one has no room, sequences drawn at random end until it has. What the
engine's pool gives is compared with a stack of pages and with the lowest free page, on the same prompts.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Protocol

from pdserve.bench.engine_lab import Findings, Setting
from pdserve.bench.report import Row
from pdserve.bench.workload import read_trace
from pdserve.core.config import check, option
from pdserve.core.errors import ConfigError
from pdserve.engine.page_pool import PagePool

TRACE = Path(__file__).parent / "data" / "azure2023_conv_2000.csv"
DEFAULTS: dict[str, object] = {}
QUICK: dict[str, object] = {"num_prompts": 60, "pool_pages": 1024, "in_use": "50,90"}


@dataclass(frozen=True, kw_only=True)
class RunsOptions:
    """Sizes of the pool's simulation."""

    num_prompts: int = option(4000, "prompts, over the trace again and again", unit="prompts", minimum=2)
    pool_pages: int = option(4096, "pages of the pool", unit="pages", minimum=64)
    in_use: str = option("50,75,90,95,99", "how full the pool is, one measurement each, with commas", unit="percent")

    def __post_init__(self) -> None:
        check(self)
        self.shares()

    def shares(self) -> list[int]:
        """`in_use` as numbers."""
        try:
            shares = [int(n) for n in self.in_use.split(",")]
        except ValueError:
            shares = []
        if not shares or not all(25 <= n <= 100 for n in shares):
            raise ConfigError(f"--in-use is {self.in_use!r}; write percentages from 25 on with commas, e.g. 50,90,99")
        return shares


OPTIONS = RunsOptions


class Pages(Protocol):
    """What the simulation needs of a pool."""

    def allocate(self, num_pages: int) -> list[int]:
        """Takes pages."""
        ...

    def release(self, pages: Sequence[int]) -> None:
        """Takes them back, in the order in which they were given."""
        ...


class Stack:
    """What came back last is given first; of a prefix cache, which is left with every page, what came back first.

    Args:
        num_pages: Pages in all.
        cached: Every page that comes back is cached.
    """

    def __init__(self, num_pages: int, cached: bool = False) -> None:
        self._free = deque(range(num_pages - 1, -1, -1))
        self._cached = cached

    def allocate(self, num_pages: int) -> list[int]:
        """See `Pages`."""
        if not self._cached:
            return [self._free.pop() for _ in range(num_pages)]
        pages = [self._free.popleft() for _ in range(num_pages)]
        pages.reverse()
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """See `Pages`."""
        self._free.extend(reversed(pages))


class Lowest:
    """The lowest free page is given first.

    Args:
        num_pages: Pages in all.
    """

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages))

    def allocate(self, num_pages: int) -> list[int]:
        """See `Pages`."""
        return [heapq.heappop(self._free) for _ in range(num_pages)]

    def release(self, pages: Sequence[int]) -> None:
        """See `Pages`."""
        for page in pages:
            heapq.heappush(self._free, page)


class CachedPool(PagePool):
    """The engine's pool under a prefix cache that wants every page."""

    def release(self, pages: Sequence[int]) -> None:
        """See `PagePool`."""
        for page in pages:
            self.keep(page)
        super().release(pages)


PoolKind = Callable[[int], Pages]
"""Makes a pool of so many pages."""

WORKERS: dict[str, tuple[bool, dict[str, PoolKind]]] = {
    "prompts": (False, {"runs": PagePool, "a stack": Stack, "the lowest page": Lowest}),
    "prompts and decodes": (True, {"runs": PagePool, "a stack": Stack, "the lowest page": Lowest}),
    "prompts beside a full cache": (
        False,
        {"runs": CachedPool, "runs, none spare": lambda n: CachedPool(n, 0), "a stack": lambda n: Stack(n, True)},
    ),
}
"""By what the pool holds: whether sequences grow page by page, and the pools that are compared."""


def run(options: RunsOptions, setting: Setting) -> Findings:
    """Simulates. Nothing is timed, so nothing is repeated."""
    size = setting.engine.page_size
    trace = ((-(-r.input_tokens // size), r.output_tokens // size) for r in read_trace(TRACE))
    fitting = [lengths for lengths in trace if 0 < lengths[0] <= options.pool_pages // 8]
    prompts = list(islice(cycle(fitting), options.num_prompts))
    rows = [Row("pages of a prompt, mean", sum(n for n, _ in prompts) / len(prompts), "pages")]
    for what, (grows, pools) in WORKERS.items():
        for share in options.shares():
            setting.say(f"{share} % in use by {what}")
            for name, make in pools.items():
                limit = options.pool_pages * share // 100
                mean = mean_run(make(options.pool_pages), limit, prompts, grows, setting.seed)
                rows.append(Row(f"{share} % in use by {what}: {name}", mean, "pages per run"))
    notes = [
        f"{len(prompts):,} prompts of {TRACE.name}, in pages of {size} tokens, of at most an eighth of "
        f"{options.pool_pages:,} pages; means over the second half of them",
        "runs: what the engine does; in use: held by sequences, the rest is free or cached",
    ]
    return Findings(title="pages that follow each other in the pool", rows=rows, notes=notes)


def mean_run(pool: Pages, limit: int, prompts: Sequence[tuple[int, int]], grows: bool, seed: int) -> float:
    """Mean length of the runs that prompts get.

    Args:
        pool: All its pages are free.
        limit: Pages that sequences hold at most together; more than any of them holds alone.
        prompts: Pages of each prompt, and pages that its sequence would add.
        grows: Those are added too, one by one, to sequences drawn at random.
        seed: Of who ends and who grows.

    Returns:
        Pages per run of the second half of the prompts.
    """
    rng, live, used = random.Random(f"runs {seed}"), list[list[int]](), 0
    num_pages = num_runs = 0

    def take(number: int) -> list[int]:
        nonlocal used
        while used + number > limit and live:
            at = rng.randrange(len(live))
            live[at], live[-1] = live[-1], live[at]
            used -= len(live[-1])
            pool.release(live.pop())
        used += number
        return pool.allocate(number)

    for at, (prompt, growth) in enumerate(prompts):
        pages = take(prompt)
        live.append(pages)
        if at >= len(prompts) // 2:
            num_pages += prompt
            num_runs += 1 + sum(b - a != 1 for a, b in pairwise(pages))
        for _ in range(growth if grows else 0):
            page = take(1)
            rng.choice(live or [[]]).extend(page)
    return num_pages / num_runs
