"""Holdings: which sequence has which pages of the pool, and how much of it the unreserved hand-offs have together.

Pages that are set aside for a transfer are FILLING and have no holder; all others of a sequence are HELD once by it.
Full pages whose KV is final may be held by several: by forks of one prompt, and, once they are published, by every
sequence with the same prefix (`prefix_cache`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from pdserve.engine.page_pool import PagePool, PageState
from pdserve.engine.prefix_cache import PrefixCache
from pdserve.engine.sequence import Sequence, SequenceState
from pdserve.engine.step import PageCopy, PageCopyKind, PageRef


class Holdings:
    """Gives pages to sequences and takes them back.

    Args:
        pool: The pages; touched by nobody else.
        page_size: Tokens per page.
        max_unreserved_fraction: Share of the pool that unreserved hand-offs may hold together.
        cache: Finds pages that hold a prefix already; None: nothing is shared.

    Attributes:
        num_unreserved: Pages of unreserved hand-offs, shared ones counted once for each.
        num_queried_tokens: Known tokens of the sequences that got their first pages and looked for a prefix.
        num_hit_tokens: Of these, tokens that the cache had.
    """

    __slots__ = (
        "_cache",
        "_copied",
        "_max_unreserved",
        "_page_size",
        "_pool",
        "num_hit_tokens",
        "num_queried_tokens",
        "num_unreserved",
    )

    def __init__(
        self, pool: PagePool, page_size: int, max_unreserved_fraction: float, cache: PrefixCache | None = None
    ) -> None:
        self._pool = pool
        self._page_size = page_size
        self._cache = cache
        self._max_unreserved = int(max_unreserved_fraction * pool.num_pages)
        self._copied: list[int] = []  # sources of the step in flight
        self.num_unreserved = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    @property
    def num_free(self) -> int:
        """Pages free or evictable."""
        return self._pool.num_free

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        return self._pool.num_pages

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-num_tokens // self._page_size)

    def cached(self, seq: Sequence) -> list[int]:
        """Pages that the pool has of a sequence without pages: full ones, and never all that it has to compute."""
        if self._cache is None or seq.page_table:
            return []
        num_tokens = seq.num_initial
        if seq.state is not SequenceState.WAITING_KV:  # a reservation's next token is sampled elsewhere
            num_tokens = seq.goal - 1  # a hand-off that has sampled knows one more
            if seq.sampling.prompt_logprobs is not None:
                # The next position to tell is predicted by the one before.
                num_tokens = min(num_tokens, seq.num_told - 1)
        return self._cache.match(seq.digests, seq.tokens, seq.request.cache_salt, num_tokens // self._page_size)

    def can_give(self, num_pages: int, cached: Seq[int] = ()) -> bool:
        """Says whether a sequence can have so many pages.

        Args:
            num_pages: Pages, cached ones included.
            cached: Those that the pool has already; unless somebody holds them they count as evictable.
        """
        num_shared = sum(self._pool.state(page) is PageState.HELD for page in cached)
        return self._pool.can_allocate(num_pages - num_shared)

    def over_share(self, seq: Sequence, num_pages: int) -> bool:
        """Says whether an unreserved hand-off must wait for others to give pages back; one alone never has to."""
        held = self.num_unreserved
        return seq.unreserved and held > 0 and held + num_pages > self._max_unreserved

    def give(self, seq: Sequence, num_pages: int, cached: Seq[int] = ()) -> None:
        """Appends pages, all or nothing; ask `can_give` first. What is cached counts as computed."""
        self._append(seq, num_pages, cached, PageState.HELD)
        if cached:
            seq.num_computed = max(seq.num_computed, len(cached) * self._page_size)
        if seq.unreserved:
            self.num_unreserved += num_pages

    def share(self, parent: Sequence, child: Sequence) -> None:
        """Lets a fork begin after the prompt that its parent has computed; without room it gets nothing, and computes.

        Full pages are held by both: nobody writes them any more. The partial last page is copied before the fork's
        first step, which computes the last token of the prompt once more; until then its source is held too.
        """
        num_computed = min(child.num_prompt, child.num_initial - 1)
        num_shared, rest = divmod(num_computed, self._page_size)
        num_own = self.pages_for(child.num_initial) - num_shared
        if not self.can_give(num_own):
            return
        child.page_table.extend(parent.page_table[:num_shared])
        if rest:
            child.copy_from = parent.page_table[num_shared]
        self._pool.hold(parent.page_table[: num_shared + (rest > 0)])
        child.digests, child.num_published = parent.digests[:num_shared], min(parent.num_published, num_shared)
        child.num_cached = parent.num_cached
        self.give(child, num_own)
        child.num_computed = num_computed

    def num_released(self, sequences: Seq[Sequence], besides: Seq[int] = ()) -> int:
        """Pages that nobody would hold any more if these sequences gave theirs back; some do not count."""
        holders = Counter(page for seq in sequences for page in seq.page_table)
        return sum(self._pool.num_holders(page) == n for page, n in holders.items() if page not in besides)

    def copy(self, seq: Sequence) -> PageCopy:
        """The copy that a fork needs in the step in flight; `end_step` releases the source."""
        assert seq.copy_from is not None
        source, seq.copy_from = seq.copy_from, None
        self._copied.append(source)
        return PageCopy(source, seq.page_table[seq.num_computed // self._page_size], PageCopyKind.COPY)

    def end_step(self) -> None:
        """All copies were made."""
        if self._copied:
            self._pool.release(self._copied)
            self._copied.clear()

    def set_aside(self, seq: Sequence, num_pages: int, cached: Seq[int] = ()) -> None:
        """Gives pages that a transfer will fill, but for the cached ones."""
        self._append(seq, num_pages, cached, PageState.FILLING)
        seq.granted = True

    def validate(self, seq: Sequence) -> None:
        """The transfer has filled the pages: they are held like all others."""
        self._pool.validate(seq.page_table[seq.num_published :])
        seq.granted = False
        seq.num_computed = seq.num_initial
        self.publish(seq)

    def reopen(self, seq: Sequence) -> None:
        """Takes the last token of a validated sequence back: it will be computed once more, for what comes after it.

        Where others may share its page that happens on a copy; without room for one the sequence computes everything.
        """
        seq.num_computed = seq.num_initial - 1
        index, rest = divmod(seq.num_computed, self._page_size)
        if index >= seq.num_published:
            return
        if len(seq.page_table) == index + 1:
            if not self.can_give(1):
                self.take_back(seq)
                seq.num_computed = 0
                return
            self.give(seq, 1)
        page = seq.page_table.pop(index)
        seq.capacity, seq.num_published = len(seq.page_table) * self._page_size, index
        if rest:
            seq.copy_from = page
        else:
            self._pool.release([page])

    def publish(self, seq: Sequence) -> None:
        """Lets others share the full pages whose KV is computed (after the step's fence) or validated."""
        num_full = seq.num_computed // self._page_size
        if num_full > seq.num_published and self._cache is not None:
            for index in range(seq.num_published, num_full):
                digest = self._cache.digest(seq.digests, index, seq.tokens, seq.request.cache_salt)
                self._cache.publish(digest, seq.page_table[index])
            seq.num_published = num_full

    def forget(self, seq: Sequence) -> None:
        """Something is wrong with a sequence's KV: nobody who comes later shares it."""
        if self._cache is not None:
            for page in seq.page_table[: seq.num_published]:
                self._cache.forget(page)

    def take_back(self, seq: Sequence) -> None:
        """Takes all pages of a sequence; no reader or writer but this engine can reach them."""
        if seq.unreserved:
            self.num_unreserved -= len(seq.page_table)
        if seq.granted:
            self._pool.move(seq.page_table[seq.num_published :], PageState.FILLING, PageState.FREE)
            self._pool.release(seq.page_table[: seq.num_published])
        else:
            self._pool.release(seq.page_table)
        if seq.copy_from is not None:
            self._pool.release([seq.copy_from])
        seq.page_table, seq.capacity, seq.granted, seq.copy_from, seq.num_published = [], 0, False, None, 0

    def mark_reserved(self, seq: Sequence) -> None:
        """An unreserved hand-off has a destination now."""
        self.num_unreserved -= len(seq.page_table)
        seq.reserved = True

    def refs(self, seq: Sequence, first: int, last: int) -> tuple[PageRef, ...]:
        """Names this use of the pages [first, last) of a sequence."""
        return tuple(PageRef(page, self._pool.generation(page)) for page in seq.page_table[first:last])

    def _append(self, seq: Sequence, num_pages: int, cached: Seq[int], state: PageState) -> None:
        if seq.num_cached is None and self._cache is not None:
            num_hit = len(cached) * self._page_size
            self.num_queried_tokens += seq.num_initial
            self.num_hit_tokens += num_hit
            seq.num_cached = min(num_hit, seq.num_prompt) if state is PageState.HELD else 0
        if cached:
            self._pool.hold(cached)
            seq.page_table.extend(cached)
            seq.num_published = len(cached)
        if num_pages > len(cached):
            seq.page_table.extend(self._pool.allocate(num_pages - len(cached), state))
        seq.capacity = len(seq.page_table) * self._page_size

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Proves that the pool's pages are those of the sequences, none lost and none taken twice."""
        held: Counter[int] = Counter(self._copied)
        filling: list[int] = []
        num_unreserved = 0
        for seq in sequences:
            num_held = seq.num_published if seq.granted else len(seq.page_table)
            held.update(seq.page_table[:num_held])
            filling += seq.page_table[num_held:]
            assert seq.num_published <= max(seq.num_computed // self._page_size, num_held * seq.granted)
            held.update(() if seq.copy_from is None else (seq.copy_from,))
            num_unreserved += len(seq.page_table) if seq.unreserved else 0
            assert seq.capacity == len(seq.page_table) * self._page_size
        self._pool.check(held)
        assert len(filling) == len(set(filling)) == self._pool.count(PageState.FILLING), "FILLING pages without owner"
        assert num_unreserved == self.num_unreserved
        if self._cache is not None:
            self._cache.check()
