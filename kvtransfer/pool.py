"""KvPool: the pages of one worker in anonymous shared memory (memfd), one contiguous run of bytes per page.

The service allocates it once and passes `buffer` to the engine; transports read and write single pages.
"""

from __future__ import annotations

import os
from typing import Protocol

from pdserve.core.errors import ConfigError
from pdserve.core.layout import KVLayout
from pdserve.kvtransfer import memfd


class PageMemory(Protocol):
    """What transports and checksums need of a pool."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        ...

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        ...

    def page(self, page_id: int) -> memoryview:
        """The bytes of one page, writable."""
        ...

    def run(self, page_id: int, num_pages: int) -> memoryview:
        """The bytes of pages that lie one after the other, writable."""
        ...


class KvPool:
    """Page memory in a memfd, see `memfd`.

    Args:
        layout: Gives the size of a page.
        num_pages: Pages, >= 1.

    Raises:
        ConfigError: The system has no such memory to give.
    """

    def __init__(self, layout: KVLayout, num_pages: int) -> None:
        if num_pages < 1:
            raise ConfigError(f"KV pool: num_pages is {num_pages}; it must be at least 1")
        self.layout = layout
        self.num_pages = num_pages
        self.page_bytes = layout.page_bytes
        size = num_pages * self.page_bytes
        try:
            self.fd, self.buffer = memfd.create("pdserve-kv", size)
        except AttributeError as e:
            raise ConfigError(f"KV pool: this system has no memfd ({e}); pdserve workers need Linux") from e
        except (OSError, ValueError, OverflowError) as e:
            raise ConfigError(
                f"KV pool: cannot have {size} bytes ({e}); lower --kv-cache-memory-bytes or --num-pages"
            ) from e

    def page(self, page_id: int) -> memoryview:
        """The bytes of one page, writable.

        Raises:
            IndexError: There is no such page.
        """
        return self.run(page_id, 1)

    def run(self, page_id: int, num_pages: int) -> memoryview:
        """The bytes of pages that lie one after the other, writable.

        Raises:
            IndexError: One of them does not exist.
        """
        if not 0 <= page_id <= page_id + num_pages <= self.num_pages or num_pages < 1:
            raise IndexError(f"pages {page_id} to {page_id + num_pages - 1} of {self.num_pages}")
        return self.buffer[page_id * self.page_bytes : (page_id + num_pages) * self.page_bytes]

    def close(self) -> None:
        """Gives up the memory; the system gets it back when the last view (a tensor, a page) dies. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.buffer = memoryview(b"")
