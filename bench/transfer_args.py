"""The flags of `pdserve bench transfer`."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.core.config import check, option
from pdserve.core.errors import ConfigError

INTEGRITIES = ("none", "host")


@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """What is moved, how often."""

    planes: str = option(
        "all",
        "data planes to measure, separated by commas: shm, tcp, nixl-shm, nixl-tcp, mooncake, and tcp+tls with the "
        "files of TLS; all: every one that is installed",
    )
    page_kib: str = option("64,256,1024", "sizes of a page in KiB, separated by commas")
    total_mib: str = option("1,16,64,256", "sizes of a transfer in MiB, separated by commas")
    repeats: int = option(5, "interleaved runs of each case; medians are reported", unit="runs", minimum=1)
    timeout_s: float = option(60.0, "time that one transfer may take", unit="s", minimum=1)
    max_minutes: float = option(15.0, "after so long no other case is begun", unit="minutes", minimum=0)
    quick: bool = option(False, "one small case, one run: to see that it works; its numbers mean little")
    seed: int = option(0, "seed of the order of scattered pages", minimum=0)
    json: str | None = option(None, "write the report to this file")

    def __post_init__(self) -> None:
        check(self)
        if min(self.totals()) < max(self.page_sizes()):
            raise ConfigError(f"--total-mib is {self.total_mib!r}; a transfer must hold a page of --page-kib")

    def page_sizes(self) -> tuple[int, ...]:
        """Bytes of a page."""
        return (64 << 10,) if self.quick else tuple(n << 10 for n in _sizes("--page-kib", self.page_kib))

    def totals(self) -> tuple[int, ...]:
        """Bytes of a transfer."""
        return (1 << 20,) if self.quick else tuple(n << 20 for n in _sizes("--total-mib", self.total_mib))

    def rounds(self) -> int:
        """Runs of each case."""
        return 1 if self.quick else self.repeats


def _sizes(flag: str, text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        found = (0,)
    if min(found) < 1:
        raise ConfigError(f"{flag} is {text!r}; write whole numbers from 1 with commas, e.g. 64,256")
    return found
