"""When the pages of an incoming transfer were announced, pulled and verified, and what that amounts to. No clock.

watermark --(wait)--> pull begins --> its last page is verified    one range; what comes meanwhile is the next
first pull ........... manifest ............ last page verified    the transfer; before the manifest it is hidden
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PulledRange:
    """Pages that one pull brought, counted as prefill counts them. Times in monotonic seconds.

    Attributes:
        first_page: Index of the first within the prompt.
        num_pages: Pages.
        num_bytes: Bytes of the data plane, headers included.
        announced_s: When the last of them was announced.
        began_s: When the pull began.
        verified_s: When the last of them was here and verified.
        transport: Data plane that they came over.
    """

    first_page: int
    num_pages: int
    num_bytes: int
    announced_s: float
    began_s: float
    verified_s: float
    transport: str

    @property
    def wait_s(self) -> float:
        """Announced to pull begun, seconds."""
        return self.began_s - self.announced_s

    @property
    def pull_s(self) -> float:
        """Pull begun to verified, seconds."""
        return self.verified_s - self.began_s


class Timeline:
    """Records one transfer."""

    def __init__(self) -> None:
        self._announced: list[tuple[int, float]] = []  # pages announced, and since when so many were
        self._ranges: list[PulledRange] = []

    @property
    def ranges(self) -> tuple[PulledRange, ...]:
        """What was pulled, in order."""
        return tuple(self._ranges)

    def announced(self, num_pages: int, now: float) -> None:
        """So many pages from the prompt's start are known; a repetition changes nothing.

        Args:
            num_pages: Pages announced so far, those included that are not pulled.
            now: Monotonic seconds.
        """
        if not self._announced or num_pages > self._announced[-1][0]:
            self._announced.append((num_pages, now))

    def pulled(
        self, first_page: int, num_pages: int, num_bytes: int, began_s: float, now: float, transport: str
    ) -> None:
        """A pull succeeded; fields as those of `PulledRange`."""
        end = first_page + num_pages
        announced_s = next((at_s for known, at_s in self._announced if known >= end), began_s)
        self._announced = [(known, at_s) for known, at_s in self._announced if known > end]
        self._ranges.append(PulledRange(first_page, num_pages, num_bytes, announced_s, began_s, now, transport))


@dataclass(frozen=True, slots=True)
class TransferResult:
    """A complete transfer.

    Attributes:
        token_id: Sampled by prefill; never sampled again.
        index: Its output index.
        finished: That token ended the request; the destinations hold nothing of use.
        bytes_on_wire: Bytes of the data plane, headers included.
        transfer_s: First byte asked to last page verified, seconds.
        hidden_s: Part of transfer_s before the manifest came, seconds.
        num_pages: Pages that were pulled.
        transport: Data plane that they came over; several, from several sources, have a plus between them. What each
            of them moved is in the ranges.
        manifest_s: When the manifest came, monotonic seconds.
        ranges: The pulls, in order.
    """

    token_id: int
    index: int
    finished: bool
    bytes_on_wire: int
    transfer_s: float
    hidden_s: float
    num_pages: int
    transport: str
    manifest_s: float
    ranges: Sequence[PulledRange]

    @property
    def pull_s(self) -> float:
        """Time in which pages moved: the sum of the pulls, seconds."""
        return sum(pulled.pull_s for pulled in self.ranges)

    @property
    def pull_hidden_s(self) -> float:
        """Part of `pull_s` before the manifest came, seconds."""
        ends = (min(pulled.verified_s, self.manifest_s) - pulled.began_s for pulled in self.ranges)
        return sum(max(0.0, before_s) for before_s in ends)


def merged(parts: Sequence[TransferResult]) -> TransferResult:
    """A transfer from several sources as one.

    Args:
        parts: Of the sources, the one that samples first. Pages that two of them pulled count twice: each brought
            other heads.

    Returns:
        What the first one says of the token; bytes, pages and ranges of all. `pull_s` is the sum over sources that
        pull beside each other, and may be more than `transfer_s`.
    """
    first = parts[0]
    ranges = tuple(sorted((r for part in parts for r in part.ranges), key=lambda r: r.verified_s))
    began_s = min((r.began_s for r in ranges), default=0.0)
    transfer_s = max((r.verified_s for r in ranges), default=0.0) - began_s
    manifest_s = max(part.manifest_s for part in parts)
    return TransferResult(
        token_id=first.token_id,
        index=first.index,
        finished=first.finished,
        bytes_on_wire=sum(part.bytes_on_wire for part in parts),
        transfer_s=transfer_s,
        hidden_s=min(max(manifest_s - began_s, 0.0), transfer_s),
        num_pages=sum(part.num_pages for part in parts),
        transport="+".join(sorted({part.transport for part in parts})),
        manifest_s=manifest_s,
        ranges=ranges,
    )
