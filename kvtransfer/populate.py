"""Populator: has the system give memory for pages before they arrive.

A pool's memory is taken as it is first written (`memfd`), which costs several times what writing it again does. A
decode worker knows which pages a transfer will write once they are reserved, while prefill still computes the prompt:
a thread has memory taken for them then. What a page holds does not change by it, so nothing waits for it and no fence
is needed: pages may be written, freed and reserved anew meanwhile.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from pdserve.core.errors import TransferError
from pdserve.kvtransfer.pool import PageMemory
from pdserve.kvtransfer.remote_reads import LocalMemory
from pdserve.kvtransfer.tasks import submit

_MADV_POPULATE_WRITE = 23  # <linux/mman.h>, since Linux 5.14
_CHUNK_BYTES = 8 << 20

_log = logging.getLogger(__name__)


class Populator:
    """Takes memory for the pages of one pool, each once.

    Args:
        memory: The pool; its pages follow each other in memory, and it stays mapped as long as this lives.
    """

    def __init__(self, memory: PageMemory) -> None:
        self._local, self._page_bytes = LocalMemory(memory), memory.page_bytes
        self._max_pages = max(1, _CHUNK_BYTES // memory.page_bytes)
        self._asked = bytearray(memory.num_pages)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="kv-populate")
        self._over = False
        libc = ctypes.CDLL(None, use_errno=True)  # calls without the interpreter's lock, which mmap.madvise holds
        self._madvise = libc.madvise
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def expect(self, page_ids: Sequence[int]) -> None:
        """These pages will be written soon; returns at once. For one thread."""
        fresh = sorted(page for page in page_ids if not self._asked[page])
        if self._over or not fresh:
            return
        for page in fresh:
            self._asked[page] = 1
        try:
            submit(self._threads, self._populate, fresh)
        except TransferError as e:
            _log.debug("pages are taken as they are written: %s", e.message)

    def close(self) -> None:
        """Waits for its thread, which ends soon. Idempotent."""
        self._over = True
        self._threads.shutdown()

    def _populate(self, page_ids: Sequence[int]) -> None:
        for first, count in runs(page_ids, self._max_pages):
            if self._over:
                return
            start = self._local.base + first * self._page_bytes
            aligned = start - start % mmap.PAGESIZE
            if self._madvise(aligned, start - aligned + count * self._page_bytes, _MADV_POPULATE_WRITE) != 0:
                self._over = True  # an older system, or no memory: whoever writes the page will see
                _log.info("pages are taken as they are written: %s", os.strerror(ctypes.get_errno()))


def runs(page_ids: Sequence[int], max_pages: int) -> Iterator[tuple[int, int]]:
    """Pages that follow each other, as (first, how many).

    Args:
        page_ids: In ascending order, each once.
        max_pages: Of one run.
    """
    first = count = 0
    for page in page_ids:
        if count and page == first + count and count < max_pages:
            count += 1
            continue
        if count:
            yield first, count
        first, count = page, 1
    if count:
        yield first, count
