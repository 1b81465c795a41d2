"""Log-probabilities of the prompt: each position once, in order, before the first token, whatever happens meanwhile."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from pdserve.core.request import Request
from pdserve.engine.step import Abort, Add, Event, MarkReserved, PromptLogprobs, TokensSampled
from tests.engine.engines import Engine, request


def check_told(events: Iterable[Event], asked: Request) -> None:
    """Reads the events of one request; it has sampled tokens."""
    positions: list[int] = []
    sampled = False
    for event in events:
        if isinstance(event, PromptLogprobs) and event.key == asked.key:
            assert not sampled and event.logprobs
            positions += range(event.first, event.first + len(event.logprobs))
            told = [p.chosen.token_id for p in event.logprobs]
            assert told == list(asked.prompt_token_ids[event.first : event.first + len(told)])
        sampled |= isinstance(event, TokensSampled) and event.key == asked.key
    assert sampled
    assert positions == list(range(1, len(asked.prompt_token_ids)))


@pytest.mark.parametrize("length", [1, 2, 4, 5, 40])
@pytest.mark.parametrize("budget", [4, 7, 64])
def test_chunks(length: int, budget: int) -> None:
    asked, plain = request("a", range(length), prompt_logprobs=1), request("b", range(length))
    events = Engine(64, max_num_batched_tokens=budget).run(Add(plain), Add(asked))
    check_told(events, asked)
    assert {e.key for e in events if isinstance(e, PromptLogprobs)} <= {"a"}


@pytest.mark.parametrize("num_host_pages", [0, 8])
def test_preemption_tells_nothing_twice(num_host_pages: int) -> None:
    requests = [request(f"r{i}", range(i, i + 7), 24, prompt_logprobs=0) for i in range(4)]
    engine = Engine(12, max_num_batched_tokens=5, num_host_pages=num_host_pages)
    events = engine.run(*map(Add, requests))
    preemptions = engine.core.load().preemptions
    assert preemptions
    for r in requests:
        check_told(events, r)


def test_an_unreserved_handoff_that_is_requeued_in_the_middle_of_its_prompt() -> None:
    engine = Engine(8, max_num_batched_tokens=8, max_unreserved_fraction=1.0)
    late, first = request("late", range(24), prompt_logprobs=0), request("first", range(30, 58), prompt_logprobs=0)
    events = [*engine.step(Add(late, handoff=True)).events]
    assert any(isinstance(e, PromptLogprobs) for e in events)
    events += engine.run(Add(first, handoff=True), MarkReserved("first"))
    check_told(events, first)
    events += engine.run(Abort("first"), MarkReserved("late"))
    check_told(events, late)


def test_a_retry_with_emitted_tokens_tells_the_prompt_alone() -> None:
    asked = request("a", range(9), 8, emitted=[3, 4, 5], prompt_logprobs=0)
    check_told(Engine(16, max_num_batched_tokens=5).run(Add(asked)), asked)


def test_of_several_choices_the_first_tells() -> None:
    first, *forks = request("a", range(9), 4, n=3, prompt_logprobs=0).choices()
    events = Engine(32).run(Add(first, forks=tuple(forks)))
    check_told(events, first)
    assert {e.key for e in events if isinstance(e, PromptLogprobs)} == {"a"}


def test_a_cached_prefix_is_computed_again() -> None:
    asked, again = request("a", range(21), prompt_logprobs=0), request("b", range(21))
    engine = Engine(32, max_num_batched_tokens=7, prefix_caching=True)
    engine.run(Add(again))
    check_told(engine.run(Add(asked)), asked)
    [first, *_] = [e for e in engine.run(Add(request("c", range(21)))) if isinstance(e, TokensSampled)]
    assert first.num_cached_tokens == 20
