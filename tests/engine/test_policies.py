"""Scheduling policies: who starts first, for how long anybody can be passed, and what tenants are served."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.request import Request
from pdserve.engine.fair import MAX_IDLE_TENANTS, FairPolicy
from pdserve.engine.lines import Policy
from pdserve.engine.policies import POLICIES, make_policy
from pdserve.engine.sequence import Sequence as EngineSequence
from pdserve.engine.step import (
    Abort,
    Add,
    PrefillStarted,
    Reserve,
    Reserved,
    Runner,
    RunnerOutput,
    SchedulerOutput,
    SequenceFailed,
    TokensSampled,
)
from tests.engine.engines import PAGE_SIZE, Engine, request

LEVEL_S, TOKENS_PER_S = 5.0, 2.0


def policy_of(name: str) -> Policy:
    return make_policy(name, aging_s_per_level=LEVEL_S, aging_tokens_per_s=TOKENS_PER_S)


@dataclass
class Run:
    """What happened on one engine whose steps take a second each."""

    started: list[str] = field(default_factory=list)
    ended_s: dict[str, float] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)  # by tenant: 1 per prompt token, 2 per output token
    widest: float = 0.0  # largest difference of cost between two tenants after a step
    idle_steps: int = 0  # steps with room for tokens and sequences although some waited


class Watched:
    """A runner that says how many sequences the last step had."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.num_seqs = 0

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        self.num_seqs = len(output.sequences)
        return self._runner.execute(output)


def simulate(
    policy: str,
    requests: Sequence[Request],
    *,
    num_pages: int = 64,
    max_num_seqs: int = 2,
    budget: int = 16,
    num_steps: int = 100_000,
) -> Run:
    """Adds each request in the step of its `arrival_s` and runs to the end, or for so many steps."""
    engine = Engine(
        num_pages,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        policy=policy_of(policy),
        prefix_caching=False,  # prompts are alike here, and all are to be paid for
    )
    engine.core._runner = runner = Watched(engine.runner)
    coming = sorted(requests, key=lambda r: r.arrival_s)
    by_key, run = {r.key: r for r in requests}, Run(cost={r.tenant: 0.0 for r in requests})
    while (coming or len(run.ended_s) < len(requests)) and engine.now < num_steps:
        now = [r for r in coming if r.arrival_s <= engine.now]
        coming = coming[len(now) :]
        engine.core.begin_step(map(Add, now))
        result = engine.core.step(engine.now)  # without check(), which costs more than the steps here
        for event in result.events:
            if isinstance(event, PrefillStarted):
                run.started.append(event.key)
                run.cost[by_key[event.key].tenant] += len(by_key[event.key].prompt_token_ids)
            elif isinstance(event, TokensSampled):
                run.cost[by_key[event.key].tenant] += 2
                if event.finish_reason is not None:
                    run.ended_s[event.key] = engine.now
        run.idle_steps += result.load.num_waiting > 0 and runner.num_seqs < max_num_seqs and result.num_tokens < budget
        run.widest = max(run.widest, max(run.cost.values()) - min(run.cost.values()))
        engine.now += 1.0
    return run


def mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def handicap_s(policy: str, r: Request) -> float:
    """Seconds that a request starts behind its arrival, when nothing has ended yet."""
    assert r.sampling.max_tokens is not None
    work = len(r.prompt_token_ids) + 2 * r.sampling.max_tokens
    return {"fcfs": 0.0, "priority": r.priority * LEVEL_S, "sjf": work / TOKENS_PER_S}[policy]


REQUESTS = st.lists(
    st.tuples(st.integers(1, 24), st.integers(1, 12), st.integers(-2, 2), st.integers(0, 3)), min_size=2, max_size=14
)


@settings(max_examples=40, deadline=None)
@given(policy=st.sampled_from(["fcfs", "priority", "sjf"]), shapes=REQUESTS)
def test_nobody_is_overtaken_by_who_comes_later_than_the_bound(
    policy: str, shapes: list[tuple[int, int, int, int]]
) -> None:
    requests, at = [], 0.0
    for i, (prompt, output, priority, gap) in enumerate(shapes):
        at += gap
        level = priority if policy == "priority" else 0
        requests.append(request(str(i), range(prompt), output, priority=level, arrival_s=at))
    by_key = {r.key: r for r in requests}
    # sjf: an estimate that has been learned only lowers the work, so this bound holds for it too.
    least = {"fcfs": 0.0, "priority": -2 * LEVEL_S, "sjf": 1 / TOKENS_PER_S}[policy]
    started = [by_key[key] for key in simulate(policy, requests).started]
    assert len(started) == len(requests)
    for i, mine in enumerate(started):
        for other in started[:i]:
            assert other.arrival_s <= mine.arrival_s + handicap_s(policy, mine) - least


@pytest.mark.parametrize("policy", ["priority", "sjf"])
def test_an_endless_stream_of_better_ones_passes_only_for_as_long_as_the_bound(policy: str) -> None:
    level = 2 if policy == "priority" else 0
    poor = request("poor", range(20), 12, priority=level, arrival_s=0.0)
    stream = [request(f"s{i}", [1], 3, arrival_s=float(i)) for i in range(100)]  # more than one place can take
    run = simulate(policy, [*stream, poor], max_num_seqs=1, num_steps=90)
    at = run.started.index("poor")
    bound_s = handicap_s(policy, poor) - handicap_s(policy, stream[0])
    assert at > 0
    assert max(stream[int(key[1:])].arrival_s for key in run.started[:at]) <= bound_s


@settings(max_examples=30, deadline=None)
@given(policy=st.sampled_from(POLICIES), shapes=REQUESTS, places=st.integers(1, 4))
def test_nothing_waits_while_there_is_room(policy: str, shapes: list[tuple[int, int, int, int]], places: int) -> None:
    requests = [
        request(str(i), range(prompt), output, tenant=str(level), arrival_s=float(i // 2))
        for i, (prompt, output, level, _) in enumerate(shapes)
    ]
    run = simulate(policy, requests, num_pages=200, max_num_seqs=places)
    assert len(run.ended_s) == len(requests)
    assert run.idle_steps == 0


def mixed_trace() -> list[Request]:
    """Three short ones for each long one, at more than the engine can take."""
    rng = random.Random(0)
    shapes = [(rng.randint(30, 60), rng.randint(20, 40)) if i % 4 == 0 else (4, rng.randint(1, 6)) for i in range(60)]
    return [request(str(i), range(p), o, arrival_s=float(i)) for i, (p, o) in enumerate(shapes)]


def test_shortest_job_first_has_the_smaller_mean_latency() -> None:
    trace = mixed_trace()
    latency = {}
    for policy in ("fcfs", "sjf"):
        ended = simulate(policy, trace).ended_s
        latency[policy] = mean(ended[r.key] - r.arrival_s for r in trace)
    assert latency["sjf"] < 0.8 * latency["fcfs"]


def test_sjf_learns_how_long_outputs_are() -> None:
    """max_tokens says 40, but outputs end after one token: then the prompt decides."""
    policy = policy_of("sjf")

    def ranked(key: str, prompt: int, max_tokens: int) -> EngineSequence:
        seq = EngineSequence(request(key, range(prompt), max_tokens), (0.0, 0.0, 0.0), 256, False, False)
        policy.arrive(seq)
        return seq

    asks_for_much, long_prompt = ranked("a", 4, 40), ranked("b", 30, 5)
    assert policy.precedes(long_prompt, asks_for_much)
    for seq in (asks_for_much, long_prompt):
        policy.start(seq)
        seq.admitted = True
        seq.tokens.append(7)
        policy.end(seq)
    assert policy.precedes(ranked("c", 4, 40), ranked("d", 30, 5))


# ---- fair ----------------------------------------------------------------------------------------------------------


def backlog() -> list[Request]:
    """Two tenants with far more than the engine can do: one sends large requests and all before the other's."""
    large = [request(f"a{i}", range(20), 9, tenant="a", arrival_s=0.0) for i in range(60)]
    return large + [request(f"b{i}", range(3), 5, tenant="b", arrival_s=0.0) for i in range(400)]


def test_tenants_that_always_wait_are_served_alike() -> None:
    num_pages = 12
    bound = 2 * max(20, 2 * num_pages * PAGE_SIZE)
    fair, fcfs = (simulate(p, backlog(), num_pages=num_pages, num_steps=200) for p in ("fair", "fcfs"))
    assert min(fair.cost.values()) > 3 * bound  # both have been served for long
    assert fair.widest <= bound < fcfs.widest


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=2, max_size=4),
    places=st.integers(1, 4),
    budget=st.integers(4, 30),
)
def test_the_bound_holds_for_any_tenants(shapes: list[tuple[int, int]], places: int, budget: int) -> None:
    num_pages = 12
    requests = [
        request(f"{t}/{i}", range(prompt), output, tenant=str(t))
        for t, (prompt, output) in enumerate(shapes)
        for i in range(150 // (prompt + output) * 4 + 40)
    ]
    run = simulate("fair", requests, num_pages=num_pages, max_num_seqs=places, budget=budget, num_steps=40)
    assert run.widest <= 2 * max(20, 2 * num_pages * PAGE_SIZE)


@settings(max_examples=60, deadline=None)
@given(
    moves=st.lists(st.tuples(st.sampled_from(["arrive", "start", "abort", "sample"]), st.integers(0, 5)), max_size=60)
)
def test_the_head_is_that_of_the_smallest_counter_whatever_happened(moves: list[tuple[str, int]]) -> None:
    policy = FairPolicy(decode_weight=2.0)
    line, waiting, running = policy.line(), [], []
    for i, (move, at) in enumerate(moves):
        if move == "arrive":
            seq = EngineSequence(request(str(i), range(1 + at), tenant=str(at % 3)), (0.0, 0.0, i), 256, False, False)
            policy.arrive(seq)
            line.push(seq)
            waiting.append(seq)
        elif move == "start" and (head := line.head()) is not None:
            line.remove(head)
            policy.start(head)
            head.admitted = True
            waiting.remove(head)
            running.append(head)
        elif move == "abort" and waiting:
            gone = waiting.pop(at % len(waiting))
            line.remove(gone)
            policy.end(gone)
        elif move == "sample" and running:
            policy.sampled(running[at % len(running)])
        assert len(line) == len(waiting) and set(line) == set(waiting)
        first = line.head()
        assert (first is None) == (not waiting)
        assert all(first is seq or policy.precedes(first, seq) for seq in waiting if first is not None)


def test_a_tenant_cannot_save_up_while_it_is_idle() -> None:
    busy = [request(f"busy{i}", range(8), 4, tenant="busy", arrival_s=0.0) for i in range(40)]
    back = [request(f"back{i}", range(8), 4, tenant="back", arrival_s=60.0) for i in range(10)]
    started = simulate("fair", busy + back, max_num_seqs=1).started
    first = started.index("back0")
    assert [key[:4] for key in started[first : first + 8]] == ["back", "busy"] * 4


def test_endless_new_tenants_do_not_pass_one_that_waits() -> None:
    """`old` has been served more than the new ones when it comes back; each new one would be the smallest counter."""
    old = [request(f"old{i}", range(20), 8, tenant="old", arrival_s=0.0) for i in range(2)]
    new = [request(f"new{i}", [1], 3, tenant=f"new{i}", arrival_s=float(i)) for i in range(150)]
    started = simulate("fair", old + new, max_num_seqs=1, num_steps=140).started
    assert started.index("old1") < 60


def test_what_the_prefix_cache_has_is_not_charged() -> None:
    policy = FairPolicy(decode_weight=2.0)
    engine = Engine(32, policy=policy)
    engine.run(Add(request("first", range(16), 1, tenant="a")))
    assert policy.counters() == {"a": 16 + 2}
    engine.run(Add(request("again", range(16), 1, tenant="a")))
    assert policy.counters() == {"a": 16 + 2 + 4 + 2}  # the last page is computed again


def test_reservations_are_granted_in_turn() -> None:
    engine = Engine(12, max_num_seqs=8, policy=policy_of("fair"))
    reserves = [Reserve(request(f"{t}{i}", range(8), 9, tenant=t), 99.0) for t in "ab" for i in range(3)]
    granted = [e.key for e in engine.step(*reserves).events if isinstance(e, Reserved)]
    assert granted == ["a0", "b0", "a1", "b1"]


def test_few_idle_tenants_are_remembered_and_those_with_the_most_to_lose() -> None:
    policy = FairPolicy(decode_weight=2.0)

    def arrives(tenant: str, prompt: int) -> EngineSequence:
        seq = EngineSequence(request(tenant, range(prompt), 4, tenant=tenant), (0.0, 0.0, 0.0), 256, False, False)
        policy.arrive(seq)
        return seq

    arrives("waits", 1)  # so that the others are lifted no higher than it
    for i in range(5 * MAX_IDLE_TENANTS):
        seq = arrives(str(i), 60 if i == 7 else 1)
        policy.start(seq)
        seq.admitted = True
        policy.end(seq)
    counters = policy.counters()
    assert len(counters) <= 2 * MAX_IDLE_TENANTS + 1
    assert counters["7"] == 60 and "waits" in counters


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "priority"), [("fcfs", 1), ("sjf", -1), ("fair", 1), ("priority", 101)])
def test_a_priority_that_is_not_honoured_is_refused(policy: str, priority: int) -> None:
    engine = Engine(8, policy=policy_of(policy))
    (failure,) = engine.step(Add(request("a", [1], priority=priority))).events
    assert isinstance(failure, SequenceFailed)
    assert (failure.status, failure.reason) == ("INVALID_ARGUMENT", "UNSUPPORTED_PARAMETER")
    assert "priority" in failure.message


def test_a_prompt_that_is_aborted_costs_what_was_computed_of_it() -> None:
    engine = Engine(64, max_num_batched_tokens=8, max_num_seqs=1, policy=(policy := FairPolicy(decode_weight=2.0)))
    engine.step(Add(request("gone", range(40), tenant="a")))
    engine.step(Abort("gone"))
    assert policy.counters() == {"a": 40}  # of which 32 are credit
    engine.run(Add(request("next", range(50, 70), 3, tenant="a")))
    assert policy.counters() == {"a": 40}  # 20 and 3 * 2 are paid by it
    engine.run(Add(request("last", range(100, 120), 1, tenant="a")))
    assert policy.counters() == {"a": 40 + 16}
