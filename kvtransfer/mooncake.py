"""The mooncake transport: pages are read through Mooncake's transfer engine (RDMA, tcp), host memory to host memory.

Each run of pages is a batch of its own: a batch of several says that it failed while others of it may still write.
What waits for a peer (the handshake, connecting) is done in threads; nothing here uses Mooncake's own time limit, which
gives up reads that still write.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import secrets
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from pdserve.core.errors import ConfigError, TransferError
from pdserve.core.extras import install_command
from pdserve.kvtransfer.pool import PageMemory
from pdserve.kvtransfer.remote_reads import LocalMemory, OneSidedSource, ReadState, RemotePool, Run
from pdserve.kvtransfer.tasks import submit

NAME = "mooncake"
MAX_OUTSTANDING = 64
"""Runs of one read that Mooncake has at a time; over tcp it queues 1,024 for a peer, and fails what does not fit."""
CHUNK = 16
"""Runs that one thread begins one after the other."""
LOOKED_AT = 8
"""A look ends at so many runs that go on: Mooncake takes them in order, over tcp four at a time."""
BEGIN_S = 200e-6
"""How long a look waits for threads that begin runs when there is nothing else to look at."""
MAX_THREADS = 32

_log = logging.getLogger(__name__)


def check_installed() -> None:
    """Refuses to go on without the package; it is not imported.

    Raises:
        ConfigError: It is not there.
    """
    if importlib.util.find_spec("mooncake") is None:
        raise ConfigError(
            "--kv-transfer-config: transport mooncake needs the package mooncake-transfer-engine-non-cuda: "
            f"{install_command('server,mooncake')}, or leave mooncake out"
        )


def load() -> Any:
    """Mooncake's Python module.

    Raises:
        ConfigError: It is not installed or does not load.
    """
    check_installed()
    try:
        return importlib.import_module("mooncake.engine")
    except (ImportError, OSError) as e:
        raise ConfigError(
            f"--kv-transfer-config: transport mooncake does not load: {e} (it needs Debian's libibverbs1)"
        ) from e


class _Engine:
    """A transfer engine, with a pool registered where others read it or the devices need it."""

    def __init__(self, memory: PageMemory, host: str, protocol: str, devices: str, *, register: bool) -> None:
        self.memory = LocalMemory(memory)
        self.engine: Any = load().TransferEngine()
        if self.engine.initialize(host, "P2PHANDSHAKE", protocol, devices) != 0:
            raise ConfigError(
                f"--kv-transfer-config: transport mooncake: the engine does not start on {host} with protocol "
                f"{protocol!r} and devices {devices!r}; its log says why"
            )
        self._registered = register
        if register and self.engine.register_memory(self.memory.base, self.memory.num_bytes) != 0:
            raise ConfigError("--kv-transfer-config: transport mooncake: the KV pool cannot be registered")
        self.peer = f"{host}:{self.engine.get_rpc_port()}"

    def close(self) -> None:
        """Ends its threads."""
        if self._registered:
            self.engine.unregister_memory(self.memory.base)
        self.engine = None


def make_source(memory: PageMemory, *, host: str, protocol: str = "tcp", devices: str = "") -> OneSidedSource:
    """Offers a pool.

    Args:
        memory: What is served.
        host: Address that readers reach this process at.
        protocol: "tcp" or "rdma".
        devices: Devices to use, separated by commas; empty: all.

    Raises:
        ConfigError: Mooncake cannot work here.
    """
    engine = _Engine(memory, host, protocol, devices, register=True)
    pool = RemotePool(NAME, secrets.token_hex(8), engine.peer, engine.memory.base, memory.num_pages, memory.page_bytes)
    return OneSidedSource(pool, engine.close)


class _MooncakeRead:
    """Runs of one part, at most `MAX_OUTSTANDING` given to Mooncake at a time."""

    def __init__(self, engine: Any, peer: str, runs: Sequence[Run], threads: ThreadPoolExecutor) -> None:
        self._engine, self._peer, self._threads = engine, peer, threads
        self._waiting = deque(runs)
        self._submitting: dict[Future[list[int]], int] = {}
        self._batches: dict[int, None] = {}
        self._failed = False
        self._fill()

    def poll(self) -> ReadState:
        """See `Read`."""
        if self._submitting and not self._batches:
            wait(self._submitting, BEGIN_S, FIRST_COMPLETED)  # they need the interpreter, too
        for future in [f for f in self._submitting if f.done()]:
            del self._submitting[future]
            for batch in future.result():
                if batch:
                    self._batches[batch] = None
                else:
                    self._failed = True  # nothing was begun
        num_going_on = 0
        for batch in list(self._batches):
            if (code := self._engine.transfer_check_status(batch)) in (1, -1):
                del self._batches[batch]
                self._failed = self._failed or code < 0
            elif (num_going_on := num_going_on + 1) == LOOKED_AT:
                break
        self._fill()
        if self._submitting or self._batches:
            return ReadState.PENDING
        return ReadState.FAILED if self._failed else ReadState.DONE

    def _fill(self) -> None:
        room = MAX_OUTSTANDING - len(self._batches) - sum(self._submitting.values())
        while self._waiting and not self._failed and room > 0:
            runs = [self._waiting.popleft() for _ in range(min(CHUNK, room, len(self._waiting)))]
            room -= len(runs)
            try:
                self._submitting[submit(self._threads, self._submit, runs)] = len(runs)
            except TransferError as e:
                _log.error("a Mooncake read failed: %s", e.message)
                self._failed = True  # of these runs nothing was begun; the others end

    def _submit(self, runs: Sequence[Run]) -> list[int]:
        """Begins runs, up to one that cannot be; each gets a batch, that one 0."""
        begun = list[int]()
        for run in runs:
            begun.append(self._engine.batch_transfer_async_read(self._peer, [run.local], [run.remote], [run.num_bytes]))
            if not begun[-1]:
                break
        return begun


class MooncakeLibrary:
    """`Library` of the reading end.

    Args:
        memory: The pool to write into.
        host: Address of this process.
        protocol: See `make_source`.
        devices: See `make_source`.

    Raises:
        ConfigError: Mooncake cannot work here.
    """

    def __init__(self, memory: PageMemory, *, host: str, protocol: str = "tcp", devices: str = "") -> None:
        self._arguments = (memory, host, protocol, devices)
        self._instances: dict[str, str] = {}
        self._engine = self._open()
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="kv-mooncake-begin")

    def begin(self, source: RemotePool, runs: Sequence[Run]) -> _MooncakeRead:
        """See `Library`."""
        if self._instances.setdefault(source.peer, source.instance) != source.instance:
            try:
                self._engine, self._instances = self._open(), {source.peer: source.instance}
            except ConfigError as e:
                raise TransferError(f"a new process is at {source.peer}, and {e.message}", reason="NO_ENGINE") from e
        return _MooncakeRead(self._engine.engine, source.peer, runs, self._threads)

    def _open(self) -> _Engine:
        """An engine that knows no source yet: one that does never asks again, though another process may listen there.

        Over tcp the pool is not registered: Mooncake lets strangers write into what is.
        """
        return _Engine(*self._arguments, register=self._arguments[2] != "tcp")

    def forget(self, source: RemotePool) -> None:
        """See `Library`."""

    def close(self) -> None:
        """See `Library`."""
        self._threads.shutdown()
        self._engine.close()
