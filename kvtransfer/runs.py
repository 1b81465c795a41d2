"""Pages that lie one after the other on both sides are moved in one go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


def contiguous_runs(
    sources: NDArray[np.intp], destinations: Sequence[int], max_pages: int
) -> Iterator[tuple[int, int]]:
    """Divides a pull.

    Args:
        sources: `[num_pages]`, page ids to read.
        destinations: Destination page ids, one per source.
        max_pages: Pages of a run at most, >= 1.

    Yields:
        Position of a run's first page, and its number of pages; in order, all together the whole pull.
    """
    into = np.fromiter(destinations, np.intp, len(destinations))
    ends = np.flatnonzero((np.diff(sources) != 1) | (np.diff(into) != 1)) + 1
    for first, end in pairwise([0, *ends.tolist(), len(sources)]):
        for at in range(first, end, max_pages):
            yield at, min(max_pages, end - at)
