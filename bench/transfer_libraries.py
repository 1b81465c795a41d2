"""The transfer libraries in `pdserve bench transfer`: pdserve's planes over them, and they themselves, used directly.

Bare means: the same pools registered once, the same pages, one read of all of them, asked for until it is done. Nothing
is shared out in parts, nothing checked, nothing can be cancelled. This module loads no library before it must.
"""

from __future__ import annotations

import base64
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from pdserve.core.errors import TransferError
from pdserve.kvtransfer import mooncake, nixl
from pdserve.kvtransfer.onesided import OneSidedSink
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.remote_reads import LocalMemory, RemotePool, Runs
from pdserve.kvtransfer.transport import PageSink, PageSource

HOST = "127.0.0.1"


class BareReader(Protocol):
    """A library that reads pages of one source into one pool."""

    def read(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Returns when all pages are there.

        Args:
            sources: Page ids to read.
            targets: Page ids to write, one per source.

        Raises:
            TransferError: The library says that it failed.
        """
        ...

    def close(self) -> None:
        """Gives the library up."""
        ...


@dataclass(frozen=True, slots=True)
class LibraryPlane:
    """A library set up in one way.

    Attributes:
        transport: As in the addresses of its sources.
        packages: It needs one of them.
        source: Makes pdserve's sending end over a pool.
        sink: Makes its receiving end.
        bare: Opens it over a pool, to read from a source.
        environment: Variables that it reads when it is loaded.
    """

    transport: str
    packages: Sequence[str]
    source: Callable[[KvPool], PageSource]
    sink: Callable[[KvPool], PageSink]
    bare: Callable[[KvPool, RemotePool], BareReader]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_installed(self) -> bool:
        """One of its packages is there; whether it loads is seen when it must."""
        return any(importlib.util.find_spec(package) is not None for package in self.packages)


class BareNixl:
    """NIXL, set up as is fastest: descriptors of all pages prepared once, pages in a row as one; no thread beside ours.

    Args:
        pool: What is written.
        source: What is read.
    """

    def __init__(self, pool: KvPool, source: RemotePool) -> None:
        api = nixl.load()
        self._memory, self._source = LocalMemory(pool), source
        self._page_bytes = pool.page_bytes
        self._agent: Any = api.nixl_agent(f"bare-{os.getpid()}", nixl.agent_config(api, serves=False))
        region = [(self._memory.base, self._memory.num_bytes, 0, "")]
        self._registered: Any = self._agent.register_memory(region, "DRAM")
        name = self._agent.add_remote_agent(base64.b64decode(source.peer))
        self._peer = name.decode() if isinstance(name, bytes) else name
        self._here: Any = self._agent.prep_xfer_dlist(
            "NIXL_INIT_AGENT", self._pages(self._memory.base, pool.num_pages), "DRAM"
        )
        self._there: Any = self._agent.prep_xfer_dlist(self._peer, self._pages(source.base, source.num_pages), "DRAM")

    def _pages(self, base: int, num_pages: int) -> Any:
        descriptors = np.zeros((num_pages, 3), np.uint64)
        descriptors[:, 0] = base + np.arange(num_pages, dtype=np.uint64) * np.uint64(self._page_bytes)
        descriptors[:, 1] = self._page_bytes
        return descriptors

    def read(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `BareReader`."""
        runs = _runs(self._source, self._memory.base, sources, targets)
        if len(runs) == 1:
            there, here, size = runs[0]
            into, out = (self._agent.get_xfer_descs([(base, size, 0)], "DRAM") for base in (here, there))
            handle = self._agent.initialize_xfer("READ", into, out, self._peer)
        else:
            into, out = np.asarray(targets, np.int32), np.asarray(sources, np.int32)
            handle = self._agent.make_prepped_xfer("READ", self._here, into, self._there, out)
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise TransferError(f"bare NIXL says {state}", reason="BARE_FAILED")

    def close(self) -> None:
        """See `BareReader`."""
        for prepared in (self._here, self._there):
            self._agent.release_dlist_handle(prepared)
        self._agent.remove_remote_agent(self._peer)
        self._agent.deregister_memory(self._registered)
        self._agent = None


class BareMooncake:
    """Mooncake's transfer engine: one batch of all runs of pages, by the call that returns when it is done.

    Args:
        pool: What is written.
        source: What is read.
    """

    def __init__(self, pool: KvPool, source: RemotePool) -> None:
        self._memory, self._source = LocalMemory(pool), source
        self._engine: Any = mooncake.load().TransferEngine()
        if self._engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") != 0:
            raise TransferError("bare Mooncake does not start; its log says why", reason="BARE_FAILED")

    def read(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `BareReader`."""
        there, here, sizes = _runs(self._source, self._memory.base, sources, targets).table.T.tolist()
        code = self._engine.batch_transfer_sync_read(self._source.peer, here, there, sizes)
        if code != 0:
            raise TransferError(f"bare Mooncake says {code}", reason="BARE_FAILED")

    def close(self) -> None:
        """See `BareReader`."""
        self._engine = None


def _runs(source: RemotePool, base: int, sources: Sequence[int], targets: Sequence[int]) -> Runs:
    return Runs.of_pages(source, base, np.array(sources, np.uint64), np.array(targets, np.uint64))[0]


def _nixl(**environment: str) -> LibraryPlane:
    """NIXL over some transports of UCX, whose variables must be there before it is loaded."""
    return LibraryPlane(
        nixl.NAME,
        nixl.PACKAGES,
        lambda pool: nixl.make_source(pool, environment),
        lambda pool: OneSidedSink(pool, nixl.NAME, nixl.NixlLibrary(pool, environment)),
        BareNixl,
        environment,
    )


LIBRARIES = {
    "nixl-shm": _nixl(UCX_TLS="posix,sysv,cma,self,tcp", UCX_NET_DEVICES="lo"),
    "nixl-tcp": _nixl(UCX_TLS="tcp", UCX_NET_DEVICES="lo"),
    "mooncake": LibraryPlane(
        mooncake.NAME,
        ("mooncake",),
        lambda pool: mooncake.make_source(pool, host=HOST),
        lambda pool: OneSidedSink(pool, mooncake.NAME, mooncake.MooncakeLibrary(pool, host=HOST)),
        BareMooncake,
        {"MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535"},  # else it fails more than 2,048 runs at once
    ),
}
"""Each is measured bare and as a plane of pdserve. Over tcp, and for NIXL over shared memory."""
