"""Any order of commands and steps: no page is lost or shared by mistake, every stream is right, and everything ends.

The machine is a worker with every kind of sequence at once, on a pool that is too small for them. Many prompts begin
alike, under a few salts; the pool is so small that cached pages are evicted all the time. The KV of reserved sequences
comes from a second engine, page by page and without the pages that are cached already, as in a deployment.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, RuleBasedStateMachine, consumes, initialize, multiple, rule

from pdserve.core.request import FinishReason, Request
from pdserve.engine.batching import BATCHINGS, make_batching
from pdserve.engine.fake import expected_tokens
from pdserve.engine.policies import POLICIES, make_policy
from pdserve.engine.sequence import SequenceState
from pdserve.engine.step import (
    Abort,
    Activate,
    Add,
    Command,
    MarkReserved,
    PageRef,
    PagesReady,
    ReleaseLease,
    ReservationRefused,
    Reserve,
    Reserved,
    SequenceAborted,
    SequenceFailed,
)
from tests.engine.engines import PAGE_SIZE, Engine, Streams, request

NUM_PAGES = 12
SHARED = [tuple(range(20)), (*range(8), *range(100, 112))]
PROMPTS = st.one_of(
    st.lists(st.integers(0, 255), min_size=1, max_size=20),
    st.sampled_from([list(range(PAGE_SIZE * num_pages)) for num_pages in (1, 2, 3)]),  # equal, and all of it full pages
    st.builds(
        lambda shared, num_shared, tail: [*shared[:num_shared], *tail],
        st.sampled_from(SHARED),
        st.integers(1, 20),
        st.lists(st.integers(0, 1), max_size=3),
    ),
)


class EngineMachine(RuleBasedStateMachine):
    """One engine under test and what must be true of it."""

    keys = Bundle("keys")

    @initialize(
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(4, 24),
        fraction=st.sampled_from([0.0, 0.25, 1.0]),
        long_tokens=st.sampled_from([None, 3, 8]),
        policy=st.sampled_from(POLICIES),
        batching=st.sampled_from(BATCHINGS),
        num_host_pages=st.sampled_from([0, 2, 7, 40]),
        min_swapped=st.sampled_from([0, 9]),
    )
    def start(
        self,
        max_num_seqs: int,
        budget: int,
        fraction: float,
        long_tokens: int | None,
        policy: str,
        batching: str,
        num_host_pages: int,
        min_swapped: int,
    ) -> None:
        self.policy = policy
        self.engine = Engine(
            NUM_PAGES,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_unreserved_fraction=fraction,
            long_tokens=long_tokens,
            policy=make_policy(policy, aging_s_per_level=5.0, aging_tokens_per_s=2.0),
            batching=make_batching(batching, max_num_seqs, window_ms=3000),
            num_host_pages=num_host_pages,
            prefer_swap=lambda num_tokens: num_tokens >= min_swapped,
        )
        self.source = Engine(64, policy=make_policy(policy))
        self.streams = Streams()
        self.requests: dict[str, Request] = {}
        self.kind: dict[str, str] = {}
        self.live: set[str] = set()
        self.granted: dict[str, Reserved] = {}
        self.num_forks: dict[str, int] = {}  # of reservations
        self.announced: dict[str, list[PageRef]] = {}
        self.complete: set[str] = set()
        self.unread: set[str] = set()  # ended or released: nobody reads their pages
        self.commands: list[Command] = []

    def new(self, kind: str, prompt: list[int], max_tokens: int, emitted: int, level: int, salt: str = "") -> Request:
        key = f"{kind}{len(self.requests)}"
        r = request(
            key,
            prompt,
            max_tokens + emitted,
            emitted=range(emitted),
            priority=level if self.policy == "priority" else 0,
            tenant=f"tenant {level}",
            arrival_s=float(len(self.requests)),
            cache_salt=salt,
        )
        self.requests[key], self.kind[key] = r, kind
        self.live.add(key)
        return r

    @rule(
        target=keys,
        kind=st.sampled_from(["local", "handoff", "late handoff", "reservation"]),
        prompt=PROMPTS,
        max_tokens=st.integers(1, 20),
        emitted=st.integers(0, 5),
        level=st.sampled_from([0, 0, 1]),
        wait_s=st.integers(0, 20),
        salt=st.sampled_from(["", "", "salt"]),
        num_forks=st.sampled_from([0, 0, 1, 3]),
    )
    def enter(
        self,
        kind: str,
        prompt: list[int],
        max_tokens: int,
        emitted: int,
        level: int,
        wait_s: int,
        salt: str,
        num_forks: int,
    ) -> str:
        max_tokens += kind == "reservation"  # the token that came with the pages is not the last
        r = self.new(kind, prompt, max_tokens, emitted, level, salt)
        if kind == "reservation":
            self.commands.append(Reserve(r, self.engine.now + wait_s))
            self.num_forks[r.key] = num_forks if not emitted else 0
        else:
            self.commands.append(Add(r, handoff=kind != "local", reserved=kind == "handoff"))
        return r.key

    @rule(
        target=keys,
        prompt=PROMPTS,
        members=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 5)), min_size=2, max_size=4),
        level=st.sampled_from([0, 0, 1]),
        salt=st.sampled_from(["", "salt"]),
    )
    def enter_family(
        self, prompt: list[int], members: list[tuple[int, int]], level: int, salt: str
    ) -> MultipleResults[str]:
        """Several sequences of one prompt, each with its own emitted tokens."""
        first, *forks = [self.new("local", prompt, tokens, emitted, level, salt) for tokens, emitted in members]
        self.commands.append(Add(first, forks=tuple(forks)))
        return multiple(first.key, *(f.key for f in forks))

    @rule(target=keys, sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(8, 20)), min_size=2, max_size=4))
    def enter_crowd(self, sizes: list[tuple[int, int]]) -> MultipleResults[str]:
        """Several that grow side by side, and get in each other's way."""
        requests = [self.new("local", list(range(prompt)), tokens, 0, 0) for prompt, tokens in sizes]
        self.commands += map(Add, requests)
        return multiple(*(r.key for r in requests))

    @rule(target=keys, num_pages=st.integers(1, 3), num_tokens=st.integers(30, 44))
    def enter_rivals(self, num_pages: int, num_tokens: int) -> MultipleResults[str]:
        """Equal hand-offs, all of whose pages others may share, and one that takes the pages of some of them."""
        prompt = list(range(PAGE_SIZE * num_pages))
        late = [self.new("late handoff", prompt, 3, 0, 0) for _ in range(2)]
        for r in late:
            self.commands.append(Add(r, handoff=True))
            self.step(2)
        wide = self.new("handoff", list(range(100, 100 + num_tokens)), 3, 0, 0)
        self.commands.append(Add(wide, handoff=True, reserved=True))
        self.step(2)
        return multiple(*(r.key for r in [*late, wide]))

    @rule(key=keys)
    def mark_reserved(self, key: str) -> None:
        self.commands.append(MarkReserved(key))

    @rule(key=consumes(keys))
    def abort(self, key: str) -> None:
        self.commands.append(Abort(key))
        self.granted.pop(key, None)
        self.unread.add(key)

    @rule(key=keys)
    def release(self, key: str) -> None:
        self.commands.append(ReleaseLease(key))
        self.unread.add(key)

    @rule(key=keys)
    def activate(self, key: str) -> None:
        if key in self.granted:
            self.fill(key)

    def fill(self, key: str) -> None:
        """Computes a reserved sequence's prompt on the other engine, copies the pages and activates it."""
        r, reserved = self.requests[key], self.granted.pop(key)
        events = self.source.run(Add(r, handoff=True, reserved=True))
        pages, first = [p for e in events if isinstance(e, PagesReady) for p in e.pages], reserved.num_cached_pages
        self.engine.pull(self.source, pages[first:], reserved.pages[first:])
        self.source.step(ReleaseLease(key))
        if num_forks := self.num_forks[key]:  # all sample their first tokens here
            prompt = list(r.prompt_token_ids)
            forks = [self.new("local", prompt, 1 + i, 0, 0, r.cache_salt) for i in range(num_forks)]
            self.commands.append(Activate(key, None, tuple(forks)))
            return
        self.streams.read(events)
        self.commands.append(Activate(key, self.streams.tokens[key][0]))

    @rule(num_steps=st.integers(1, 12))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.one_step()

    def one_step(self) -> int:
        oldest = next(iter(self.engine.core._scheduler._running), None)
        item = self.engine.step(*self.commands)
        # A hand-off that nobody waits for gives way to one that somebody waits for, whatever else runs.
        assert oldest is None or oldest.unreserved or oldest.state is not SequenceState.WAITING, "preempted"
        self.commands.clear()
        self.engine.now += 1.0
        self.streams.read(item.events)
        for event in item.events:
            if isinstance(event, Reserved):
                self.granted[event.key] = event
            elif isinstance(event, PagesReady):
                pages = self.announced.setdefault(event.key, [])
                assert event.first_page == len(pages)
                pages += event.pages
                if event.complete:
                    self.complete.add(event.key)
            elif isinstance(event, ReservationRefused | SequenceAborted | SequenceFailed):
                assert not isinstance(event, SequenceFailed), event
                self.live.discard(event.key)
        readable = self.announced.keys() - self.unread
        for page in (page for key in readable for page in self.announced[key]):
            assert self.engine.pool.generation(page.page_id) == page.generation, "a reader's page was taken"
        self.check_sharing()
        return item.num_tokens

    def check_sharing(self) -> None:
        """A page that two sequences hold is full, and they agree on its salt and on every token up to its end."""
        owners: dict[int, tuple[str, tuple[int, ...]]] = {}
        for seq in self.engine.core._scheduler._sequences.values():
            for index, page in enumerate(seq.page_table):
                known = tuple(seq.tokens[: (index + 1) * PAGE_SIZE])
                content = (seq.request.cache_salt, known)
                if page in owners:
                    assert owners[page] == content
                    assert len(known) == (index + 1) * PAGE_SIZE, "a partial page is shared"
                owners[page] = content

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(3000):
            for key in list(self.granted):
                self.fill(key)
            leased = [k for k in self.live if self.kind[k].endswith("handoff")]
            self.commands += [c for k in leased for c in (MarkReserved(k), ReleaseLease(k))]
            self.unread.update(leased)
            if self.one_step() == 0 and not self.granted and not self.commands and self.quiet():
                break
        load = self.engine.core.load()
        assert (load.num_running, load.num_waiting, load.num_free_pages) == (0, 0, NUM_PAGES)
        assert load.preemptions.num_free_host_pages == load.preemptions.num_host_pages
        for key in self.live:
            self.check_stream(key)

    def quiet(self) -> bool:
        load = self.engine.core.load()
        return load.num_running == load.num_waiting == 0

    def check_stream(self, key: str) -> None:
        r, kind = self.requests[key], self.kind[key]
        if kind in ("local", "reservation"):
            self.streams.check([r])
            return
        known = (*r.prompt_token_ids, *r.emitted_token_ids)
        assert self.streams.tokens[key] == expected_tokens(known, 1)
        # The first token may end it although pages were announced already: those are leased all the same.
        ends = r.sampling.max_tokens == len(r.emitted_token_ids) + 1
        assert self.streams.finished.get(key) is (FinishReason.LENGTH if ends else None)
        if key in self.complete:
            assert len(self.announced[key]) == -(-len(known) // PAGE_SIZE)


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=60, stateful_step_count=30)
