"""PageTable: what readers of a pool may trust, in memory that they see too.

| words | content |
| --- | --- |
| one per page | twice its generation, plus 1 while a transfer publishes it |
| TRANSFER_WORDS | tags of the transfers that are published, each within WINDOW words of its own place; 0: free |

A reader looks before and after it copies. Marks go before pages are freed, pages are written only after that, and no
generation comes twice: words that read the same before and after prove that nothing was written between.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from mmap import mmap

import xxhash

from pdserve.kvtransfer import memfd
from pdserve.kvtransfer.transport import SourcePageRef

TRANSFER_WORDS = 1 << 14
WINDOW = 64
_WORD_BYTES = 8

_log = logging.getLogger(__name__)


def table_bytes(num_pages: int) -> int:
    """Bytes of the table of a pool."""
    return (num_pages + TRANSFER_WORDS) * _WORD_BYTES


def transfer_tag(token: bytes, transfer_id: str) -> int:
    """What a transfer is called in the table: only who has the token of its reader can ask for it.

    Returns:
        A u64, not 0.
    """
    return xxhash.xxh3_64_intdigest(token + transfer_id.encode()) or 1


class PageTable:
    """The writer's side. Not thread-safe.

    Args:
        num_pages: Pages of the pool.

    Raises:
        OSError: The system has no such memory to give.
    """

    def __init__(self, num_pages: int) -> None:
        self.fd, raw = memfd.create("pdserve-kv-table", table_bytes(num_pages))
        self._num_pages, self._words = num_pages, raw.cast("Q")
        self._num_transfers = [0] * num_pages

    @property
    def words(self) -> memoryview:
        """The table itself."""
        return self._words

    def grant(self, tag: int) -> None:
        """Lets a transfer's reader look. Where there is no room it is told that its transfer ended."""
        for at in _window(tag, self._num_pages):
            if self._words[at] == 0:
                self._words[at] = tag
                return
        _log.error("no room for one more transfer over shm: it fails")

    def revoke(self, tag: int) -> None:
        """Undoes `grant`."""
        for at in _window(tag, self._num_pages):
            if self._words[at] == tag:
                self._words[at] = 0
                return

    def publish(self, page_id: int, generation: int) -> None:
        """One transfer more serves the page; all that do so at once mean the same generation."""
        word = _page_word(generation)
        assert self._num_transfers[page_id] == 0 or self._words[page_id] == word, f"page {page_id} was written anew"
        self._num_transfers[page_id] += 1
        self._words[page_id] = word

    def withdraw(self, page_ids: Iterable[int]) -> None:
        """One transfer less serves each page; what none serves is marked."""
        for page_id in page_ids:
            self._num_transfers[page_id] -= 1
            if self._num_transfers[page_id] == 0:
                self._words[page_id] &= ~1

    def close(self) -> None:
        """Withdraws all and gives up the memory; readers keep theirs. The last call, idempotent."""
        if self.fd >= 0:
            for page_id, count in enumerate(self._num_transfers):
                if count:
                    self._words[page_id] &= ~1
            self._words = memoryview(b"")
            os.close(self.fd)
            self.fd = -1


@dataclass(frozen=True, slots=True)
class Claim:
    """Pages that a reader wants, as they were announced to it.

    Attributes:
        tag: Of the transfer.
        ids: The pages.
        words: What the table must say of each.
    """

    tag: int
    ids: list[int]
    words: list[int]


def claim(token: bytes, transfer_id: str, pages: Sequence[SourcePageRef]) -> Claim:
    """Prepares `PageTableView.grants`.

    Args:
        token: The reader's.
        transfer_id: The transfer.
        pages: One at least.
    """
    ids, words = [p.page_id for p in pages], [_page_word(p.generation) for p in pages]
    return Claim(transfer_tag(token, transfer_id), ids, words)


class PageTableView:
    """A reader's side.

    Args:
        raw: The table's bytes.
    """

    def __init__(self, raw: bytes | bytearray | memoryview | mmap) -> None:
        self._words = memoryview(raw).cast("Q")
        self._num_pages = len(self._words) - TRANSFER_WORDS
        self._fence = threading.Lock()

    def grants(self, wanted: Claim) -> bool:
        """Says whether the transfer is alive and serves all pages in their generation.

        What was read before the call was read before the table is.
        """
        with self._fence:
            pass  # a processor may read ahead, but nothing from behind a lock that is released and taken again
        with self._fence:
            if not 0 <= min(wanted.ids) <= max(wanted.ids) < self._num_pages:
                return False
            is_published = any(self._words[at] == wanted.tag for at in _window(wanted.tag, self._num_pages))
            return is_published and list(map(self._words.__getitem__, wanted.ids)) == wanted.words


def _page_word(generation: int) -> int:
    return generation * 2 + 1


def _window(tag: int, num_pages: int) -> Iterator[int]:
    """Words in which a tag may be, the likeliest first."""
    first = tag % TRANSFER_WORDS
    return (num_pages + (first + i) % TRANSFER_WORDS for i in range(WINDOW))
