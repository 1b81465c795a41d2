"""Pages that lie one after the other on both sides are moved in one go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdserve.kvtransfer.transport import SourcePageRef


def contiguous_runs(
    sources: Sequence[SourcePageRef], destinations: Sequence[int], max_pages: int
) -> Iterator[tuple[int, int]]:
    """Divides a pull.

    Args:
        sources: Pages to read.
        destinations: Destination page ids, one per source.
        max_pages: Pages of a run at most, >= 1.

    Yields:
        Position of a run's first page, and its number of pages; in order, all together the whole pull.
    """
    first = 0
    for at in range(1, len(sources) + 1):
        if (
            at == len(sources)
            or at - first == max_pages
            or sources[at].page_id != sources[at - 1].page_id + 1
            or destinations[at] != destinations[at - 1] + 1
        ):
            yield first, at - first
            first = at
