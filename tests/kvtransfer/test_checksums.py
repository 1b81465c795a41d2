"""Sums of final pages: one for each use of a page."""

from __future__ import annotations

from collections import Counter

import pytest
import xxhash

from pdserve.kvtransfer.checksums import PageChecksums
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.transport import SourcePageRef

from .world import SMALL, Ref, fill, run


class CountingPool(KvPool):
    """Counts how often a page is read."""

    def __init__(self) -> None:
        super().__init__(SMALL, 8)
        self.num_reads: Counter[int] = Counter()
        fill(self)
        self.num_reads.clear()

    def page(self, page_id: int) -> memoryview:
        self.num_reads[page_id] += 1
        return super().page(page_id)


def test_each_use_of_a_page_is_hashed_once() -> None:
    async def body() -> None:
        pool = CountingPool()
        checksums = PageChecksums(pool, "host")
        first = await checksums.refs([Ref(3), Ref(5)])
        assert first == tuple(SourcePageRef(i, 1, xxhash.xxh3_64_intdigest(KvPool.page(pool, i))) for i in (3, 5))
        second = await checksums.refs([Ref(5), Ref(6), Ref(3)])
        assert second[::2] == first[::-1] and second[1].page_id == 6
        assert pool.num_reads == {3: 1, 5: 1, 6: 1}
        KvPool.page(pool, 3)[0] ^= 1
        again = await checksums.refs([Ref(3, 2), Ref(5)])
        assert again[0].generation == 2 and again[0].checksum != first[0].checksum and again[1] == first[1]
        assert pool.num_reads == {3: 2, 5: 1, 6: 1}
        with pytest.raises(IndexError):
            await checksums.refs([Ref(8)])
        checksums.close()

    run(body())


def test_without_integrity_no_page_is_read() -> None:
    async def body() -> None:
        pool = CountingPool()
        checksums = PageChecksums(pool, "none")
        assert await checksums.refs([Ref(3), Ref(5, 2)]) == (SourcePageRef(3, 1, 0), SourcePageRef(5, 2, 0))
        assert not pool.num_reads
        checksums.close()

    run(body())
