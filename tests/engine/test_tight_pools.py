"""Pools that hold exactly one sequence, prompts around the borders of pages: everything ends, and ends right."""

from __future__ import annotations

import itertools

import pytest

from pdserve.engine.batching import BATCHINGS, make_batching
from pdserve.engine.policies import POLICIES, make_policy
from pdserve.engine.step import Activate, Add, PagesReady, ReleaseLease, Reserve, Reserved
from tests.engine.engines import PAGE_SIZE, Engine, Streams, request


def empty(engine: Engine) -> bool:
    load = engine.core.load()
    return (load.num_running, load.num_waiting, load.num_free_pages) == (0, 0, load.num_pages)


@pytest.mark.parametrize("batching", BATCHINGS)
@pytest.mark.parametrize("num_pages", [1, 2, 3])
def test_one_sequence_at_a_time(num_pages: int, batching: str) -> None:
    """Each prompt length, to the last token that fits, beside another request of the same size and with forks."""
    size = num_pages * PAGE_SIZE
    variants = itertools.cycle(itertools.product((0, 20), POLICIES))
    for length, (num_host_pages, policy) in zip((*range(1, size), size - 1), variants, strict=False):
        engine = Engine(
            num_pages,
            max_model_len=size,
            num_host_pages=num_host_pages,
            policy=make_policy(policy),
            batching=make_batching(batching, 4, window_ms=0),
        )
        leader, *forks = family = [request(f"f{i}", range(length), size - length - i % 2 or 1) for i in range(3)]
        rival = request("rival", range(length), size - length, tenant="other")
        Streams(engine.run(Add(leader, forks=tuple(forks)), Add(rival))).check([*family, rival])
        assert empty(engine)


@pytest.mark.parametrize("num_pages", [1, 2, 3])
@pytest.mark.parametrize("num_forks", [0, 2])
def test_pulled_prompts(num_pages: int, num_forks: int) -> None:
    """Two reservations of which the pool holds one; with forks all first tokens are sampled here."""
    size = num_pages * PAGE_SIZE
    for num_host_pages, length in itertools.product((0, 20), range(1, size - 1)):
        engine, source = Engine(num_pages, max_model_len=size, num_host_pages=num_host_pages), Engine(16)
        first, second = [request(key, range(length), size - length) for key in ("a", "b")]
        streams, every = Streams(), [first, second]
        granted = [e for e in engine.step(Reserve(first, 9.0), Reserve(second, 9.0)).events if isinstance(e, Reserved)]
        while granted:
            reserved = granted.pop()
            r = first if reserved.key == "a" else second
            computed = source.run(Add(r, handoff=True, reserved=True))
            pages = [page for e in computed if isinstance(e, PagesReady) for page in e.pages]
            skip = reserved.num_cached_pages
            engine.pull(source, pages[skip:], reserved.pages[skip:])
            source.step(ReleaseLease(r.key))
            if num_forks:
                forks = [request(f"{r.key}{i}", range(length), size - length) for i in range(num_forks)]
                every += forks
                events = engine.run(Activate(r.key, None, tuple(forks)))
            else:
                streams.read(computed)
                events = engine.run(Activate(r.key, streams.tokens[r.key][0]))
            streams.read(events)
            granted += [e for e in events if isinstance(e, Reserved)]
        streams.check(every)
        assert empty(engine)
