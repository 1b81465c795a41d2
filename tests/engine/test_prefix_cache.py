"""PrefixCache: what is found is what was published, and sequences that share pages compute less and say the same."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import pytest

from pdserve.core.request import FinishReason
from pdserve.engine.fake import expected_tokens
from pdserve.engine.page_pool import PagePool, PageState
from pdserve.engine.prefix_cache import PrefixCache
from pdserve.engine.step import (
    Abort,
    Activate,
    Add,
    Event,
    MarkReserved,
    PagesReady,
    PrefillStarted,
    ReleaseLease,
    Reserve,
    Reserved,
    RunnerOutput,
    SamplingFailure,
    SchedulerOutput,
    SequenceFailed,
    StepEvents,
    TokensSampled,
)
from tests.engine.engines import Engine, Streams, request


def cache_of(num_pages: int, identity: bytes = b"model") -> tuple[PagePool, PrefixCache]:
    pool = PagePool(num_pages)
    return pool, PrefixCache(pool, 4, identity)


def digests(cache: PrefixCache, tokens: Sequence[int], salt: str = "") -> list[bytes]:
    chain: list[bytes] = []
    cache.digest(chain, len(tokens) // 4 - 1, tokens, salt)
    return chain


def publish(pool: PagePool, cache: PrefixCache, tokens: Sequence[int], salt: str = "") -> list[int]:
    pages = pool.allocate(len(tokens) // 4)
    for digest, page in zip(digests(cache, tokens, salt), pages, strict=True):
        cache.publish(digest, page)
    return pages


def test_the_digest_is_a_sha256_chain_over_identity_salt_and_tokens() -> None:
    def sha256(data: bytes) -> bytes:
        return hashlib.sha256(data).digest()

    _, cache = cache_of(1)
    root = sha256(sha256(b"model") + "sält".encode())
    first = sha256(root + struct.pack("<4I", 1, 2, 3, 2**32 - 1))
    second = sha256(first + struct.pack("<4I", 5, 6, 7, 8))
    assert digests(cache, [1, 2, 3, 2**32 - 1, 5, 6, 7, 8, 9], "sält") == [first, second]


def test_digests_differ_when_anything_before_their_end_differs() -> None:
    _, cache = cache_of(1)
    _, other_model = cache_of(1, b"another model")
    tokens = list(range(8))
    chains = [digests(cache, tokens), digests(cache, tokens, "salt"), digests(other_model, tokens)]
    chains += [digests(cache, [*tokens[:i], 99, *tokens[i + 1 :]]) for i in range(8)]
    assert len({chain[1] for chain in chains}) == len(chains)
    assert len({chain[0] for chain in chains}) == len(chains) - 4  # the last four begin like the first


def test_leading_pages_are_found_until_the_first_that_is_not_there() -> None:
    pool, cache = cache_of(8)
    pages = publish(pool, cache, range(12))
    assert cache.match([], range(12), "", 3) == pages
    assert cache.match([], range(12), "", 2) == pages[:2]
    assert cache.match([], [*range(8), 0, 0, 0, 0], "", 3) == pages[:2]
    assert cache.match([], [9, *range(1, 12)], "", 3) == []
    assert cache.match([], range(12), "salt", 3) == []
    cache.forget(pages[1])
    assert cache.match([], range(12), "", 3) == pages[:1]
    pool.release(pages)
    assert [pool.state(p) for p in pages] == [PageState.CACHED, PageState.FREE, PageState.CACHED]
    cache.check()


def test_an_evicted_page_is_never_found_whatever_it_becomes() -> None:
    pool, cache = cache_of(2)
    pages = publish(pool, cache, range(8))
    pool.release(pages)
    assert pool.allocate(1) == [pages[1]]
    assert cache.match([], range(8), "", 2) == pages[:1]
    cache.publish(digests(cache, range(50, 58))[0], pages[1])
    assert cache.match([], range(8), "", 2) == pages[:1]
    assert cache.match([], range(50, 58), "", 1) == pages[1:]
    cache.check()


def test_the_first_published_of_equal_pages_stays_until_it_is_evicted() -> None:
    pool, cache = cache_of(2)
    (first,) = publish(pool, cache, range(4))
    (second,) = publish(pool, cache, range(4))
    assert cache.match([], range(4), "", 1) == [first]
    pool.release([second])
    assert pool.state(second) is PageState.FREE
    pool.release([first])
    pool.release(pool.allocate(2))  # evicts the first
    (third,) = publish(pool, cache, range(4))
    cache.publish(digests(cache, range(8))[1], *pool.allocate(1))
    assert cache.match([], range(8), "", 2)[0] == third
    cache.check()


# ---- in an engine ----------------------------------------------------------------------------------------------------


def num_computed(engine: Engine, *commands: Add) -> tuple[int, list[Event]]:
    """Runs some requests; prompt and output tokens computed, and the events."""
    items: list[StepEvents] = [engine.step(*commands)]
    while items[-1].num_tokens:
        items.append(engine.step())
    return sum(i.num_tokens for i in items), [e for i in items for e in i.events]


def num_cached(events: Sequence[Event], key: str) -> int:
    (first, *others) = [e.num_cached_tokens for e in events if isinstance(e, TokensSampled) and e.key == key]
    assert set(others) <= {first}
    return first


def test_the_turns_of_a_conversation_compute_only_what_is_new() -> None:
    engine, known = Engine(64), list(range(10))
    for turn in range(5):
        r = request(f"turn{turn}", known, 7)
        computed, events = num_computed(engine, Add(r))
        streams = Streams(events)
        streams.check([r])
        # Known before: the prompt and answer of the turn before but its last token, in whole pages.
        reused = (len(known) - 4) // 4 * 4 if turn else 0
        assert num_cached(events, r.key) == reused
        assert computed == len(known) + 6 - reused
        known += [*streams.tokens[r.key], *range(turn, turn + 3)]
    load = engine.core.load()
    assert load.num_free_pages == load.num_pages
    assert load.num_prefix_hit_tokens == sum(((10 * (n + 1)) - 4) // 4 * 4 for n in range(1, 5))
    assert load.num_prefix_queried_tokens == 10 + 20 + 30 + 40 + 50


@pytest.mark.parametrize("num_prompt", [1, 4, 5, 8, 9])
def test_one_token_of_a_repeated_prompt_is_always_computed(num_prompt: int) -> None:
    engine = Engine(16)
    first, second = request("a", range(num_prompt), 6), request("b", range(num_prompt), 6)
    Streams(engine.run(Add(first))).check([first])
    computed, events = num_computed(engine, Add(second))
    Streams(events).check([second])
    assert num_cached(events, "b") == (num_prompt - 1) // 4 * 4
    assert computed == num_prompt + 5 - num_cached(events, "b")


@pytest.mark.parametrize(("salt", "hits"), [("", 0), ("mine", 16), ("other", 0)])
def test_only_equal_salts_share(salt: str, hits: int) -> None:
    engine = Engine(32)
    engine.run(Add(request("a", range(17), cache_salt="mine")))
    assert num_cached(engine.run(Add(request("b", range(17), cache_salt=salt))), "b") == hits


def test_without_a_cache_nothing_is_kept() -> None:
    engine = Engine(32, prefix_caching=False)
    engine.run(Add(request("a", range(17))))
    assert engine.pool.count(PageState.FREE) == 32
    assert num_cached(engine.run(Add(request("b", range(17)))), "b") == 0
    assert engine.core.load().num_prefix_queried_tokens == 0


def test_pages_are_shared_while_their_owner_runs_and_outlive_it() -> None:
    engine = Engine(16, max_num_batched_tokens=64)
    owner, late = request("owner", range(21), 4), request("late", [*range(16), 5], 12, arrival_s=1.0)
    streams = Streams(engine.step(Add(owner)).events)
    events = engine.step(Add(late)).events
    streams.read(events)
    assert num_cached(events, "late") == 16
    assert engine.pool.count(PageState.HELD) == 6 + 1  # four shared, two of the owner's, one of its own
    streams.read(engine.run())
    streams.check([owner, late])


def test_what_is_cached_makes_room_for_a_prompt_that_would_not_fit_beside_its_owner() -> None:
    engine = Engine(8, max_num_batched_tokens=64)
    owner, sharer = request("owner", range(20), 3), request("sharer", range(21), 3, arrival_s=1.0)
    streams = Streams(engine.step(Add(owner)).events)
    streams.read(engine.step(Add(sharer)).events)
    assert engine.core.load().num_running == 2  # eleven pages without sharing
    streams.read(engine.run())
    streams.check([owner, sharer])


def test_a_preempted_sequence_finds_its_pages_again_and_they_count_once() -> None:
    engine = Engine(9, max_num_seqs=2)
    old, new = request("old", range(8), 24, arrival_s=0.0), request("new", range(50, 58), 16, arrival_s=1.0)
    computed, events = num_computed(engine, Add(old), Add(new))
    Streams(events).check([old, new])
    assert num_cached(events, "new") == 0
    assert engine.core.load().num_prefix_hit_tokens == 0
    alone = Engine(9, max_num_seqs=2, prefix_caching=False)
    assert computed < num_computed(alone, Add(old), Add(new))[0]


def test_prefill_announces_cached_pages_at_once() -> None:
    engine = Engine(32, max_num_batched_tokens=8)
    engine.run(Add(request("a", range(17)), handoff=True, reserved=True), ReleaseLease("a"))
    events = engine.step(Add(request("b", range(30)), handoff=True, reserved=True)).events
    (first, second) = [e for e in events if isinstance(e, PagesReady)]
    assert (first.first_page, len(first.pages), first.complete) == (0, 4, False)
    assert (second.first_page, len(second.pages)) == (4, 2)
    assert events.index(first) < next(i for i, e in enumerate(events) if isinstance(e, PrefillStarted))

    engine.step(Add(request("late", range(17)), handoff=True))
    (whole,) = [e for e in engine.run(MarkReserved("late")) if isinstance(e, PagesReady) and e.key == "late"][:1]
    assert whole.first_page == 0 and whole.pages[:4] == first.pages  # leased twice at the same time
    engine.step(ReleaseLease("b"))
    assert all(engine.pool.generation(p.page_id) == p.generation for p in whole.pages)
    engine.step(ReleaseLease("late"))
    assert engine.pool.num_free == 32


@pytest.mark.parametrize(("num_prompt", "num_cached_pages"), [(16, 4), (18, 4), (15, 3)])
def test_decode_asks_only_for_the_pages_that_it_has_not(num_prompt: int, num_cached_pages: int) -> None:
    prefill, decode = Engine(32), Engine(32)
    streams, requests = Streams(), [request(k, range(num_prompt), 6) for k in "ab"]
    for r, cached in zip(requests, (0, num_cached_pages), strict=True):
        (reserved,) = [e for e in decode.step(Reserve(r, 5.0)).events if isinstance(e, Reserved)]
        assert (reserved.num_cached_pages, len(reserved.pages)) == (cached, -(-num_prompt // 4))
        events = prefill.run(Add(r, handoff=True, reserved=True))
        pages = [p for e in events if isinstance(e, PagesReady) for p in e.pages]
        decode.pull(prefill, pages[cached:], reserved.pages[cached:])
        streams.read(events)
        events = decode.run(Activate(r.key, streams.tokens[r.key][0]))
        assert num_cached(events, r.key) == 0
        streams.read(events)
        prefill.step(ReleaseLease(r.key))
    streams.check(requests)
    assert (decode.pool.num_free, prefill.pool.num_free) == (32, 32)


def test_a_reservation_that_ends_gives_its_cached_pages_back_to_the_cache() -> None:
    engine = Engine(8)
    engine.run(Add(request("a", range(9))))
    before = engine.pool.count(PageState.CACHED)
    (reserved,) = [e for e in engine.step(Reserve(request("b", range(9)), 5.0)).events if isinstance(e, Reserved)]
    assert reserved.num_cached_pages == 2
    assert (engine.pool.count(PageState.HELD), engine.pool.count(PageState.FILLING)) == (2, 2)
    engine.step(Abort("b"))
    assert engine.pool.count(PageState.CACHED) == before and engine.pool.num_free == 8
    assert num_cached(engine.run(Add(request("c", range(9)))), "c") == 8


def test_pages_that_were_not_validated_are_not_shared() -> None:
    engine = Engine(16)
    engine.step(Reserve(request("a", range(9)), 5.0))
    r = request("b", range(9))
    events = engine.run(Add(r))
    assert num_cached(events, "b") == 0
    Streams(events).check([r])
    engine.step(Abort("a"))


class OneFailure:
    """A runner whose first sampled token cannot be chosen."""

    def __init__(self, engine: Engine) -> None:
        self._runner, self._failed = engine.runner, False
        engine.core._runner = self

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        result = self._runner.execute(output)
        if self._failed or result.sampled[0] is None:
            return result
        self._failed = True
        return RunnerOutput((SamplingFailure("BAD_LOGITS", "no token", kv_suspect=True),))


def test_the_kv_of_a_sequence_whose_logits_were_bad_is_not_shared() -> None:
    engine = Engine(16, max_num_batched_tokens=8)
    OneFailure(engine)
    engine.run(Add(request("bad", range(18))))
    assert engine.pool.count(PageState.FREE) == 16
    r = request("good", range(18))
    events = engine.run(Add(r))
    assert num_cached(events, "good") == 0
    Streams(events).check([r])


def test_parameters_that_leave_no_token_take_no_page_from_a_shared_prefix() -> None:
    engine = Engine(16)
    engine.run(Add(request("first", range(18))))
    bad = request("bad", range(18), allowed_token_ids=[7], stop_token_ids=[7], min_tokens=1)
    assert [e.reason for e in engine.run(Add(bad)) if isinstance(e, SequenceFailed)] == ["NO_TOKEN_LEFT"]
    assert num_cached(engine.run(Add(request("next", range(18)))), "next") == 16


def test_forks_do_not_share_a_prompt_whose_logits_were_bad() -> None:
    engine = Engine(32, max_num_batched_tokens=64)
    OneFailure(engine)
    bad, *others = requests = [request(key, range(18)) for key in "abc"]
    assert engine.step(Add(bad, forks=tuple(others))).num_tokens == 18
    second = engine.step()
    assert second.num_tokens == 18  # the first fork computes the prompt itself
    Streams([*second.events, *engine.run()]).check(requests[1:])
    assert engine.pool.num_free == 32


def test_tokens_sampled_before_a_retry_are_reused_but_are_no_prompt_tokens() -> None:
    engine = Engine(16)
    emitted = expected_tokens(range(6), 6)
    engine.run(Add(request("first", range(6), 7)))
    r = request("second", range(6), 9, emitted=emitted)
    computed, events = num_computed(engine, Add(r))
    assert Streams(events).finished[r.key] is FinishReason.LENGTH
    Streams(events).check([r])
    assert num_cached(events, r.key) == 6
    assert computed == 12 + 2 - 8


def test_a_requeued_hand_off_that_has_sampled_computes_a_token_of_its_prompt_again() -> None:
    engine = Engine(16)
    a, b = (Add(request(key, range(8)), handoff=True) for key in "ab")
    engine.step(a)
    engine.step(b)
    events = [*engine.step(Add(request("r", range(100, 156)), handoff=True, reserved=True)).events]
    events += engine.run(ReleaseLease("r"), MarkReserved("b"), MarkReserved("a"))
    assert not [e for e in events if isinstance(e, SequenceFailed)]
    assert sum(len(e.pages) for e in events if isinstance(e, PagesReady) and e.key in "ab") == 4
    engine.run(ReleaseLease("a"), ReleaseLease("b"))
    assert engine.pool.num_free == 16
