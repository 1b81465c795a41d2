"""Who is chosen."""

from __future__ import annotations

import itertools
import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.request import Role
from pdserve.router.policy import Ask, Draw, Route, least_loaded
from pdserve.router.worker_table import WorkerLoad, WorkerTable, can_pair
from tests.router.test_worker_table import facts, table

ASK = Ask(prompt_tokens=10)


def choose(t: WorkerTable, ask: Ask = ASK, draw: Draw = lambda n: 0, **options: bool) -> Route | None:
    return least_loaded(**options).choose(ask, t.pool(), draw)


def pair_table() -> WorkerTable:
    return table(*(facts(f"{r.value[0]}{i}", r) for r in (Role.PREFILL, Role.DECODE) for i in range(3)))


def drawn(t: WorkerTable, num_routers: int) -> Counter[tuple[str, ...]]:
    """What routers choose that know the same of the workers and nothing of each other."""
    routes = [choose(t, draw=random.Random(seed).randrange) for seed in range(num_routers)]
    return Counter(route.worker_ids for route in routes if route is not None)


def test_routers_that_know_the_same_spread_over_equal_workers() -> None:
    counts = drawn(pair_table(), 900)
    assert set(counts) == set(itertools.product(("p0", "p1", "p2"), ("d0", "d1", "d2")))
    assert min(counts.values()) > 50, "each of the nine pairs is expected 100 times"


def test_only_workers_that_score_the_same_are_drawn() -> None:
    t = pair_table()
    t.loaded("p1", WorkerLoad(num_pending_prefill_tokens=1, num_free_pages=64))
    t.loaded("d0", WorkerLoad(num_free_pages=63))
    assert set(drawn(t, 100)) == {(p, d) for p in ("p0", "p2") for d in ("d1", "d2")}


def test_nothing_is_drawn_without_a_tie() -> None:
    def draw(n: int) -> int:
        raise AssertionError("drawn")

    t = table(facts("p0", Role.PREFILL), facts("d0", Role.DECODE), facts("d1", Role.DECODE))
    t.placed("d0", "r/1", 0)
    assert choose(t, draw=draw) is not None


def test_prefill_by_pending_tokens_decode_by_sequences_then_pages() -> None:
    t = pair_table()
    t.loaded("p0", WorkerLoad(num_pending_prefill_tokens=10))
    t.placed("p1", "r/1", 5)
    t.loaded("d0", WorkerLoad(num_running=2, num_free_pages=64))
    t.loaded("d1", WorkerLoad(num_running=1, num_free_pages=10))
    t.loaded("d2", WorkerLoad(num_running=1, num_free_pages=20))
    route = choose(t)
    assert route is not None
    assert route.worker_ids == ("p2", "d2")


def test_a_worker_that_refused_is_last_but_not_lost() -> None:
    t = pair_table()
    t.loaded("d1", WorkerLoad(num_running=9))
    route = choose(t, Ask(prompt_tokens=10, avoid=frozenset({"d0", "d2"})))
    assert route is not None
    assert route.decode.worker_id == "d1"
    only = table(facts("p0", Role.PREFILL), facts("d0", Role.DECODE))
    assert choose(only, Ask(prompt_tokens=10, avoid=frozenset({"d0"}))) is not None


def test_prefill_without_a_fitting_decode_is_skipped() -> None:
    t = table(
        facts("p0", Role.PREFILL, page_size=32),
        facts("p1", Role.PREFILL),
        facts("d0", Role.DECODE),
        facts("d1", Role.DECODE, page_size=32, num_pages=1),
    )
    route = choose(t, Ask(prompt_tokens=100))
    assert route is not None
    assert route.worker_ids == ("p1", "d0"), "d1 is too small, so p0 has no partner"


def test_prompt_that_fits_nowhere_has_no_route() -> None:
    t = table(facts("p0", Role.PREFILL), facts("d0", Role.DECODE, num_pages=2))
    assert choose(t, Ask(prompt_tokens=31)) is not None
    assert choose(t, Ask(prompt_tokens=32)) is None


def test_mixed_worker_competes_with_pairs() -> None:
    t = table(facts("p0", Role.PREFILL), facts("d0", Role.DECODE), facts("m0", Role.MIXED))
    assert choose(t) == Route(facts("p0", Role.PREFILL), facts("d0", Role.DECODE))
    t.placed("p0", "r/1", 100)
    assert choose(t) == Route(None, facts("m0", Role.MIXED))


def test_decode_prefills_itself_only_when_allowed_and_alone() -> None:
    t = table(facts("d0", Role.DECODE))
    assert choose(t) is None
    assert choose(t, decode_prefills=True) == Route(None, facts("d0", Role.DECODE))
    t.connected(facts("p0", Role.PREFILL))
    route = choose(t, decode_prefills=True)
    assert route is not None
    assert route.prefill is not None


@given(
    st.lists(st.tuples(st.sampled_from(list(Role)), st.sampled_from([16, 32]), st.integers(0, 99)), max_size=8),
    st.integers(1, 2000),
    st.randoms(),
)
def test_a_route_is_always_able(workers: list[tuple[Role, int, int]], tokens: int, rng: random.Random) -> None:
    t = WorkerTable("m")
    for i, (role, page_size, load) in enumerate(workers):
        t.connected(facts(f"w{i}", role, page_size=page_size))
        t.loaded(f"w{i}", WorkerLoad(num_running=load, num_free_pages=64, num_pending_prefill_tokens=load))
    route = choose(t, Ask(prompt_tokens=tokens), rng.randrange)
    assert least_loaded().can_route(Ask(prompt_tokens=tokens), t.pool()) == (route is not None)
    if route is None:
        return
    assert all(t.live(w) for w in route.worker_ids)
    if route.prefill is not None:
        assert (route.prefill.role, route.decode.role) == (Role.PREFILL, Role.DECODE)
        assert can_pair(route.prefill, route.decode)
    else:
        assert route.decode.role is Role.MIXED
