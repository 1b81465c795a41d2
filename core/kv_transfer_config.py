"""KvTransferConfig: how a worker's KV pages travel. `--kv-transfer-config` says it: JSON, or a file with it."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

from pdserve.core.errors import ConfigError

FLAG = "--kv-transfer-config"
TRANSPORTS = ("shm", "tcp")
"""Names of the data planes, the default order of preference."""


@dataclass(frozen=True, kw_only=True)
class KvTransferConfig:
    """How pages travel.

    Attributes:
        transports: Data planes that this worker has, most wanted first; a pair uses the first of decode's that prefill
            has too and that can work between them.
    """

    transports: tuple[str, ...] = TRANSPORTS

    def __post_init__(self) -> None:
        if unknown := [name for name in self.transports if name not in TRANSPORTS]:
            raise ConfigError(
                f"{FLAG}: transports names {', '.join(map(repr, unknown))}; there are {', '.join(TRANSPORTS)}"
            )
        if not self.transports or len(set(self.transports)) != len(self.transports):
            raise ConfigError(f"{FLAG}: transports is {list(self.transports)}; name at least one, and each once")

    @classmethod
    def parse(cls, text: str | None) -> KvTransferConfig:
        """Reads the flag's value.

        Args:
            text: A JSON object or the path of a file with one; None: the defaults.

        Raises:
            ConfigError: It cannot be read, or has an unknown key or a value out of range.
        """
        if text is None:
            return cls()
        raw = _read(text)
        known = [f.name for f in fields(cls)]
        if unknown := sorted(set(raw) - set(known)):
            raise ConfigError(f"{FLAG}: unknown key {', '.join(unknown)}; the keys are {', '.join(known)}")
        transports = raw.get("transports", list(TRANSPORTS))
        if not isinstance(transports, list) or not all(isinstance(name, str) for name in transports):
            raise ConfigError(f"{FLAG}: transports is {json.dumps(transports)}; it must be a list of names")
        return cls(transports=tuple(transports))


def _read(text: str) -> dict[str, object]:
    where = FLAG
    if not text.lstrip().startswith("{"):
        where = f"{FLAG} {text}"
        try:
            text = Path(text).read_text()
        except (OSError, ValueError) as e:
            raise ConfigError(f"{where}: neither a JSON object nor a file that can be read ({e})") from e
    try:
        raw = json.loads(text)
    except ValueError as e:
        raise ConfigError(f"{where}: not JSON: {e}") from e
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: the file must have one JSON object")
    return raw
