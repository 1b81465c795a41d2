"""The flags of `pdserve bench handoff`."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from pdserve.core.config import check, option
from pdserve.core.errors import ConfigError

MIN_REPEATS = 3
BASE_TOKENS = 512
"""Prompts up to this length get all repeats, longer ones fewer in proportion."""


@dataclass(frozen=True, kw_only=True)
class HandoffConfig:
    """What is measured, how often, for how long."""

    planes: str = option(
        "all",
        "data planes with commas, named as in bench transfer; all: shm, tcp, and nixl-shm where NIXL is installed",
    )
    prompt_len: str = option("128,512,1024,2048,4000", "lengths of prompts in tokens, separated by commas")
    output_len: int = option(
        17, "tokens of each answer, the one that prefill samples included", unit="tokens", minimum=3
    )
    repeats: int = option(
        10,
        f"requests of each length; of a length above {BASE_TOKENS} fewer in proportion, but {MIN_REPEATS} at least",
        unit="requests",
        minimum=1,
    )
    max_minutes: float = option(
        8.0, "no request begins that would end later, unless it is the first of its length", unit="minutes", minimum=0.1
    )
    start_timeout_s: float = option(300.0, "time that the processes may take to be ready", unit="s", minimum=1)
    request_timeout_s: float = option(300.0, "time that one request may take", unit="s", minimum=1)
    up_flags: str = option("", "further flags of the measured pdserve up, e.g. --up-flags='--threads 2'")
    quick: bool = option(False, "two short prompts by each plane: to see that it works; its numbers mean little")
    seed: int = option(0, "seed of the prompts", minimum=0)
    json: str | None = option(None, "write the report and every request to this file")

    def __post_init__(self) -> None:
        check(self)
        self.prompt_lens()
        self.words()

    def prompt_lens(self) -> tuple[int, ...]:
        """Lengths of prompts, shortest first."""
        try:
            found = sorted({int(word) for word in self.prompt_len.split(",")})
        except ValueError:
            found = [0]
        if found[0] < 1:
            raise ConfigError(f"--prompt-len is {self.prompt_len!r}; write numbers from 1 with commas, e.g. 128,512")
        return (64, 200) if self.quick else tuple(found)

    def repeats_of(self, num_prompt_tokens: int) -> int:
        """Requests of one length."""
        if self.quick:
            return 1
        fewer = self.repeats * BASE_TOKENS // num_prompt_tokens
        return min(self.repeats, max(MIN_REPEATS, fewer))

    def words(self) -> list[str]:
        """The words of `up_flags`."""
        try:
            return shlex.split(self.up_flags)
        except ValueError as e:
            raise ConfigError(f"--up-flags is {self.up_flags!r}; it cannot be split into words: {e}") from e
