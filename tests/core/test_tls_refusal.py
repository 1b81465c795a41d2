"""A second connection tells whether a server turns us away for our TLS: yes, no, and nobody there."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from pdserve.cli.authority import Authority
from pdserve.core.tls import Tls
from pdserve.core.tls_refusal import refusal
from tests.support.certificates import EXPIRED, member, unproven

from .test_grpc_tls import serving

AUTHORITY, OTHER = Authority.new(), Authority.new("another authority")


def test_whom_a_server_turns_away_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(directory: str, authority: Authority, **issue: object) -> Tls:
        return unproven(monkeypatch, member(tmp_path / directory, authority, **issue))  # type: ignore[arg-type]

    good = of("good", AUTHORITY)
    liar, expired = of("liar", OTHER, trusts=AUTHORITY), of("old", AUTHORITY, **EXPIRED)
    cases: list[tuple[str, Tls | None, Tls | None, str | None]] = [
        ("good", good, good, None),
        ("plain", good, None, "no connection without TLS"),
        ("another authority's", good, liar, "refuses the certificate"),
        ("expired", good, expired, "refuses the certificate"),
        ("it is we who refuse", good, of("foreign", OTHER), None),
        ("both plain", None, None, None),
        ("plain server", None, good, None),
    ]

    async def body() -> None:
        for who, server, ours, says in cases:
            async with serving(server) as address:
                why = await asyncio.to_thread(refusal, address, ours)
                assert (why is None) if says is None else (why is not None and says in why), f"{who}: {why}"

    asyncio.run(body())


def test_a_server_that_is_gone_or_silent_says_nothing(tmp_path: Path) -> None:
    good = Tls(member(tmp_path, AUTHORITY))
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections wait, nobody takes them
        address = "{}:{}".format(*silent.getsockname())
        assert refusal(address, good, timeout_s=0.1) is None
    assert refusal(address, good) is None
    assert refusal("nowhere", None) is None
