"""Which bytes go where, against pages made element by element."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.layout import KVLayout, LayerGroup
from pdserve.kvtransfer.convert import HeadShard, PagePlan, TokenRun, blocks, coverage_fault, shard_fault

from .layouts import POISON, layer_groups, make_kv, make_pages, shards_of

SIZES = st.integers(1, 48)


@st.composite
def plans(draw: st.DrawFn, most: int = 200) -> PagePlan:
    num_tokens, source, destination = draw(st.integers(1, most)), draw(SIZES), draw(SIZES)
    return PagePlan(num_tokens, source, destination, draw(st.integers(0, num_tokens // destination)))


@given(plans())
def test_every_token_that_is_not_here_moves_once_and_no_other(plan: PagePlan) -> None:
    moved = []
    for run in plan.runs(plan.num_skipped_pages, plan.num_source_pages):
        assert run.num_tokens >= 1 and run.destination_page >= plan.num_cached_pages
        assert run.source_token + run.num_tokens <= plan.source_size
        assert run.destination_token + run.num_tokens <= plan.destination_size
        for i in range(run.num_tokens):
            token = run.source_page * plan.source_size + run.source_token + i
            assert token == run.destination_page * plan.destination_size + run.destination_token + i
            moved.append(token)
    assert moved == list(range(plan.num_cached_pages * plan.destination_size, plan.num_tokens))


@given(plans())
def test_no_page_is_pulled_for_nothing_and_none_is_missed(plan: PagePlan) -> None:
    cached, first = plan.num_cached_pages * plan.destination_size, plan.num_skipped_pages
    assert min(first * plan.source_size, plan.num_tokens) <= cached
    for page in range(plan.num_source_pages):
        assert bool(list(plan.runs(page, page + 1))) == (page >= first)


@given(plans(), st.data())
def test_pages_may_come_in_any_pieces(plan: PagePlan, data: st.DataObject) -> None:
    whole = list(plan.runs(plan.num_skipped_pages, plan.num_source_pages))
    at, pieces = plan.num_skipped_pages, []
    while at < plan.num_source_pages:
        end = data.draw(st.integers(at + 1, plan.num_source_pages))
        pieces += plan.runs(at, end)
        at = end
    assert pieces == whole


def byte_ranges(run: TokenRun, shard: HeadShard, ours: KVLayout) -> Iterator[tuple[slice, slice]]:
    """Every contiguous piece of a run, row by row: bytes of its source page and of ours, which are float32."""
    for block in blocks(shard, ours):
        num = run.num_tokens * block.dim
        for row in range(block.num_rows):
            source_at = block.source_at + row * block.source_step + run.source_token * block.dim
            at = block.destination_at + row * block.destination_step + run.destination_token * block.dim
            yield slice(4 * source_at, 4 * (source_at + num)), slice(4 * at, 4 * (at + num))


@given(layer_groups(), plans(40), st.data())
def test_runs_and_blocks_make_the_pages_of_the_other_size(
    groups: tuple[LayerGroup, ...], plan: PagePlan, data: st.DataObject
) -> None:
    ours = KVLayout(plan.destination_size, "float32", groups)
    cuts = data.draw(st.sets(st.integers(1, min(g.num_kv_heads for g in groups)))) - {
        min(g.num_kv_heads for g in groups)
    }
    shards = shards_of(ours, page_size=plan.source_size, dtype="float32", cuts=tuple(sorted(cuts)))
    assert coverage_fault(shards, ours) is None
    kv = make_kv(groups, plan.num_tokens)
    pages = [bytearray([POISON]) * ours.page_bytes for _ in range(ours.num_pages(plan.num_tokens))]
    for shard in shards:
        sources = make_pages(kv, shard.layout, plan.num_tokens, shard.first_heads)
        for run in plan.runs(plan.num_skipped_pages, plan.num_source_pages):
            for source, destination in byte_ranges(run, shard, ours):
                page = pages[run.destination_page]
                assert set(page[destination]) <= {POISON}
                page[destination] = sources[run.source_page][source]
    right = make_pages(kv, ours, plan.num_tokens)
    assert pages[plan.num_cached_pages :] == right[plan.num_cached_pages :]
    assert all(set(page) == {POISON} for page in pages[: plan.num_cached_pages])


OURS = KVLayout.uniform(num_layers=2, num_kv_heads=4, head_dim=8, page_size=16, dtype="float32")


def shard(first: int, num: int, head_dim: int = 8, num_layers: int = 2) -> HeadShard:
    layout = KVLayout.uniform(num_layers=num_layers, num_kv_heads=num, head_dim=head_dim, page_size=32, dtype="float32")
    return HeadShard(layout, (first,))


@pytest.mark.parametrize(
    ("shards", "says"),
    [
        ([shard(0, 2)], "KV head 2 comes from no source"),
        ([shard(1, 3)], "KV head 0 comes from no source"),
        ([shard(0, 2), shard(1, 3)], "KV head 1 comes from two sources"),
        ([shard(0, 1), shard(2, 2)], "KV head 1 comes from no source"),
        ([shard(0, 2), shard(2, 3)], "have 4 KV heads here; there is a source of heads [2, 5)"),
        ([shard(0, 4, head_dim=4)], "8 elements per key, 8 per value here"),
        ([shard(0, 4, num_layers=3)], "(2 of them)"),
        ([HeadShard(OURS, ())], "1 layer groups here"),
        ([], "KV head 0 comes from no source"),
    ],
)
def test_sources_that_do_not_make_the_whole_are_named(shards: list[HeadShard], says: str) -> None:
    fault = coverage_fault(shards, OURS)
    assert fault is not None and says in fault


def test_sources_that_make_the_whole_fit_in_any_order() -> None:
    assert coverage_fault([shard(3, 1), shard(0, 2), shard(2, 1)], OURS) is None
    assert shard_fault(HeadShard.whole(OURS), OURS) is None
