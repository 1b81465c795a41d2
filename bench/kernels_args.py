"""The flags of `pdserve bench kernels`."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.core.config import check, option
from pdserve.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class KernelsConfig:
    """What is computed, on how many threads, how often."""

    rows: str = option("1,8,16,32", "rows of the linears, separated by commas")
    threads: str = option("1,2", "numbers of threads, separated by commas")
    flex_attention: bool = option(
        True, "also torch's FlexAttention, which compiles C++ for each case (some 15 s); on one thread"
    )
    repeats: int = option(3, "interleaved runs of each case; medians are reported", unit="runs", minimum=1)
    quick: bool = option(False, "two layers, one run: to see that it works; its numbers mean nothing")
    seed: int = option(0, "seed of weights and inputs", minimum=0)
    json: str | None = option(None, "write the report to this file", unit="file")

    def __post_init__(self) -> None:
        check(self)
        self.row_counts()
        self.thread_counts()

    def row_counts(self) -> tuple[int, ...]:
        """Rows of the linears."""
        return (1, 8) if self.quick else _counts("--rows", self.rows, 4096)

    def thread_counts(self) -> tuple[int, ...]:
        """Numbers of threads."""
        return (1,) if self.quick else _counts("--threads", self.threads, 256)

    def rounds(self) -> int:
        """Runs of each case."""
        return 1 if self.quick else self.repeats


def _counts(flag: str, text: str, most: int) -> tuple[int, ...]:
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        found = (0,)
    if not 1 <= min(found) <= max(found) <= most:
        raise ConfigError(f"{flag} is {text!r}; write whole numbers from 1 to {most} with commas, e.g. 1,8")
    return found
