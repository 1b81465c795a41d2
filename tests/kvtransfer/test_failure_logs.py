"""Which transfers failed, and why, is in the logs of both workers; what a request's own end ended is not."""

from __future__ import annotations

import logging

import pytest

from pdserve.core.errors import TransferError

from .world import PROMPT_DIGEST, World, eventually, reason_of, run, world


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_failed_transfer_is_named_with_its_request_plane_and_reason(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with world() as w:
            w.server.offer("t", 1)
            incoming = w.client.start(
                "t",
                w.peer,
                num_cached_pages=0,
                destinations=[0],
                expected_num_tokens=8,
                expected_digest=PROMPT_DIGEST,
                request_id="r1",
            )
            await w.listener.until(lambda: w.listener.opened == ["t"])
            w.server.close("t", "ENGINE_FAILED")
            assert await reason_of(incoming.result()) == "ENGINE_FAILED"

    run(body())
    assert warnings(caplog) == ["KV transfer t of request r1 from prefill-0 over tcp failed: ENGINE_FAILED"]


def test_a_pair_that_is_refused_is_named_on_both_sides(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with world(wanted=("one",), offered=("two",)) as w:
            with pytest.raises(TransferError):
                await w.start("t", 1).result()

    run(body())
    theirs, ours = warnings(caplog)
    lists = "no common data plane: the decode worker has one, the prefill worker has two"
    assert theirs.startswith(f"decode worker decode-0 is refused: TRANSPORT: {lists}")
    assert ours.startswith("KV transfer t of request (unknown) from prefill-0 failed: TRANSPORT: ")
    assert lists in ours


@pytest.mark.parametrize("side", ["prefill", "decode", "finished"])
def test_what_its_request_ended_is_no_failure(side: str, caplog: pytest.LogCaptureFixture) -> None:
    async def end(w: World) -> None:
        w.server.offer("t", 1)
        incoming = w.start("t", 1)
        await w.listener.until(lambda: w.listener.opened == ["t"])
        if side == "decode":
            await incoming.abort()
        else:
            w.server.close("t", "ABORTED" if side == "prefill" else "FINISHED")
            await reason_of(incoming.result())
        await w.listener.end_of("t")

    async def body() -> None:
        async with world() as w:
            await end(w)

    run(body())
    assert warnings(caplog) == []


def test_prefill_says_in_plain_words_that_a_decode_worker_has_gone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def body() -> None:
        async with world() as w:
            w.server.offer("t", 1)
            w.start("t", 1)
            await w.listener.until(lambda: w.listener.opened == ["t"])
            await w.client.close()
            await w.listener.end_of("t")
            await eventually(lambda: "control stream of decode-0 ended" in caplog.text)

    run(body())
    gone = "control stream of decode-0 ended: the decode worker ended it, or cannot be reached"
    assert f"{gone}; KV transfers that failed with it (1): t" in warnings(caplog)
    assert "Error(" not in caplog.text
