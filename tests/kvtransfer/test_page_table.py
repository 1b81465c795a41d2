"""The page table: no order of a writer's and a reader's steps lets a reader take new bytes for old ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations

import pytest

from pdserve.kvtransfer import page_table
from pdserve.kvtransfer.page_table import PageTable, PageTableView, claim, transfer_tag
from pdserve.kvtransfer.transport import SourcePageRef

TOKEN = b"t" * 16


def copy_and_reuse(turns: tuple[int, ...], num_turns: int) -> tuple[bool, bytes]:
    """Reader, in these turns: look, copy one half, copy the other, look. Writer: withdraw, write, write, publish.

    Returns:
        Both looks granted the page; what was copied.
    """
    table = PageTable(2)
    view = PageTableView(table.words.cast("B"))
    table.grant(transfer_tag(TOKEN, "t"))
    table.publish(1, 7)
    memory, copied, looks = bytearray(b"aa"), bytearray(2), list[bool]()
    wanted = claim(TOKEN, "t", [SourcePageRef(1, 7, 0)])
    reader: Iterator[Callable[[], None]] = iter(
        [
            lambda: looks.append(view.grants(wanted)),
            lambda: copied.__setitem__(0, memory[0]),
            lambda: copied.__setitem__(1, memory[1]),
            lambda: looks.append(view.grants(wanted)),
        ]
    )
    writer: Iterator[Callable[[], None]] = iter(
        [
            lambda: table.withdraw([1]),
            lambda: memory.__setitem__(0, ord("b")),
            lambda: memory.__setitem__(1, ord("b")),
            lambda: table.publish(1, 8),
        ]
    )
    for turn in range(num_turns):
        next(reader if turn in turns else writer)()
    table.close()
    return all(looks), bytes(copied)


@pytest.mark.parametrize("num_writes", range(5))
def test_every_interleaving_of_a_copy_and_a_reuse(num_writes: int) -> None:
    outcomes = set()
    for turns in combinations(range(4 + num_writes), 4):
        granted, copied = copy_and_reuse(turns, 4 + num_writes)
        assert not granted or copied == b"aa", turns
        outcomes.add(granted)
    assert outcomes == ({True, False} if num_writes else {True})


def test_a_page_is_served_until_the_last_transfer_withdraws_it() -> None:
    table = PageTable(4)
    view = PageTableView(table.words.cast("B"))
    pages = [SourcePageRef(0, 0, 0), SourcePageRef(3, 5, 0)]
    wanted = claim(TOKEN, "t", pages)
    table.grant(wanted.tag)
    assert not view.grants(wanted)
    for page in pages:
        table.publish(page.page_id, page.generation)
    table.publish(3, 5)
    assert view.grants(wanted)
    table.withdraw([3])
    assert view.grants(wanted)
    table.withdraw([3])
    assert not view.grants(wanted) and view.grants(claim(TOKEN, "t", pages[:1]))
    for stranger in (
        SourcePageRef(0, 1, 0),
        SourcePageRef(4, 0, 0),
        SourcePageRef(2**31, 0, 0),
        SourcePageRef(-1, 0, 0),
    ):
        assert not view.grants(claim(TOKEN, "t", [stranger]))
    table.close()
    assert not view.grants(claim(TOKEN, "t", pages[:1]))
    table.close()


def test_two_generations_of_a_page_are_never_served_at_once() -> None:
    table = PageTable(1)
    table.publish(0, 1)
    with pytest.raises(AssertionError, match="page 0"):
        table.publish(0, 2)
    table.close()


def test_transfers_are_told_apart_and_what_finds_no_room_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    table = PageTable(1)
    view, pages = PageTableView(table.words.cast("B")), [SourcePageRef(0, 1, 0)]
    table.publish(0, 1)
    place = transfer_tag(TOKEN, "t") % page_table.TRANSFER_WORDS
    tags = [place + i * page_table.TRANSFER_WORDS for i in range(1, page_table.WINDOW + 1)]
    for tag in tags:  # all that want to be where this one wants to be
        table.grant(tag)
    wanted = claim(TOKEN, "t", pages)
    table.grant(wanted.tag)
    assert not view.grants(wanted) and "no room" in caplog.text
    table.revoke(tags[5])
    table.grant(wanted.tag)
    assert view.grants(wanted)
    assert not view.grants(claim(TOKEN, "u", pages)) and not view.grants(claim(b"u" * 16, "t", pages))
    table.revoke(wanted.tag)
    assert not view.grants(wanted)
    for tag in tags:
        table.revoke(tag)
    assert not any(table.words[1:])
    table.close()
