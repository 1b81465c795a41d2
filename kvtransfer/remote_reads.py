"""Transfer libraries that copy a peer's memory by themselves, as `onesided` uses them, and their source.

The source registers its pool once and does nothing more: it sees, refuses and stops no read. What readers must
know of it is a `RemotePool`, which travels as the data address in the welcome of an accepted control stream.
"""

from __future__ import annotations

import ctypes
import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum, auto
from itertools import pairwise
from typing import NamedTuple, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from pdserve.core.errors import ConfigError, TransferError
from pdserve.kvtransfer.pool import PageMemory
from pdserve.kvtransfer.transport import SourcePageRef

MAX_ADDRESS_BYTES = 64 << 10
_FIRST = np.zeros(1, np.intp)


@dataclass(frozen=True, slots=True)
class RemotePool:
    """What a reader must know of a source.

    Attributes:
        transport: Which library.
        instance: Random, per source: another process at the same place has another.
        peer: What the library needs to find the source.
        base: Address of page 0 in the source's memory.
        num_pages: Pages of the source's pool.
        page_bytes: Bytes of one page.
    """

    transport: str
    instance: str
    peer: str
    base: int
    num_pages: int
    page_bytes: int

    def encode(self) -> str:
        """As one line of text."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def decode(cls, address: str, transport: str) -> RemotePool:
        """Reads what a source sent.

        Raises:
            TransferError: It is not the address of such a source.
        """
        try:
            if len(address) > MAX_ADDRESS_BYTES:
                raise ValueError(f"{len(address)} bytes")
            fields = json.loads(address)
            name, instance, peer = (str(fields.pop(name)) for name in ("transport", "instance", "peer"))
            base, num_pages, page_bytes = (int(fields.pop(name)) for name in ("base", "num_pages", "page_bytes"))
            pool = cls(name, instance, peer, base, num_pages, page_bytes)
            if fields or pool.transport != transport:
                raise ValueError(f"transport {pool.transport!r}, {len(fields)} more fields")
            if min(base, num_pages, page_bytes) < 1 or base + pool.num_bytes > 1 << 64:
                raise ValueError(f"{num_pages} pages of {page_bytes} bytes from {base}")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as e:
            raise TransferError(f"not a data address of {transport}: {e}", reason="BAD_ADDRESS") from e
        return pool

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool."""
        return self.num_pages * self.page_bytes


class LocalMemory:
    """A pool as one run of addresses; the memory stays mapped as long as this lives.

    Attributes:
        base: Address of page 0.
        num_bytes: Bytes of all pages.

    Raises:
        ConfigError: The pool's pages do not follow each other in memory.
    """

    def __init__(self, memory: PageMemory) -> None:
        self._views = memory.page(0), memory.page(memory.num_pages - 1)
        self.base, last = (ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in self._views)
        self.num_bytes = memory.num_pages * memory.page_bytes
        if last != self.base + self.num_bytes - memory.page_bytes:
            raise ConfigError("KV pool: its pages do not follow each other in memory, as one-sided transports need")


class Run(NamedTuple):
    """Bytes that follow each other on both sides: addresses there and here, and how many."""

    remote: int
    local: int
    num_bytes: int


class Runs(Sequence[Run]):
    """Runs as an array, for what would take too long one by one.

    Args:
        table: `[num_runs, 3]`, columns as the fields of `Run`.
    """

    def __init__(self, table: NDArray[np.uint64]) -> None:
        self.table = table

    @classmethod
    def of_pages(
        cls,
        source: RemotePool,
        base: int,
        sources: NDArray[np.uint64],
        destinations: NDArray[np.uint64],
        pages_per_part: int | None = None,
    ) -> list[Runs]:
        """Pages that are neighbours on both sides become one run.

        Args:
            source: Where they are read.
            base: Address of page 0 here, whose pages have the same size.
            sources: `[num_pages]`, at least one.
            destinations: `[num_pages]`.
            pages_per_part: Pages of a part, of which only the last may have fewer; None: all are one part.

        Returns:
            Runs by part.
        """
        new = (sources[1:] != sources[:-1] + 1) | (destinations[1:] != destinations[:-1] + 1)
        begins = np.arange(0, len(sources), pages_per_part or len(sources))
        new[begins[1:] - 1] = True
        first = np.concatenate((_FIRST, new.nonzero()[0] + 1))
        table, size = np.empty((len(first), 3), np.uint64), source.page_bytes
        table[:, 0] = sources[first] * size + source.base
        table[:, 1] = destinations[first] * size + base
        table[:-1, 2] = (first[1:] - first[:-1]) * size
        table[-1, 2] = (len(sources) - int(first[-1])) * size
        bounds = [*np.searchsorted(first, begins).tolist(), len(first)]
        return [cls(table[at:end]) for at, end in pairwise(bounds)]

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[Run]:
        return map(Run._make, self.table.tolist())

    @overload
    def __getitem__(self, index: int) -> Run: ...

    @overload
    def __getitem__(self, index: slice) -> Runs: ...

    def __getitem__(self, index: int | slice) -> Run | Runs:
        if isinstance(index, slice):
            return Runs(self.table[index])
        return Run(*self.table[index].tolist())


class ReadState(Enum):
    """Where a read is."""

    PENDING = auto()  # it may write
    DONE = auto()  # all is there, nothing writes any more
    FAILED = auto()  # nothing writes any more
    UNKNOWN = auto()  # it failed, and may write for as long as this process lives


class Read(Protocol):
    """One read that a library was given."""

    def poll(self) -> ReadState:
        """Where it is; quick. Not called again after anything but PENDING."""
        ...


class Library(Protocol):
    """A transfer library, opened over this process's pool. Called by one thread at a time."""

    def begin(self, source: RemotePool, runs: Sequence[Run]) -> Read:
        """Starts a read; finds the source first when it is new.

        Raises:
            TransferError: Nothing was started.
        """
        ...

    def forget(self, source: RemotePool) -> None:
        """Drops what is known of a source of which no read is outstanding; it may be unknown."""
        ...

    def close(self) -> None:
        """Gives everything up; no read is outstanding."""
        ...


class OneSidedSource:
    """A `PageSource` whose pages are read without its doing.

    Args:
        pool: What readers must know.
        close: Gives the library up.
    """

    def __init__(self, pool: RemotePool, close: Callable[[], None]) -> None:
        self._address = pool.encode()
        self._close: Callable[[], None] | None = close

    @property
    def address(self) -> str:
        """See `PageSource`: whoever has it can read the pool, so it is told in welcomes only."""
        return self._address

    def new_reader(self) -> bytes:
        """See `PageSource`; libraries ask for no token."""
        return secrets.token_bytes(16)

    def drop_reader(self, token: bytes) -> None:
        """See `PageSource`; what a reader was told cannot be taken back while this process lives."""

    def publish(self, transfer_id: str, token: bytes, pages: Sequence[SourcePageRef]) -> None:
        """See `PageSource`; readers hear of pages from the control stream alone."""

    async def withdraw(self, transfer_id: str) -> None:
        """See `PageSource`. A read in flight gets whatever the pages hold by then, and fails by its checksums."""

    def close(self) -> None:
        """Ends all reads. Idempotent."""
        if self._close is not None:
            self._close()
            self._close = None
