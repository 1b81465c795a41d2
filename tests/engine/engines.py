"""Small engines on the fake runner, and a reader of their events that checks every stream against the oracle."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from pdserve.core.request import FinishReason, Request
from pdserve.core.sampling import SamplingParams
from pdserve.engine.batching import Batching
from pdserve.engine.chunks import SchedulerLimits
from pdserve.engine.device import PageStaging
from pdserve.engine.engine_core import EngineCore
from pdserve.engine.fake import FAKE_EOS, FakeRunner, expected_tokens, fake_layout
from pdserve.engine.lines import Policy
from pdserve.engine.page_pool import PagePool
from pdserve.engine.prefix_cache import PrefixCache
from pdserve.engine.step import Command, Event, PageRef, Reserved, StepEvents, TokensSampled
from pdserve.engine.swap import PreferSwap, SwapSpace

PAGE_SIZE = 4
LAYOUT = fake_layout(PAGE_SIZE)


def request(
    key: str,
    prompt: Iterable[int],
    max_tokens: int = 8,
    *,
    emitted: Sequence[int] = (),
    priority: int = 0,
    tenant: str = "",
    arrival_s: float = 0.0,
    ignore_eos: bool = False,
    cache_salt: str = "",
    **sampling: Any,
) -> Request:
    """A greedy request; other keywords are sampling parameters."""
    return Request(
        key=key,
        prompt_token_ids=tuple(prompt),
        emitted_token_ids=tuple(emitted),
        sampling=SamplingParams(
            temperature=0,
            seed=0,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            **sampling,
        ),
        eos_token_ids=frozenset({FAKE_EOS}),
        priority=priority,
        tenant=tenant,
        arrival_s=arrival_s,
        cache_salt=cache_salt,
    )


class Engine:
    """An EngineCore with its memory; every step is followed by `check()`. By default all that can be is swapped."""

    def __init__(
        self,
        num_pages: int,
        *,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 16,
        max_model_len: int = 256,
        max_unreserved_fraction: float = 0.25,
        long_tokens: int | None = None,
        max_num_long: int = 1,
        eos_period: int | None = None,
        policy: Policy | None = None,
        batching: Batching | None = None,
        num_host_pages: int = 0,
        prefer_swap: PreferSwap = lambda _: True,
        prefix_caching: bool = True,
        staged: bool = False,
    ) -> None:
        self.pool = PagePool(num_pages)
        self.memory = memoryview(bytearray(num_pages * LAYOUT.page_bytes))
        limits = SchedulerLimits(
            page_size=PAGE_SIZE,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            least_tokens=PAGE_SIZE,
            max_unreserved_fraction=max_unreserved_fraction,
            long_tokens=long_tokens,
            max_num_long=max_num_long,
        )
        self.host_memory = memoryview(bytearray(num_host_pages * LAYOUT.page_bytes))
        device, staging = self.memory, None
        if staged:  # `memory` is what others read and write, the steps are computed elsewhere
            device = memoryview(bytearray(b"\x5a" * (num_pages * LAYOUT.page_bytes)))
            staging = PageStaging(
                *(torch.frombuffer(m, dtype=torch.uint8).view(num_pages, -1) for m in (device, self.memory))
            )
        self.runner = FakeRunner(device, LAYOUT, eos_period, self.host_memory)
        swap = SwapSpace(num_host_pages, PAGE_SIZE, LAYOUT.page_bytes, prefer_swap)
        self.cache = PrefixCache(self.pool, PAGE_SIZE) if prefix_caching else None
        self.core = EngineCore(limits, self.pool, self.runner, policy, batching, swap, self.cache, staging)
        self.now = 0.0

    def step(self, *commands: Command) -> StepEvents:
        """One step after some commands."""
        self.core.begin_step(commands)
        early = self.core.schedule(self.now)
        for event in early.events:  # another process may write the pages of a reservation from now on
            for page in event.pages[event.num_cached_pages :] if isinstance(event, Reserved) else ():
                self.page(page.page_id)[:] = b"\xa5" * LAYOUT.page_bytes
        late = self.core.compute()
        self.core.check()
        return replace(late, events=early.events + late.events)

    def run(self, *commands: Command, max_steps: int = 2000) -> list[Event]:
        """Steps until nothing can be computed."""
        events = list(self.step(*commands).events)
        for _ in range(max_steps):
            item = self.step()
            events += item.events
            if item.num_tokens == 0:
                return events
        raise AssertionError(f"still running after {max_steps} steps")

    def page(self, page_id: int) -> memoryview:
        """Bytes of a page."""
        return self.memory[page_id * LAYOUT.page_bytes : (page_id + 1) * LAYOUT.page_bytes]

    def pull(self, source: Engine, sources: Sequence[PageRef], destinations: Sequence[PageRef]) -> None:
        """Copies another engine's pages into this one's."""
        for theirs, ours in zip(sources, destinations, strict=True):
            assert source.pool.generation(theirs.page_id) == theirs.generation, "stale page"
            self.page(ours.page_id)[:] = source.page(theirs.page_id)


class Streams:
    """The token streams in a list of events, checked for gaps and repeats."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.first_index: dict[str, int] = {}
        self.finished: dict[str, FinishReason] = {}
        self.read(events)

    def read(self, events: Iterable[Event]) -> None:
        """Takes more events in."""
        for event in events:
            if isinstance(event, TokensSampled):
                assert event.key not in self.finished, "tokens after the end"
                first = self.first_index.setdefault(event.key, event.index)
                tokens = self.tokens.setdefault(event.key, [])
                assert event.index == first + len(tokens), "gap or repeat"
                tokens += event.token_ids
                if event.finish_reason is not None:
                    self.finished[event.key] = event.finish_reason

    def check(self, requests: Iterable[Request], eos_period: int | None = None) -> None:
        """Proves that each request's stream is whole and is what the oracle says."""
        for r in requests:
            known = (*r.prompt_token_ids, *r.emitted_token_ids)
            assert r.sampling.max_tokens is not None
            expected = expected_tokens(known, r.sampling.max_tokens - len(r.emitted_token_ids), eos_period)
            assert self.tokens[r.key] == expected, f"wrong tokens in {r.key}"
            stopped = expected[-1] == FAKE_EOS
            assert self.finished[r.key] is (FinishReason.STOP if stopped else FinishReason.LENGTH)
