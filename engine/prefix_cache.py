"""PrefixCache: which page of the pool holds the KV of which prefix. Pure.

A full page is named by a digest of every token from the start of its sequence to its own end, chained page by page:

    h[-1] = SHA-256(SHA-256(identity) || salt)
    h[i]  = SHA-256(h[i-1] || tokens of page i as little-endian uint32)

So equal digests mean equal tokens at equal positions, under the same salt, of the same model. Digests are compared
whole: a short hash that collides would serve another request's KV. Invariants:

- A page is published once its KV is computed or validated, and full; from then on nobody writes it.
- An entry is good for the generation of the page that it was made for: a page that became free since is never found.
- Of two pages with equal content the first published stays; the other is freed by its last holder.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from pdserve.engine.page_pool import PagePool, PageState


class PrefixCache:
    """Finds and publishes pages by the digests of their prefixes.

    Args:
        pool: The pages; keeps published ones when their last holder goes, and evicts them.
        page_size: Tokens per page.
        identity: What the KV depends on beside the tokens: model, weights, type.
    """

    __slots__ = ("_digests", "_pack", "_page_size", "_pages", "_pool", "_root")

    def __init__(self, pool: PagePool, page_size: int, identity: bytes = b"") -> None:
        self._pool = pool
        self._page_size = page_size
        self._root = hashlib.sha256(identity).digest()
        self._pack = struct.Struct(f"<{page_size}I").pack
        self._pages: dict[bytes, tuple[int, int]] = {}  # digest -> page, generation; stale entries stay until replaced
        self._digests: dict[int, bytes] = {}  # page -> its digest in `_pages`: one at most, so both are bounded

    def digest(self, chain: list[bytes], index: int, tokens: Sequence[int], salt: str) -> bytes:
        """Digest of one page.

        Args:
            chain: Digests of the sequence's pages so far; extended up to `index`, so that each is computed once.
            index: The page's place in the sequence.
            tokens: The sequence's tokens, at least to the end of that page.
            salt: The request's.

        Returns:
            32 bytes.
        """
        size = self._page_size
        while len(chain) <= index:
            first = len(chain) * size
            parent = chain[-1] if chain else hashlib.sha256(self._root + salt.encode()).digest()
            chain.append(hashlib.sha256(parent + self._pack(*tokens[first : first + size])).digest())
        return chain[index]

    def match(self, chain: list[bytes], tokens: Sequence[int], salt: str, max_pages: int) -> list[int]:
        """Pages that hold the KV of the leading tokens; arguments as in `digest`.

        Returns:
            At most `max_pages` pages, HELD or CACHED, in order.
        """
        pages: list[int] = []
        while len(pages) < max_pages:
            page = self._find(self.digest(chain, len(pages), tokens, salt))
            if page is None:
                break
            pages.append(page)
        return pages

    def publish(self, digest: bytes, page: int) -> None:
        """Lets others find a HELD page whose KV is final, unless a page with that content can be found already."""
        if self._find(digest) is not None:
            return
        self._remove(page)
        if (stale := self._pages.get(digest)) is not None:
            self._remove(stale[0])
        self._pages[digest] = page, self._pool.generation(page)
        self._digests[page] = digest
        self._pool.keep(page)

    def forget(self, page: int) -> None:
        """Takes a page back from those that are found; it goes with its last holder."""
        if self._remove(page):
            self._pool.unkeep(page)

    def check(self) -> None:
        """Proves that pages and digests name each other."""
        assert len(self._pages) == len(self._digests) <= self._pool.num_pages
        for digest, (page, generation) in self._pages.items():
            assert self._digests[page] == digest
            assert generation <= self._pool.generation(page)
            if generation == self._pool.generation(page):
                assert self._pool.state(page) in (PageState.HELD, PageState.CACHED)

    def _find(self, digest: bytes) -> int | None:
        page, generation = self._pages.get(digest, (0, -1))
        return page if generation == self._pool.generation(page) else None

    def _remove(self, page: int) -> bool:
        """True when the page could be found."""
        digest = self._digests.pop(page, None)
        if digest is None:
            return False
        _, generation = self._pages.pop(digest)
        return generation == self._pool.generation(page)
