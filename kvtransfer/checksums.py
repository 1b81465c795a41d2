"""PageChecksums: what readers compare pages with. Each use of a page is hashed once, off the event loop.

A sum says what a page held when it became final. Every transfer that shares the page announces that same sum, so a page
that somebody wrote into since fails at its readers instead of passing under a new sum.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Protocol

import xxhash

from pdserve.kvtransfer.pool import PageMemory
from pdserve.kvtransfer.transport import SourcePageRef


class PageGeneration(Protocol):
    """A page and its reuse number, as the engine names them."""

    @property
    def page_id(self) -> int:
        """Index in the pool."""
        ...

    @property
    def generation(self) -> int:
        """Reuse number."""
        ...


class PageChecksums:
    """Sums of a pool's final pages, one remembered per page: that of its latest generation.

    Args:
        memory: The pool.
        integrity: "host" (xxh3-64) or "none" (every sum is 0).
        threads: Where pages are hashed; None: one thread. Ended by `close`.
    """

    def __init__(self, memory: PageMemory, integrity: str, threads: Executor | None = None) -> None:
        self.integrity = integrity
        self._memory = memory
        self._threads = threads or ThreadPoolExecutor(1, thread_name_prefix="kv-hash")
        self._known: dict[int, SourcePageRef] = {}

    async def refs(self, pages: Sequence[PageGeneration]) -> tuple[SourcePageRef, ...]:
        """The pages as they are announced.

        Args:
            pages: Final ones, which nobody writes or frees meanwhile.

        Raises:
            IndexError: There is no such page.
        """
        if self.integrity == "none":
            return tuple(SourcePageRef(page.page_id, page.generation, 0) for page in pages)
        found = {page.page_id: self._known[page.page_id] for page in pages if self._knows(page)}
        if new := [page for page in pages if page.page_id not in found]:
            hashed = await asyncio.get_running_loop().run_in_executor(self._threads, self._hash, new)
            found.update(hashed)
            self._known.update(hashed)
        return tuple(found[page.page_id] for page in pages)

    def close(self) -> None:
        """Ends the threads; nothing is being hashed. Idempotent."""
        self._threads.shutdown()

    def _knows(self, page: PageGeneration) -> bool:
        known = self._known.get(page.page_id)
        return known is not None and known.generation == page.generation

    def _hash(self, pages: Sequence[PageGeneration]) -> dict[int, SourcePageRef]:
        found = {}
        for page in pages:
            checksum = xxhash.xxh3_64_intdigest(self._memory.page(page.page_id))
            found[page.page_id] = SourcePageRef(page.page_id, page.generation, checksum)
        return found
