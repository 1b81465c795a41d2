"""What was said of the last transfers, for those who ask late; a flood of ids pushes out older ones and no more."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

MAX_REMEMBERED = 4096
T = TypeVar("T")


def remember(last: OrderedDict[str, T], transfer_id: str, what: T) -> None:
    """Keeps it; the oldest of more than `MAX_REMEMBERED` is forgotten."""
    last[transfer_id] = what
    if len(last) > MAX_REMEMBERED:
        last.popitem(last=False)
