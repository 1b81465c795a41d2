"""A router that a worker turns away for its TLS says so, and what to look at; gRPC says only that the socket closed."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from pdserve.cli.authority import Authority
from pdserve.core.clock import MonotonicClock
from pdserve.core.errors import PdserveError
from pdserve.core.grpc_server import open_channel
from pdserve.core.request import Role
from pdserve.core.tls import Tls
from pdserve.core.tls_refusal import refusal
from pdserve.router.worker_client import GrpcWorkerClient
from pdserve.router.worker_set import WorkerSet
from pdserve.router.worker_table import Listed
from tests.core.test_grpc_tls import LIMIT, serving
from tests.router.test_worker_table import MODEL
from tests.support.certificates import EXPIRED, member, unproven

AUTHORITY, OTHER = Authority.new(), Authority.new("another authority")


async def told(address: str, tls: Tls | None) -> tuple[PdserveError, str]:
    """Why a router's session could not be opened, in the log and in few words."""
    client = GrpcWorkerClient(
        Listed(worker_id="d0", role=Role.DECODE, incarnation="i1", address=address),
        "router",
        MonotonicClock(),
        WorkerSet(MODEL),
        heartbeat_s=1.0,
        timeout_s=3.0,
        open_channel=partial(open_channel, max_message_bytes=LIMIT, tls=tls),
        refusal=partial(refusal, tls=tls),
    )
    return await client.run(), client.why_not_open


def test_who_is_turned_away_and_what_to_look_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(directory: str, authority: Authority, **issue: object) -> Tls:
        return unproven(monkeypatch, member(tmp_path / directory, authority, **issue))  # type: ignore[arg-type]

    good = of("good", AUTHORITY)
    liar, expired = of("liar", OTHER, trusts=AUTHORITY), of("old", AUTHORITY, **EXPIRED)
    nameless = of("nameless", AUTHORITY, name="web")
    cases: list[tuple[str, Tls | None, Tls | None, str, list[str]]] = [
        ("another authority's", good, liar, "TLS_REFUSED", ["--tls-cert-file", "--tls-ca-file", "expired"]),
        ("expired", good, expired, "TLS_REFUSED", ["--tls-cert-file", "--tls-ca-file", "expired"]),
        ("plain", good, None, "TLS_REFUSED", ["without TLS", "--tls-cert-file"]),
        ("plain worker", None, good, "TLS_FAILED", ["it has no TLS"]),
        ("nameless worker", nameless, good, "TLS_FAILED", ["without the name (--tls-peer-name)"]),
        ("a fitting pair", good, good, "UNIMPLEMENTED", []),  # this server has no sessions
    ]

    async def main() -> None:
        for who, theirs, ours, reason, words in cases:
            async with serving(theirs) as address:
                error, why = await told(address, ours)
                assert error.reason == reason and "d0" in error.message, f"{who}: {error}"
                assert why.startswith(f"{reason}: ") and all(word in why for word in words), f"{who}: {why}"
        error, _ = await told(address, good)  # nobody is there
        assert error.reason == "UNAVAILABLE", error

    asyncio.run(main())
