"""PageCopy: pages of another pool on this host, copied into ours.

By compiled code where there was a C compiler when pdserve was installed (`csrc/copy.c`): many pages in one call, large
transfers past the caches. Else page by page.
"""

from __future__ import annotations

import ctypes
import logging
from array import array
from collections.abc import Callable, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

_NAME = "pdserve_copy_pages_1"
_POINTERS = (ctypes.c_void_p,) * 4
_NUMBERS = (ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int)

_log = logging.getLogger(__name__)
_Copy = Callable[[int, int, int, int, int, int, int, bool], object]


class PageCopy:
    """What one transfer copies. Whoever makes it keeps both pools mapped; page ids are not checked.

    Args:
        into: Address of our page 0.
        into_ids: Page ids to write.
        out_of: Address of the other pool's page 0.
        out_of_ids: Page ids to read, one per page to write.
        page_bytes: Bytes of a page, on both sides.
    """

    def __init__(
        self, into: int, into_ids: Sequence[int], out_of: int, out_of_ids: Sequence[int], page_bytes: int
    ) -> None:
        self.into_ids, self.out_of_ids = array("q", into_ids), array("q", out_of_ids)
        self._into, self._out_of, self._page_bytes = into, out_of, page_bytes

    def copy(self, first: int, count: int, *, past_caches: bool, briefly: bool) -> None:
        """Copies some of the pages.

        Args:
            first: Position of the first one.
            count: Pages.
            past_caches: So many that who reads them will not find them there in any case.
            briefly: No other thread runs Python meanwhile: for a caller that must not wait for its turn again.
        """
        if (compiled := _COMPILED_BRIEFLY if briefly else _COMPILED) is not None:
            into_ids, out_of_ids = self.into_ids.buffer_info()[0], self.out_of_ids.buffer_info()[0]
            size = self._page_bytes
            compiled(self._into, self._out_of, into_ids, out_of_ids, first, count, size, past_caches)
            return
        move, size = _MOVE_BRIEFLY if briefly else ctypes.memmove, self._page_bytes
        for i in range(first, first + count):
            move(self._into + self.into_ids[i] * size, self._out_of + self.out_of_ids[i] * size, size)


def _load(kind: type[ctypes.CDLL]) -> _Copy | None:
    for path in (Path(__file__).parent / f"_copy{suffix}" for suffix in EXTENSION_SUFFIXES):
        if path.is_file():
            try:
                copy = getattr(kind(str(path)), _NAME)
            except (OSError, AttributeError) as e:
                _log.warning("KV pages are copied one by one, install pdserve again: %s", e)
                return None
            copy.argtypes, copy.restype = (*_POINTERS, *_NUMBERS), None
            return copy  # type: ignore[no-any-return]
    return None


_COMPILED, _COMPILED_BRIEFLY = _load(ctypes.CDLL), _load(ctypes.PyDLL)
_MOVE_BRIEFLY = ctypes.PyDLL(None).memmove
_MOVE_BRIEFLY.argtypes, _MOVE_BRIEFLY.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None
