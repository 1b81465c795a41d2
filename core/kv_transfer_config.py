"""KvTransferConfig: how a worker's KV pages travel. `--kv-transfer-config` says it: JSON, or a file with it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from pdserve.core.errors import ConfigError

FLAG = "--kv-transfer-config"
TRANSPORTS = ("shm", "tcp")
"""Names of the data planes, the default order of preference."""
ON_REQUEST = ("nixl", "mooncake")
"""Those that need a package of their own and a network that is trusted: used where they are named."""

Options = TypeVar("Options")


@dataclass(frozen=True, kw_only=True)
class NixlOptions:
    """How NIXL's UCX is set up, for the whole process; empty values leave it to UCX and the environment.

    Attributes:
        ucx_tls: UCX_TLS, its transports, e.g. "rc,cuda,self" or "tcp".
        ucx_net_devices: UCX_NET_DEVICES, e.g. "mlx5_0:1" or "eth0".
    """

    ucx_tls: str = ""
    ucx_net_devices: str = ""

    def environment(self) -> dict[str, str]:
        """As variables that UCX reads."""
        variables = {"UCX_TLS": self.ucx_tls, "UCX_NET_DEVICES": self.ucx_net_devices}
        return {name: value for name, value in variables.items() if value}


@dataclass(frozen=True, kw_only=True)
class MooncakeOptions:
    """How Mooncake's transfer engine is set up.

    Attributes:
        host: Address that the other workers reach this machine at; empty: that of the data plane.
        protocol: "tcp" or "rdma".
        devices: Devices to use, separated by commas; empty: all.
    """

    host: str = ""
    protocol: str = "tcp"
    devices: str = ""

    def __post_init__(self) -> None:
        if self.protocol not in ("tcp", "rdma"):
            raise ConfigError(f"{FLAG}: mooncake: protocol is {self.protocol!r}; it must be tcp or rdma")
        if self.protocol == "rdma" and not self.host:
            raise ConfigError(f"{FLAG}: mooncake: protocol rdma needs host, this machine's address for other workers")


@dataclass(frozen=True, kw_only=True)
class KvTransferConfig:
    """How pages travel.

    Attributes:
        transports: Data planes that this worker has, most wanted first; a pair uses the first of decode's that prefill
            has too and that can work between them.
        max_quarantined_pages: With more pages that failed reads may write, a decode worker takes nothing new; None: a
            quarter of its pages.
        nixl: Of the transport nixl.
        mooncake: Of the transport mooncake.
    """

    transports: tuple[str, ...] = TRANSPORTS
    max_quarantined_pages: int | None = None
    nixl: NixlOptions = field(default_factory=NixlOptions)
    mooncake: MooncakeOptions = field(default_factory=MooncakeOptions)

    def __post_init__(self) -> None:
        known = (*TRANSPORTS, *ON_REQUEST)
        if unknown := [name for name in self.transports if name not in known]:
            raise ConfigError(f"{FLAG}: transports names {', '.join(map(repr, unknown))}; there are {', '.join(known)}")
        if self.max_quarantined_pages is not None and self.max_quarantined_pages < 0:
            raise ConfigError(f"{FLAG}: max_quarantined_pages is {self.max_quarantined_pages}; it must be at least 0")
        if not self.transports or len(set(self.transports)) != len(self.transports):
            raise ConfigError(f"{FLAG}: transports is {list(self.transports)}; name at least one, and each once")

    @classmethod
    def parse(cls, text: str | None) -> KvTransferConfig:
        """Reads the flag's value.

        Args:
            text: A JSON object or the path of a file with one; None: the defaults.

        Raises:
            ConfigError: It cannot be read, has an unknown key or a value out of range, or options of a plane that it
                does not name.
        """
        if text is None:
            return cls()
        raw = _read(text)
        _check_keys(cls, raw, FLAG)
        transports = raw.get("transports", list(TRANSPORTS))
        if not isinstance(transports, list) or not all(isinstance(name, str) for name in transports):
            raise ConfigError(f"{FLAG}: transports is {json.dumps(transports)}; it must be a list of names")
        pages = raw.get("max_quarantined_pages")
        if not (pages is None or type(pages) is int):
            raise ConfigError(f"{FLAG}: max_quarantined_pages is {json.dumps(pages)}; it must be a number of pages")
        config = cls(
            transports=tuple(transports),
            max_quarantined_pages=pages,
            nixl=_options(NixlOptions, raw.get("nixl"), "nixl"),
            mooncake=_options(MooncakeOptions, raw.get("mooncake"), "mooncake"),
        )
        if idle := [name for name in ON_REQUEST if raw.get(name) and name not in transports]:
            raise ConfigError(f"{FLAG}: {idle[0]} has options, but transports is {transports}; name it there")
        return config


def _options(cls: type[Options], raw: Any, name: str) -> Options:
    """The part of one transport: names and texts."""
    if raw is None:
        return cls()
    if not isinstance(raw, dict) or not all(isinstance(value, str) and value.isprintable() for value in raw.values()):
        raise ConfigError(f"{FLAG}: {name} is {json.dumps(raw)}; it must be an object of texts that can be printed")
    _check_keys(cls, raw, f"{FLAG}: {name}")
    return cls(**raw)


def _check_keys(cls: Any, raw: dict[str, Any], where: str) -> None:
    known = [f.name for f in fields(cls)]
    if unknown := sorted(set(raw) - set(known)):
        raise ConfigError(f"{where}: unknown key {', '.join(unknown)}; the keys are {', '.join(known)}")


def _read(text: str) -> dict[str, object]:
    where = FLAG
    if not text.lstrip().startswith("{"):
        where = f"{FLAG} {text}"
        try:
            text = Path(text).read_text()
        except (OSError, ValueError) as e:
            example = """e.g. '{"transports": ["tcp"]}'"""
            raise ConfigError(f"{where}: neither a JSON object nor a file that can be read ({e}); {example}") from e
    try:
        raw = json.loads(text, object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{where}: not JSON: {e}") from e
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: the file must have one JSON object")
    return raw


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are all different: of two values for one key JSON would take the last, silently."""
    raw = dict(pairs)
    if len(raw) != len(pairs):
        raise ValueError("a key is there twice")
    return raw
