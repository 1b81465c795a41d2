"""Prefill and decode together: right tokens, every end leaves both pools free."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from pdserve.core.config import WorkerConfig
from pdserve.core.request import Role
from pdserve.core.tokenizer import Tokenizer
from pdserve.engine.fake import FAKE_VOCAB_SIZE, expected_tokens
from pdserve.v1 import common_pb2, worker_pb2
from tests.services.world import Pair, connect, engine_config, pair, until

TOKENIZER = Tokenizer.fake(FAKE_VOCAB_SIZE)
LONG = 4000
CREEPING = engine_config(max_num_batched_tokens=2, max_num_seqs=2, fake_step_ms=1)  # seconds for a LONG prompt
UNHURRIED = engine_config(fake_step_ms=1)  # seconds for thousands of tokens


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(1000 * seed + length).choices(range(256), k=length)


def run(scenario: Callable[[Pair], Awaitable[None]], **world: object) -> None:
    async def main() -> None:
        async with pair(**world) as both:  # type: ignore[arg-type]
            await scenario(both)
            await both.all_free()

    asyncio.run(main())


def test_tokens_text_and_usage_are_right() -> None:
    async def scenario(both: Pair) -> None:
        lengths = [1, 15, 16, 17, 255, 256, 257, 1000]
        for n in lengths:
            await both.submit(f"r{n}", prompt_of(n), logprobs=1)
        for n in lengths:
            p, d = await both.ended(f"r{n}")
            await until(lambda d=d: d.finished is not None, "decode's end")  # type: ignore[misc]
            assert p.failed is None and d.failed is None
            assert p.token_ids + d.token_ids == expected_tokens(prompt_of(n), 16), n
            assert p.text + d.text == TOKENIZER.decode(p.token_ids + d.token_ids)
            assert d.reservation is not None and d.reservation.reserved
            assert d.reservation.reservation_id == f"r-r{n}"
            assert d.finished is not None and d.timings is not None and p.timings is not None
            assert d.finished.finish_reason == common_pb2.FINISH_REASON_LENGTH
            assert (d.finished.usage.prompt_tokens, d.finished.usage.completion_tokens) == (n, 16)
            assert d.timings.transfer_bytes >= -(-n // 16) * 256 and d.timings.decode_s > 0
            assert p.timings.prefill_s > 0
        assert both.decode.metric("pdserve_kv_transfers_total", outcome="complete") == len(lengths)
        assert both.prefill.metric("pdserve_worker_requests_total", finish_reason="handoff") == len(lengths)

    run(scenario)


def test_chunks_smaller_than_a_page() -> None:
    """Most steps end without a new page to announce."""

    async def scenario(both: Pair) -> None:
        for n in (1, 15, 16, 17, 50):
            await both.submit(f"r{n}", prompt_of(n))
        for n in (1, 15, 16, 17, 50):
            p, d = await both.ended(f"r{n}")
            assert p.token_ids + d.token_ids == expected_tokens(prompt_of(n), 16), n

    run(scenario, prefill=engine_config(max_num_batched_tokens=3, max_num_seqs=3))


def test_a_retry_continues_after_the_emitted_tokens() -> None:
    async def scenario(both: Pair) -> None:
        prompt = prompt_of(40)
        right = expected_tokens(prompt, 16)
        await both.submit("r", prompt, emitted=right[:5], attempt=2)
        p, d = await both.ended("r")
        assert p.token_ids + d.token_ids == right[5:]
        assert p.text + d.text == TOKENIZER.decode(right[5:])
        assert d.finished is not None and d.finished.usage.completion_tokens == 16

    run(scenario)


def test_mixed_computes_everything_itself() -> None:
    async def scenario(both: Pair) -> None:
        submission = both.submission("r", prompt_of(300), common_pb2.ROLE_MIXED)
        await both.to_decode.send(submit=submission)
        _, d = await both.ended("r")
        assert d.token_ids == expected_tokens(prompt_of(300), 16) and d.text == TOKENIZER.decode(d.token_ids)
        assert d.timings is not None and d.timings.prefill_s > 0 and d.timings.transfer_bytes == 0

    run(scenario, decode_role=Role.MIXED)


@pytest.mark.parametrize("at", [0, 1, 7])
def test_a_stop_string_ends_the_stream(at: int) -> None:
    async def scenario(both: Pair) -> None:
        prompt = prompt_of(50)
        tokens = expected_tokens(prompt, 16)
        text = TOKENIZER.decode(tokens)
        border = len(TOKENIZER.decode(tokens[: at + 1]))
        stop = text[border - 2 : border] if at == 0 else text[border - 2 : border + 3]  # over a token border
        end = text.index(stop)
        await both.submit("r", prompt, stop=[stop])
        p, d = await both.ended("r")
        finished = p.finished or d.finished
        assert finished is not None and finished.finish_reason == common_pb2.FINISH_REASON_STOP
        assert finished.stop_reason == stop
        assert p.text + d.text == text[:end]
        assert p.token_ids + d.token_ids == tokens[: finished.usage.completion_tokens]
        assert len(TOKENIZER.decode(tokens[: finished.usage.completion_tokens])) >= end + len(stop)

    run(scenario)


@pytest.mark.parametrize("length", [50, 2000])  # in one chunk; in many, with pages pulled before the end
@pytest.mark.parametrize("why", ["max_tokens", "stop token", "stop string"])
def test_the_first_token_ends_the_request(why: str, length: int) -> None:
    async def scenario(both: Pair) -> None:
        prompt = prompt_of(length)
        first = expected_tokens(prompt, 1)[0]
        options: dict[str, object] = {
            "max_tokens": {"max_tokens": 1},
            "stop token": {"stop_token_ids": [first]},
            "stop string": {"stop": [f"t{first}"[:2]]},
        }[why]  # type: ignore[assignment]
        await both.submit("r", prompt, **options)
        p, d = await both.ended("r")
        assert p.finished is not None and p.token_ids == [first]
        assert (
            p.finished.stop_reason == {"max_tokens": "", "stop token": str(first), "stop string": f"t{first}"[:2]}[why]
        )
        await both.all_free()
        assert d.token_ids == [] and d.failed is None and d.finished is None

    run(scenario, prefill=engine_config(max_num_batched_tokens=64))


def test_32_sequences_share_one_message_per_step() -> None:
    async def scenario(both: Pair) -> None:
        for i in range(32):
            await both.submit(f"r{i}", prompt_of(30, i), max_tokens=50)
        for i in range(32):
            p, d = await both.ended(f"r{i}")
            assert p.token_ids + d.token_ids == expected_tokens(prompt_of(30, i), 50)
        for router, running in ((both.to_prefill, both.prefill), (both.to_decode, both.decode)):
            steps = [m.step for m in router.step_messages]
            assert len(steps) == len(set(steps)) <= running.metric("pdserve_engine_steps_total")
        assert max(len(m.outputs) for m in both.to_decode.step_messages) > 1

    run(scenario, decode=UNHURRIED)


# ---- aborts ----------------------------------------------------------------------------------------------------------


def test_abort_while_queued() -> None:
    async def scenario(both: Pair) -> None:
        await both.submit("busy", prompt_of(100), max_tokens=3000, ignore_eos=True)
        await until(lambda: len(both.to_decode.of("busy").token_ids) > 0, "the busy one to decode")
        await both.submit("r", prompt_of(LONG, 1))  # waits: no pages
        assert (await both.abort(both.to_decode, "r")).known
        assert (await both.abort(both.to_prefill, "r")).known
        assert (await both.abort(both.to_decode, "busy")).known
        await both.abort(both.to_prefill, "busy")
        assert both.to_decode.of("r").reservation is None

    run(scenario, decode=engine_config(num_pages=256, max_num_seqs=1, fake_step_ms=1))


def test_abort_while_prefilling() -> None:
    async def scenario(both: Pair) -> None:
        await both.submit("r", prompt_of(LONG))
        await until(lambda: both.prefill.metric("pdserve_engine_steps_total") > 2, "some chunks")
        assert (await both.abort(both.to_prefill, "r")).known
        await both.abort(both.to_decode, "r")  # may have ended already: its transfer was closed
        assert both.to_prefill.of("r").token_ids == []

    run(scenario, prefill=CREEPING)


def test_abort_of_a_lease_that_nobody_opened() -> None:
    async def scenario(both: Pair) -> None:
        await both.to_prefill.send(submit=both.submission("r", prompt_of(100)))
        await until(lambda: len(both.to_prefill.of("r").token_ids) == 1, "token 1")
        assert both.prefill.handler.load().num_free_pages < 512
        assert (await both.abort(both.to_prefill, "r")).known

    run(scenario)


def test_abort_while_decode_waits_for_the_transfer() -> None:
    async def scenario(both: Pair) -> None:
        submission = both.submission("r", prompt_of(100), common_pb2.ROLE_DECODE)
        await both.to_decode.send(submit=submission)
        await until(lambda: both.to_decode.of("r").reservation is not None, "RESERVED")
        assert both.decode.handler.load().num_free_pages < 512
        assert (await both.abort(both.to_decode, "r")).known
        assert not (await both.abort(both.to_prefill, "r")).known

    run(scenario)


def test_abort_while_transferring() -> None:
    """Pulls run while the prompt is computed; whichever side is asked first, nothing leaks and nobody fails later."""

    async def scenario(both: Pair) -> None:
        for i, routers in enumerate([(both.to_prefill, both.to_decode), (both.to_decode, both.to_prefill)]):
            await both.submit(f"r{i}", prompt_of(LONG, i))
            await until(lambda: both.decode.handler.load().num_free_pages < 512, "pages to be reserved")
            for router in routers:
                await both.abort(router, f"r{i}")
            await both.all_free()

    run(scenario, prefill=engine_config(max_num_batched_tokens=64))


def test_abort_while_decoding() -> None:
    async def scenario(both: Pair) -> None:
        await both.submit("r", prompt_of(100), max_tokens=5000)
        await until(lambda: len(both.to_decode.of("r").token_ids) > 5, "some tokens")
        assert (await both.abort(both.to_decode, "r")).known
        got = both.to_prefill.of("r").token_ids + both.to_decode.of("r").token_ids
        assert len(got) < 5000 and got == expected_tokens(prompt_of(100), len(got))
        again = both.to_decode.of("r")
        again.aborted = None
        assert not (await both.abort(both.to_decode, "r")).known, "the second abort finds nothing"

    run(scenario, decode=UNHURRIED)


def test_random_aborts_leave_nothing_behind() -> None:
    rng = random.Random(7)
    prompts = [prompt_of(rng.randint(1, 400), i) for i in range(60)]

    async def scenario(both: Pair) -> None:
        for i, prompt in enumerate(prompts):
            await both.submit(f"r{i}", prompt, max_tokens=rng.randint(1, 60))
            if i % 2:
                fence = both.submission(f"r{rng.randint(0, i)}", [1]).fence
                for router in rng.sample([both.to_prefill, both.to_decode], 2):
                    await router.send(abort=worker_pb2.Abort(fence=fence, reason="CLIENT_CANCELLED"))
        await both.all_free()
        for i, prompt in enumerate(prompts):
            heard = both.to_prefill.of(f"r{i}"), both.to_decode.of(f"r{i}")
            await until(lambda heard=heard: any(h.aborted or h.finished for h in heard), f"the end of r{i}")  # type: ignore[misc]
            got = heard[0].token_ids + heard[1].token_ids
            assert got == expected_tokens(prompt, len(got))

    run(scenario)


def test_end_of_a_session_aborts_what_it_owned() -> None:
    async def scenario(both: Pair) -> None:
        async with connect(both.prefill, "router-2") as p, connect(both.decode, "router-2") as d:
            other = Pair(both.prefill, both.decode, p, d)
            await other.submit("gone", prompt_of(100), max_tokens=5000)
            await both.submit("stays", prompt_of(100), max_tokens=500)
            await until(lambda: len(d.of("gone").token_ids) > 5, "some tokens")
        _, heard = await both.ended("stays")
        assert heard.finished is not None

    run(scenario)


# ---- refusals and deaths ---------------------------------------------------------------------------------------------


def test_wrong_incarnation_and_bad_ids_are_refused() -> None:
    async def scenario(both: Pair) -> None:
        stale = both.submission("a", prompt_of(10))
        stale.prefill.incarnation = "older"
        bad = both.submission("b", prompt_of(10))
        bad.prompt_token_ids[3] = FAKE_VOCAB_SIZE
        long = both.submission("c", [1] * (512 * 16))
        for message in (stale, bad, long):
            await both.to_prefill.send(submit=message)
        for request_id, status, reason in (
            ("a", "UNAVAILABLE", "WRONG_INCARNATION"),
            ("b", "INVALID_ARGUMENT", "BAD_TOKEN_ID"),
            ("c", "INVALID_ARGUMENT", "PROMPT_TOO_LONG"),
        ):
            failed = (await both.ended(request_id))[0].failed
            assert failed is not None and (failed.status, failed.reason) == (status, reason)

    run(scenario)


def test_decode_told_of_another_prefill_process_fails_the_transfer() -> None:
    async def scenario(both: Pair) -> None:
        message = both.submission("r", prompt_of(10), common_pb2.ROLE_DECODE)
        message.prefill.incarnation = "older"
        await both.to_decode.send(submit=message)
        failed = (await both.ended("r"))[1].failed
        assert failed is not None and failed.reason == "INCARNATION"

    run(scenario)


def test_a_reservation_without_room_is_refused_with_retry_after() -> None:
    async def scenario(both: Pair) -> None:
        await both.submit("first", prompt_of(300), max_tokens=3000)
        await until(lambda: len(both.to_decode.of("first").token_ids) > 0, "the first one to decode")
        await both.submit("second", prompt_of(LONG, 1))
        await until(lambda: both.to_decode.of("second").reservation is not None, "an answer")
        refused = both.to_decode.of("second").reservation
        assert refused is not None and not refused.reserved and refused.retry_after_ms > 0
        assert both.decode.metric("pdserve_worker_requests_total", reason="RESERVATION_REFUSED") == 1
        await both.abort(both.to_prefill, "second")
        await both.abort(both.to_decode, "first")

    run(scenario, decode=engine_config(num_pages=256, fake_step_ms=1), worker=WorkerConfig(reserve_wait_s=0.05))


def test_a_prompt_whose_token_ends_the_request_waits_for_no_decode_worker() -> None:
    async def scenario(both: Pair) -> None:
        submission = both.submission("r", prompt_of(100), max_tokens=1)
        await both.to_prefill.send(submit=submission)
        await until(lambda: both.to_prefill.of("r").finished is not None, "the end")
        await both.prefill.all_free()  # long before its lease would end
        late = both.submission("r", prompt_of(100), common_pb2.ROLE_DECODE, max_tokens=1)
        await both.to_decode.send(submit=late)
        await until(lambda: both.to_decode.of("r").reservation is not None, "the reservation")
        await both.decode.all_free()
        assert both.to_decode.of("r").failed is None

    run(scenario, worker=WorkerConfig(kv_lease_s=1000))


@pytest.mark.parametrize("newer", [{"attempt": 2}, {"epoch": 2}])
def test_a_newer_attempt_or_a_newer_request_of_the_same_id_ends_the_older_one(newer: dict[str, int]) -> None:
    async def scenario(both: Pair) -> None:
        await both.submit("r", prompt_of(100), max_tokens=5000)
        await until(lambda: len(both.to_decode.of("r").token_ids) > 5, "some tokens")
        for router, part in ((both.to_prefill, common_pb2.ROLE_PREFILL), (both.to_decode, common_pb2.ROLE_DECODE)):
            router.heard.clear()
            await router.send(submit=both.submission("r", prompt_of(100), part, max_tokens=1, **newer))
        p, _ = await both.ended("r")
        assert p.finished is not None

    run(scenario)


def test_prefill_dies_in_the_middle() -> None:
    async def scenario() -> None:
        async with pair(prefill=CREEPING) as both:
            await both.submit("r", prompt_of(LONG))
            await until(lambda: both.decode.handler.load().num_free_pages < 512, "pages to be reserved")
            await both.prefill.server.stop(0)
            await until(lambda: both.to_decode.of("r").failed is not None, "the failure")
            failed = both.to_decode.of("r").failed
            assert failed is not None and failed.status == "UNAVAILABLE" and "prefill-0" in failed.message
            await both.decode.all_free()

    asyncio.run(scenario())


@pytest.mark.parametrize("which", ["prefill", "decode"])
def test_a_dead_engine_fails_every_stream_and_the_process(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pdserve.engine.fake import FakeRunner

    async def scenario() -> None:
        async with pair(prefill=CREEPING, decode=UNHURRIED) as both:
            dying = both.prefill if which == "prefill" else both.decode
            router = both.to_prefill if which == "prefill" else both.to_decode
            prompt = prompt_of(LONG if which == "prefill" else 20)
            await both.submit("r", prompt, max_tokens=4000)
            if which == "decode":
                await until(lambda: len(router.of("r").token_ids) > 3, "some tokens")
            assert dying.worker.healthy()
            monkeypatch.setattr(FakeRunner, "execute", _explode)
            await until(lambda: router.of("r").failed is not None, "the failure")
            failed = router.of("r").failed
            assert failed is not None and failed.reason == "ENGINE_FAILED"
            await until(lambda: bool(dying.failures), "the process to end")
            assert not dying.worker.healthy()
            router.heard.clear()
            late = both.submission(
                "late", [1, 2], common_pb2.ROLE_PREFILL if which == "prefill" else common_pb2.ROLE_DECODE
            )
            await router.send(submit=late)
            await until(lambda: router.of("late").failed is not None, "a refusal")

    asyncio.run(scenario())


def _explode(*_: object) -> None:
    raise ValueError("the device fell off")
