"""The control stream of a pair under mutual TLS: a whole transfer, and reasons where there can be none."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.cli.authority import Authority
from pdserve.core.tls import Tls
from pdserve.kvtransfer.handoff import TransferState
from tests.support.certificates import EXPIRED, member, unproven

from .world import Ref, reason_of, run, world

AUTHORITY, OTHER = Authority.new(), Authority.new("another authority")


def test_a_transfer_goes_over_both_planes(tmp_path: Path) -> None:
    async def body() -> None:
        prefill, decode = Tls(member(tmp_path / "p", AUTHORITY)), Tls(member(tmp_path / "d", AUTHORITY))
        async with world(prefill_tls=prefill, decode_tls=decode) as w:
            transfer = w.start("t", 4)
            w.server.offer("t", 4)
            w.server.pages_ready("t", 0, [Ref(i) for i in range(4)])
            w.complete("t", 4)
            assert (await transfer.result()).num_pages == 4
            assert all(w.decode.page(i) == w.prefill.page(i) for i in range(4))
            assert (await w.listener.end_of("t"))[0] is TransferState.COMPLETE

    run(body())


def test_a_pair_that_cannot_trust_each_other_fails_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(directory: str, authority: Authority, **issue: object) -> Tls:
        return unproven(monkeypatch, member(tmp_path / directory, authority, **issue))  # type: ignore[arg-type]

    good, expired, nameless = of("good", AUTHORITY), of("old", AUTHORITY, **EXPIRED), of("web", AUTHORITY, name="web")
    foreign, liar = of("foreign", OTHER), of("liar", OTHER, trusts=AUTHORITY)
    cases: list[tuple[str, Tls | None, Tls | None, str]] = [
        ("plain prefill", None, good, "TLS_FAILED"),
        ("prefill of another authority", foreign, good, "TLS_FAILED"),
        ("expired prefill", expired, good, "TLS_FAILED"),
        ("prefill without the name", nameless, good, "TLS_FAILED"),
        ("decode of another authority", good, foreign, "TLS_FAILED"),
        ("decode without the name", good, nameless, "NOT_A_MEMBER"),
        ("plain decode", good, None, "TLS_REFUSED"),
        ("decode with a certificate of another authority", good, liar, "TLS_REFUSED"),
        ("expired decode", good, expired, "TLS_REFUSED"),
    ]

    async def body() -> None:
        for who, prefill, decode, reason in cases:
            async with world(prefill_tls=prefill, decode_tls=decode) as w:
                w.server.offer("t", 2)
                w.server.pages_ready("t", 0, [Ref(0), Ref(1)])
                assert await reason_of(w.start("t", 2).result()) == reason, who
                assert w.server.num_streams == 0 and not any(w.decode.buffer), who
                w.server.close("t", "ABORTED")

    run(body())
