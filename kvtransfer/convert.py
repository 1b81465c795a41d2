"""Where the KV of a prompt goes when the source's pages are not like ours: other page size, other heads. Pure numbers.

Two questions, answered apart because neither depends on the other:

| question | answer |
| --- | --- |
| which tokens of which source page go where | `PagePlan.runs`: runs of tokens within one page on either side |
| where a token lies within a page | `blocks`: keys or values of a layer group, in rows of one (KV head, layer) each |

Every run moves with every block. Tokens that the destination has already are in no run: their pages may be shared, and
a shared page is never written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from pdserve.core.layout import KVLayout, LayerGroup, incompatibility

KV_HEADS = "kv_heads"
"""What a decode worker names beside `core.layout.CONVERSIONS` when it takes ranges of KV heads from several sources."""


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Consecutive tokens that lie in one page on either side.

    Attributes:
        source_page: Position in the prompt, counted in the source's pages.
        source_token: First token within that page.
        destination_page: Position in the prompt, counted in our pages.
        destination_token: First token within that page.
        num_tokens: Tokens, >= 1.
    """

    source_page: int
    source_token: int
    destination_page: int
    destination_token: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PagePlan:
    """Pages of one prompt on both sides.

    Attributes:
        num_tokens: Tokens whose KV moves, cached ones included.
        source_size: Tokens per page of the source.
        destination_size: Tokens per page here.
        num_cached_pages: Leading pages that are here already, counted in our pages.
    """

    num_tokens: int
    source_size: int
    destination_size: int
    num_cached_pages: int

    @property
    def num_source_pages(self) -> int:
        """Pages of the prompt at the source."""
        return -(-self.num_tokens // self.source_size)

    @property
    def num_skipped_pages(self) -> int:
        """Leading source pages of which every token is here already; they are not pulled."""
        cached = self.num_cached_pages * self.destination_size
        return self.num_source_pages if cached >= self.num_tokens else cached // self.source_size

    def runs(self, first: int, last: int) -> Iterator[TokenRun]:
        """What the source pages [first, last) of the prompt bring, in token order."""
        token = max(first * self.source_size, self.num_cached_pages * self.destination_size)
        end = min(last * self.source_size, self.num_tokens)
        while token < end:
            source_page, source_token = divmod(token, self.source_size)
            destination_page, destination_token = divmod(token, self.destination_size)
            room = min(self.source_size - source_token, self.destination_size - destination_token)
            num = min(room, end - token)
            yield TokenRun(source_page, source_token, destination_page, destination_token, num)
            token += num


@dataclass(frozen=True, slots=True)
class HeadShard:
    """A source that has a range of the KV heads.

    Attributes:
        layout: Its pages; a group's `num_kv_heads` are those of the range.
        first_heads: Per layer group, our KV head that is the range's first.
    """

    layout: KVLayout
    first_heads: tuple[int, ...]

    @classmethod
    def whole(cls, layout: KVLayout) -> HeadShard:
        """A source that has all heads."""
        return cls(layout, (0,) * len(layout.groups))


@dataclass(frozen=True, slots=True)
class Block:
    """Keys or values of one layer group: rows of one (KV head, layer) each, in which tokens follow each other.

    All numbers are elements. Row r, token t begins at `at + r * step + t * dim` of a page.

    Attributes:
        num_rows: KV heads of the source's range x layers.
        dim: Elements of one token in one row.
        source_at: Token 0 of row 0 in a source page.
        source_step: From row to row there.
        destination_at: The same row in our page.
        destination_step: From row to row here.
    """

    num_rows: int
    dim: int
    source_at: int
    source_step: int
    destination_at: int
    destination_step: int


def blocks(shard: HeadShard, ours: KVLayout) -> tuple[Block, ...]:
    """Where the source's heads lie in its pages and in ours; `shard_fault` must have found nothing."""
    found = []
    parts = zip(
        shard.layout.groups, shard.layout.group_offsets, ours.groups, ours.group_offsets, shard.first_heads, strict=True
    )
    for theirs, source_offset, mine, destination_offset, first_head in parts:
        layers, width = len(mine.layers), mine.k_dim + mine.v_dim
        source_step, destination_step = width * shard.layout.page_size, width * ours.page_size
        for dim, before in ((mine.k_dim, 0), (mine.v_dim, mine.k_dim)):
            found.append(
                Block(
                    num_rows=theirs.num_kv_heads * layers,
                    dim=dim,
                    source_at=source_offset + before * shard.layout.page_size,
                    source_step=source_step,
                    destination_at=destination_offset
                    + first_head * layers * destination_step
                    + before * ours.page_size,
                    destination_step=destination_step,
                )
            )
    return tuple(found)


def shard_fault(shard: HeadShard, ours: KVLayout) -> str | None:
    """Says why a source's heads cannot be placed in our pages, or None."""
    if len(shard.layout.groups) != len(ours.groups) or len(shard.first_heads) != len(ours.groups):
        return f"{len(ours.groups)} layer groups here, {len(shard.layout.groups)} there"
    for theirs, mine, first in zip(shard.layout.groups, ours.groups, shard.first_heads, strict=True):
        if (theirs.layers, theirs.k_dim, theirs.v_dim) != (mine.layers, mine.k_dim, mine.v_dim):
            return f"{_shape(mine)} here, {_shape(theirs)} there"
        if not 0 <= first <= mine.num_kv_heads - theirs.num_kv_heads:
            last = first + theirs.num_kv_heads
            return f"{_name(mine)} have {mine.num_kv_heads} KV heads here; there is a source of heads [{first}, {last})"
    return None


def range_fault(shard: HeadShard, ours: KVLayout, converts: Collection[str]) -> str | None:
    """Says why KV of a source that has a range of the heads cannot come into our pages, or None.

    Args:
        shard: The source.
        ours: Layout of our pages.
        converts: What may be converted: see `incompatibility`, and `KV_HEADS`.
    """
    if KV_HEADS not in converts:
        return "the source has a range of the KV heads, and this worker takes all heads from one source"
    fits = replace(ours, groups=shard.layout.groups)  # whose heads are asked about below
    return incompatibility(fits, shard.layout, converts) or shard_fault(shard, ours)


def coverage_fault(shards: Sequence[HeadShard], ours: KVLayout) -> str | None:
    """Says why these sources together do not bring every KV head once, or None."""
    for shard in shards:
        if (fault := shard_fault(shard, ours)) is not None:
            return fault
    for index, mine in enumerate(ours.groups):
        ranges = sorted((s.first_heads[index], s.layout.groups[index].num_kv_heads) for s in shards)
        at = 0
        for first, num in ranges:
            if first != at:
                what = "from no source" if first > at else "from two sources"
                return f"{_name(mine)}: KV head {min(first, at)} comes {what}"
            at += num
        if at != mine.num_kv_heads:
            return f"{_name(mine)}: KV head {at} comes from no source"
    return None


def _name(group: LayerGroup) -> str:
    return f"layers {group.layers[0]}..{group.layers[-1]}"


def _shape(group: LayerGroup) -> str:
    return f"{_name(group)} ({len(group.layers)} of them) with {group.k_dim} elements per key, {group.v_dim} per value"
