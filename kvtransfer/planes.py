"""Builds the data planes that `--kv-transfer-config` names, in its order: the sources of a worker, and the sinks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pdserve.core.config import WorkerConfig
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.tcp import TcpPageSink, TcpPageSource
from pdserve.kvtransfer.transport import PageSink, PageSource


def make_sources(config: WorkerConfig, pool: KvPool, identity_digest: bytes, host: str) -> dict[str, PageSource]:
    """Starts to offer a pool.

    Args:
        config: The worker's.
        pool: What is served.
        identity_digest: Readers must have the same.
        host: Address to listen on.

    Returns:
        Sources by plane, most wanted first; the caller closes them.

    Raises:
        ConfigError: One cannot work here.
    """
    makers: Mapping[str, Callable[[], PageSource]] = {
        "tcp": lambda: TcpPageSource(
            pool,
            identity_digest,
            host=host,
            port=config.data_port,
            advertise_address=config.advertise_data_address,
        ),
    }
    sources: dict[str, PageSource] = {}
    try:
        for name in config.kv_transfer.transports:
            sources[name] = makers[name]()
    except BaseException:
        close_sources(sources)
        raise
    return sources


def make_sinks(config: WorkerConfig, pool: KvPool, identity_digest: bytes) -> dict[str, PageSink]:
    """Makes what pulls into a pool.

    Args:
        config: The worker's.
        pool: What is written.
        identity_digest: Sources must have the same.

    Returns:
        Sinks by plane, most wanted first; `TransferClient.close` closes them.
    """
    makers: Mapping[str, Callable[[], PageSink]] = {
        "tcp": lambda: TcpPageSink(
            pool, identity_digest, idle_s=config.pull_idle_s, min_bytes_per_s=config.pull_min_rate * 1e6
        ),
    }
    return {name: makers[name]() for name in config.kv_transfer.transports}


def close_sources(sources: Mapping[str, PageSource]) -> None:
    """Ends all; waits for their threads."""
    for source in sources.values():
        source.close()


def data_address(sources: Mapping[str, PageSource]) -> str | None:
    """host:port that other hosts reach pages at; None when no plane of these goes beyond this host."""
    return sources["tcp"].address if "tcp" in sources else None
