"""PageCopies: carries out the page copies of a step in plain memory, that of the pool and that of the host pool."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pdserve.engine.step import PageCopy, PageCopyKind


class PageCopies:
    """Copies whole pages as bytes; what they mean is the layout's business.

    Args:
        page_bytes: Bytes of a page.
        pool: Writable bytes of the pool.
        host: Writable bytes of the host pool, the same page size; None: nothing is swapped.
    """

    def __init__(self, page_bytes: int, pool: memoryview, host: memoryview | None = None) -> None:
        in_pool = _pages(pool, page_bytes)
        in_host = in_pool[:0] if host is None else _pages(host, page_bytes)
        self._memories = {
            PageCopyKind.SWAP_OUT: (in_pool, in_host),
            PageCopyKind.SWAP_IN: (in_host, in_pool),
            PageCopyKind.COPY: (in_pool, in_pool),
        }

    def apply(self, copies: Iterable[PageCopy]) -> None:
        """Does the copies one after the other, each seeing the bytes that those before it left."""
        for copy in copies:
            source, target = self._memories[copy.kind]
            target[copy.target] = source[copy.source]


def _pages(buffer: memoryview, page_bytes: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """`[num_pages, page_bytes]`; rows are copied at the speed of memory, without Python's lock."""
    return np.frombuffer(buffer, np.uint8).reshape(-1, page_bytes)
