"""KvPool: the pages of one worker in anonymous shared memory (memfd), one contiguous run of bytes per page.

The service allocates it once and passes `buffer` to the engine; transports read and write single pages.
"""

from __future__ import annotations

import mmap
import os
from typing import Protocol

from pdserve.core.errors import ConfigError
from pdserve.core.layout import KVLayout


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


class KvPool:
    """Page memory in a memfd.

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
            self.fd = os.memfd_create("pdserve-kv", os.MFD_CLOEXEC)
        except (AttributeError, OSError) as e:
            raise ConfigError(f"KV pool: this system has no memfd ({e}); pdserve workers need Linux") from e
        try:
            os.ftruncate(self.fd, size)
            self.buffer = memoryview(mmap.mmap(self.fd, size))
        except (OSError, ValueError) as e:
            os.close(self.fd)
            raise ConfigError(f"KV pool: cannot map {size} bytes ({e}); lower --kv-cache-memory-bytes") from e

    def page(self, page_id: int) -> memoryview:
        """The bytes of one page, writable.

        Raises:
            IndexError: There is no such page.
        """
        if not 0 <= page_id < self.num_pages:
            raise IndexError(f"page {page_id} of {self.num_pages}")
        return self.buffer[page_id * self.page_bytes : (page_id + 1) * self.page_bytes]

    def close(self) -> None:
        """Gives up the memory; the system gets it back when the last view (a tensor, a page) dies. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.buffer = memoryview(b"")
