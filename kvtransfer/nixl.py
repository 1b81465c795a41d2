"""The nixl transport: pages are read through NIXL's UCX backend (RDMA, shared memory, tcp), host memory to host memory.

Each end has an agent with a random name and its pool registered once. An agent has threads: no process may fork after
it made one (spawn, or exec at once). What NIXL says of a failed read is trusted in one case only: after a disconnect
UCX has closed the connection and purged what was outstanding. After any other failure a read counts as outstanding.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import importlib.util
import logging
import os
import secrets
from collections.abc import Sequence
from typing import Any

from pdserve.core.errors import ConfigError, TransferError
from pdserve.kvtransfer.pool import PageMemory
from pdserve.kvtransfer.remote_reads import LocalMemory, OneSidedSource, ReadState, RemotePool, Run

NAME = "nixl"
PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")

_log = logging.getLogger(__name__)
_WORDS = {"DONE": ReadState.DONE, "PROC": ReadState.PENDING}


def load() -> Any:
    """NIXL's Python module.

    Raises:
        ConfigError: It is not installed or does not load.
    """
    package = next((p for p in PACKAGES if importlib.util.find_spec(p) is not None), None)
    if package is None:
        raise ConfigError(
            "--kv-transfer-config: transport nixl needs the package nixl-cu13: pip install 'pdserve[nixl]', or do not "
            "name it"
        )
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


class _Agent:
    """An agent with a pool registered, over UCX alone."""

    def __init__(self, memory: PageMemory, environment: dict[str, str]) -> None:
        os.environ.update(environment)  # UCX reads nothing else, when its first context is made
        api = load()
        bindings: Any = api.nixlBind
        self.lost: type[Exception] = bindings.nixlRemoteDisconnectError
        found = [value for value in vars(bindings).values() if isinstance(value, type) and issubclass(value, Exception)]
        self.errors: tuple[type[Exception], ...] = (RuntimeError, KeyError, *found)
        self.memory = LocalMemory(memory)
        self.name = f"pdserve-{secrets.token_hex(8)}"
        try:
            self.nixl: Any = api.nixl_agent(self.name, api.nixl_agent_config(backends=["UCX"]))
            region = [(self.memory.base, self.memory.num_bytes, 0, "")]
            self._registered: Any = self.nixl.register_memory(region, "DRAM", backends=["UCX"])
        except self.errors as e:
            raise ConfigError(f"--kv-transfer-config: transport nixl: no UCX agent over the KV pool: {e!r}") from e

    def descriptors(self, parts: Sequence[tuple[int, int]]) -> Any:
        """Address and size of each part as NIXL wants them."""
        return self.nixl.get_xfer_descs([(address, num_bytes, 0) for address, num_bytes in parts], "DRAM")

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
    agent = _Agent(memory, environment)
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
        self._agent = _Agent(memory, environment)
        self._names: dict[RemotePool, str] = {}

    def begin(self, source: RemotePool, runs: Sequence[Run]) -> _NixlRead:
        """See `Library`."""
        agent = self._agent
        try:
            name = self._names.get(source) or self._add(source)
            local = agent.descriptors([(run.local, run.num_bytes) for run in runs])
            remote = agent.descriptors([(run.remote, run.num_bytes) for run in runs])
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
