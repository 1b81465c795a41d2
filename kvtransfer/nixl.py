"""The nixl transport: pages are read through NIXL's UCX backend (RDMA, shared memory, tcp), host memory to host memory.

Each end has an agent with a random name and its pool registered once. An agent has threads: no process may fork after
it made one (spawn, or exec at once). One of the source's answers reads, and sleeps between them; as NIXL's Python API
sets it up it would take a whole core, also while nobody reads. The reading agent has no such thread: asking for a read
is what moves it on, in the sink's thread. What NIXL says of a failed read is trusted in one case only: after a
disconnect UCX has closed the connection and purged what was outstanding. After any other failure a read counts as
outstanding.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import importlib
import importlib.util
import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.core.errors import ConfigError, TransferError
from pdserve.core.extras import install_command
from pdserve.kvtransfer.pool import PageMemory
from pdserve.kvtransfer.remote_reads import LocalMemory, OneSidedSource, ReadState, RemotePool, Run, Runs

NAME = "nixl"
PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")

PROGRESS_US = 10_000
"""A source's thread is woken by what arrives; in case it was not, it looks after so long."""

_log = logging.getLogger(__name__)
_WORDS = {"DONE": ReadState.DONE, "PROC": ReadState.PENDING}


def find_package() -> str:
    """The installed package with NIXL; it is not imported.

    Raises:
        ConfigError: There is none.
    """
    package = next((p for p in PACKAGES if importlib.util.find_spec(p) is not None), None)
    if package is None:
        raise ConfigError(
            f"--kv-transfer-config: transport nixl needs the package nixl-cu13: {install_command('server,nixl')}, or "
            "leave nixl out"
        )
    return package


def load() -> Any:
    """NIXL's Python module.

    Raises:
        ConfigError: It is not installed or does not load.
    """
    package = find_package()
    raises = logging.raiseExceptions
    try:
        module = importlib.import_module(f"{package}._api")
    except (ImportError, OSError, RuntimeError) as e:
        raise ConfigError(f"--kv-transfer-config: transport nixl: the package {package} does not load: {e}") from e
    logger, logging.raiseExceptions = logging.getLogger("nixl"), raises
    for handler in list(logger.handlers):
        logger.removeHandler(handler)  # it writes to stdout, where workers say READY
    logger.propagate = True
    return module


def agent_config(api: Any, *, serves: bool) -> Any:
    """How an agent is set up that serves reads, or that begins some, in one thread at a time."""
    sync = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
    return api.nixl_agent_config(enable_prog_thread=serves, backends=["UCX"], sync_mode=sync)


@contextlib.contextmanager
def _sleeping_progress(bindings: Any) -> Iterator[None]:
    """Agents made meanwhile have a progress thread that sleeps: the Python API knows no option for it."""
    known = bindings.nixlAgentConfig

    class Config(known):  # type: ignore[misc, valid-type]
        @property
        def pthrDelay(self) -> int:
            return int(known.pthrDelay.__get__(self))

        @pthrDelay.setter
        def pthrDelay(self, delay_us: int) -> None:
            known.pthrDelay.__set__(self, delay_us or PROGRESS_US)

    bindings.nixlAgentConfig = Config
    try:
        yield
    finally:
        bindings.nixlAgentConfig = known


class _Agent:
    """An agent with a pool registered, over UCX alone; `serves` reads of others, or begins its own in one thread."""

    def __init__(self, memory: PageMemory, environment: dict[str, str], *, serves: bool) -> None:
        os.environ.update(environment)  # UCX reads nothing else, when its first context is made
        api = load()
        bindings: Any = api.nixlBind
        self.lost: type[Exception] = bindings.nixlRemoteDisconnectError
        found = [value for value in vars(bindings).values() if isinstance(value, type) and issubclass(value, Exception)]
        self.errors: tuple[type[Exception], ...] = (RuntimeError, KeyError, *found)
        self.memory = LocalMemory(memory)
        self.name = f"pdserve-{secrets.token_hex(8)}"
        try:
            with _sleeping_progress(bindings):
                self.nixl: Any = api.nixl_agent(self.name, agent_config(api, serves=serves))
            region = [(self.memory.base, self.memory.num_bytes, 0, "")]
            self._registered: Any = self.nixl.register_memory(region, "DRAM", backends=["UCX"])
        except self.errors as e:
            raise ConfigError(f"--kv-transfer-config: transport nixl: no UCX agent over the KV pool: {e!r}") from e

    def descriptors(self, runs: NDArray[np.uint64], address: int) -> Any:
        """The addresses in a column of runs, with their sizes, as NIXL wants them."""
        found = np.zeros((len(runs), 3), np.uint64)  # the last column: number of the device
        found[:, :2] = runs[:, (address, 2)]
        return self.nixl.get_xfer_descs(found, "DRAM")

    def close(self) -> None:
        """Ends its threads."""
        try:
            self.nixl.deregister_memory(self._registered, backends=["UCX"])
        except self.errors as e:
            _log.warning("NIXL does not deregister the KV pool, and ends all the same: %r", e)
        self._registered = self.nixl = None


def make_source(memory: PageMemory, environment: dict[str, str]) -> OneSidedSource:
    """Offers a pool.

    Args:
        memory: What is served.
        environment: Variables of UCX, set for the whole process: UCX_TLS, UCX_NET_DEVICES.

    Raises:
        ConfigError: NIXL or UCX cannot work here.
    """
    agent = _Agent(memory, environment, serves=True)
    peer = base64.b64encode(agent.nixl.get_agent_metadata()).decode()
    pool = RemotePool(NAME, agent.name, peer, agent.memory.base, memory.num_pages, memory.page_bytes)
    return OneSidedSource(pool, agent.close)


class _NixlRead:
    """A posted list of descriptors; its handle lives until nothing writes any more."""

    def __init__(self, agent: _Agent, handle: Any) -> None:
        self._agent, self._handle = agent, handle
        self._state = self._ask(agent.nixl.transfer)

    def poll(self) -> ReadState:
        """See `Read`."""
        if self._state is ReadState.PENDING:
            self._state = self._ask(self._agent.nixl.check_xfer_state)
        if self._state in (ReadState.DONE, ReadState.FAILED):
            try:
                self._agent.nixl.release_xfer_handle(self._handle)
            except self._agent.errors as e:
                _log.warning("NIXL keeps the handle of a read that has ended: %r", e)
        return self._state

    def _ask(self, call: Any) -> ReadState:
        try:
            return _WORDS.get(call(self._handle), ReadState.UNKNOWN)
        except self._agent.lost:
            return ReadState.FAILED
        except self._agent.errors as e:
            _log.error("a NIXL read failed: %r", e)
            return ReadState.UNKNOWN


class NixlLibrary:
    """`Library` of the reading end.

    Args:
        memory: The pool to write into.
        environment: See `make_source`.

    Raises:
        ConfigError: NIXL or UCX cannot work here.
    """

    def __init__(self, memory: PageMemory, environment: dict[str, str]) -> None:
        self._agent = _Agent(memory, environment, serves=False)
        self._names: dict[RemotePool, str] = {}

    def begin(self, source: RemotePool, runs: Sequence[Run]) -> _NixlRead:
        """See `Library`."""
        agent = self._agent
        try:
            name = self._names.get(source) or self._add(source)
            table = runs.table if isinstance(runs, Runs) else np.array(runs, np.uint64)
            remote, local = agent.descriptors(table, 0), agent.descriptors(table, 1)
            handle = agent.nixl.initialize_xfer("READ", local, remote, name, backends=["UCX"])
        except agent.errors as e:
            raise TransferError(f"nixl cannot reach the source {source.instance}: {e!r}", reason="PEER_GONE") from e
        return _NixlRead(agent, handle)

    def _add(self, source: RemotePool) -> str:
        try:
            metadata = base64.b64decode(source.peer, validate=True)
        except binascii.Error as e:
            raise TransferError(f"not a data address of nixl: {e}", reason="BAD_ADDRESS") from e
        name = self._agent.nixl.add_remote_agent(metadata)
        self._names[source] = name.decode() if isinstance(name, bytes) else name
        return self._names[source]

    def forget(self, source: RemotePool) -> None:
        """See `Library`. A source must be removed before it is added again, also when it is lost."""
        name = self._names.pop(source, None)
        if name is None:
            return
        try:
            self._agent.nixl.remove_remote_agent(name)
        except self._agent.errors as e:
            _log.info("NIXL had forgotten the source %s: %r", source.instance, e)

    def close(self) -> None:
        """See `Library`."""
        for source in list(self._names):
            self.forget(source)
        self._agent.close()
