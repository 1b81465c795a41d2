"""Builds the data planes that `--kv-transfer-config` names, in its order: the sources of a worker, and the sinks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from pdserve.core.background import in_own_thread
from pdserve.core.config import WorkerConfig
from pdserve.core.errors import ConfigError
from pdserve.core.net import advertised_address
from pdserve.core.tls import Tls
from pdserve.kvtransfer import mooncake, nixl
from pdserve.kvtransfer.onesided import OneSidedSink
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.remote_reads import Library
from pdserve.kvtransfer.shm import ShmPageSink, ShmPageSource
from pdserve.kvtransfer.tcp import TcpPageSink, TcpPageSource
from pdserve.kvtransfer.transport import PageSink, PageSource

_log = logging.getLogger(__name__)

NEVER_IN_THE_CLEAR = ("tcp", "shm")
"""Planes that encrypt where the process has TLS, or that do not leave the host."""


def check_encryption(transports: Iterable[str], tls: Tls | None) -> None:
    """Refuses planes that would send pages in the clear where TLS is required.

    Raises:
        ConfigError: Names them.
    """
    clear = [name for name in transports if name not in NEVER_IN_THE_CLEAR]
    if clear and tls is not None and tls.required:
        names = ", ".join(clear)
        raise ConfigError(f"--require-tls: {names} would send pages in the clear; take it out of --kv-transfer-config")


def check_planes(transports: Iterable[str], tls: Tls | None) -> None:
    """Refuses planes that cannot be had here: asked before a model is loaded for nothing.

    Raises:
        ConfigError: Names them, or says how to install what is missing.
    """
    names = tuple(transports)
    check_encryption(names, tls)
    check_installed(names)


def check_installed(transports: Iterable[str]) -> None:
    """Refuses planes whose library is not there.

    Raises:
        ConfigError: Says how to install it.
    """
    named = set(transports)
    if nixl.NAME in named:
        nixl.find_package()
    if mooncake.NAME in named:
        mooncake.check_installed()


def make_sources(
    config: WorkerConfig, pool: KvPool, identity_digest: bytes, host: str, tls: Tls | None
) -> dict[str, PageSource]:
    """Starts to offer a pool.

    Args:
        config: The worker's.
        pool: What is served.
        identity_digest: Readers must have the same.
        host: Address to listen on.
        tls: What this process shows to its peers and asks of them; None: plain connections.

    Returns:
        Sources by plane, most wanted first; the caller closes them.

    Raises:
        ConfigError: One cannot work here; by default shm is left out then.
    """
    check_encryption(config.kv_transfer.transports, tls)
    moon = config.kv_transfer.mooncake
    makers: Mapping[str, Callable[[], PageSource]] = {
        "shm": lambda: ShmPageSource(pool, identity_digest),
        "tcp": lambda: TcpPageSource(
            pool,
            identity_digest,
            host=host,
            port=config.data_port,
            advertise_address=config.advertise_data_address,
            tls=tls,
        ),
        "nixl": lambda: nixl.make_source(pool, config.kv_transfer.nixl.environment()),
        "mooncake": lambda: mooncake.make_source(
            pool,
            host=moon.host or (config.advertise_data_address or advertised_address(host, 0)).rpartition(":")[0],
            protocol=moon.protocol,
            devices=moon.devices,
        ),
    }
    sources: dict[str, PageSource] = {}
    try:
        for name in config.kv_transfer.transports:
            try:
                sources[name] = makers[name]()
            except ConfigError as e:
                if name != "shm" or config.kv_transfer_config is not None:
                    raise
                _log.warning("%s", e.message)  # nobody asked for it; the other planes serve
    except BaseException:
        close_sources(sources)
        raise
    return sources


def make_sink(config: WorkerConfig, pool: KvPool, identity_digest: bytes, tls: Tls | None, name: str) -> PageSink:
    """Makes what pulls into a pool.

    Args:
        config: The worker's.
        pool: What is written.
        identity_digest: Sources must have the same.
        tls: As for `make_sources`.
        name: The plane.

    Returns:
        What the caller closes.

    Raises:
        ConfigError: It cannot work here.
    """
    check_encryption(config.kv_transfer.transports, tls)
    idle_s, rate, moon = config.pull_idle_s, config.pull_min_rate * 1e6, config.kv_transfer.mooncake

    def one_sided(name: str, library: Library) -> PageSink:
        return OneSidedSink(pool, name, library, idle_s=idle_s, min_bytes_per_s=rate)

    makers: Mapping[str, Callable[[], PageSink]] = {
        "shm": lambda: ShmPageSink(pool, identity_digest, idle_s=idle_s),
        "tcp": lambda: TcpPageSink(pool, identity_digest, idle_s=idle_s, min_bytes_per_s=rate, tls=tls),
        "nixl": lambda: one_sided(nixl.NAME, nixl.NixlLibrary(pool, config.kv_transfer.nixl.environment())),
        "mooncake": lambda: one_sided(
            mooncake.NAME,
            mooncake.MooncakeLibrary(pool, host=moon.host or "127.0.0.1", protocol=moon.protocol, devices=moon.devices),
        ),
    }
    return makers[name]()


async def open_sinks(
    config: WorkerConfig, pool: KvPool, identity_digest: bytes, tls: Tls | None
) -> dict[str, PageSink]:
    """Makes a sink for each plane of the configuration, in threads.

    Returns:
        Sinks by plane, most wanted first; `TransferClient.close` closes them.

    Raises:
        ConfigError: As `make_sink`; those made before are closed.
    """
    sinks: dict[str, PageSink] = {}
    try:
        for name in config.kv_transfer.transports:
            sinks[name] = await in_own_thread(make_sink, config, pool, identity_digest, tls, name)
    except BaseException:
        for sink in sinks.values():
            await sink.close()
        raise
    return sinks


def close_sources(sources: Mapping[str, PageSource]) -> None:
    """Ends all; waits for their threads."""
    for source in sources.values():
        source.close()


def data_address(sources: Mapping[str, PageSource]) -> str | None:
    """host:port that other hosts reach pages at; None when no plane of these goes beyond this host."""
    return sources["tcp"].address if "tcp" in sources else None
