"""n > 1 on workers: one transfer of the prompt, every choice whole, every end leaves both pools free."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.core.request import Role
from pdserve.engine.config import EngineConfig
from pdserve.engine.fake import expected_tokens
from pdserve.v1 import common_pb2, worker_pb2
from tests.services.test_pair import CREEPING, TOKENIZER, prompt_of, run
from tests.services.world import Pair, Router, engine_config, until


class Choices:
    """What the decode worker said of one request, choice by choice, checked for gaps."""

    def __init__(self, router: Router, request_id: str) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.text: dict[int, str] = {}
        self.ends: dict[int, tuple[int, str]] = {}
        for output in (o for m in router.step_messages for o in m.outputs if o.fence.request_id == request_id):
            if not output.HasField("delta"):
                continue
            delta = output.delta
            tokens, text = self.tokens.setdefault(delta.choice, []), self.text.get(delta.choice, "")
            assert delta.choice not in self.ends, "news after the end"
            assert (delta.index, delta.text_offset) == (len(tokens), len(text))
            tokens += delta.token_ids
            self.text[delta.choice] = text + delta.text
            if delta.finish_reason:
                self.ends[delta.choice] = (delta.finish_reason, delta.stop_reason)


async def submit(both: Pair, mixed: bool, request_id: str, prompt: list[int], **options: object) -> None:
    if mixed:
        message = both.submission(request_id, prompt, common_pb2.ROLE_MIXED, **options)  # type: ignore[arg-type]
        await both.to_decode.send(submit=message)
    else:
        await both.submit(request_id, prompt, **options)


ROLES = pytest.mark.parametrize("mixed", [True, False])


@ROLES
def test_every_choice_is_whole_and_the_end_comes_once(mixed: bool) -> None:
    async def scenario(both: Pair) -> None:
        lengths = [1, 16, 17, 300]
        for length in lengths:
            await submit(both, mixed, f"r{length}", prompt_of(length), n=3, logprobs=1)
        for length in lengths:
            p, d = await both.ended(f"r{length}")
            right = expected_tokens(prompt_of(length), 16)
            choices = Choices(both.to_decode, f"r{length}")
            assert choices.tokens == dict.fromkeys(range(3), right)
            assert choices.text == dict.fromkeys(range(3), TOKENIZER.decode(right))
            assert choices.ends == dict.fromkeys(range(3), (common_pb2.FINISH_REASON_LENGTH, ""))
            assert d.finished is not None and d.finished.finish_reason == common_pb2.FINISH_REASON_LENGTH
            assert (d.finished.usage.prompt_tokens, d.finished.usage.completion_tokens) == (length, 48)
            assert p.token_ids == [] and p.finished is None
            if not mixed:
                assert p.timings is not None and p.timings.prefill_s > 0
                assert d.timings is not None and d.timings.transfer_bytes < (-(-length // 16) + 1) * 512
        if not mixed:
            assert both.decode.metric("pdserve_kv_transfers_total", outcome="complete") == len(lengths)
        assert both.decode.metric("pdserve_worker_requests_total", finish_reason="length") == len(lengths)

    run(scenario, decode_role=Role.MIXED if mixed else Role.DECODE)


@ROLES
@pytest.mark.parametrize("length", [5, 2000])
@pytest.mark.parametrize("why", ["max_tokens", "stop token", "stop string", "late stop string"])
def test_an_end_at_the_first_token_is_an_end_of_each_choice(why: str, length: int, mixed: bool) -> None:
    async def scenario(both: Pair) -> None:
        prompt = prompt_of(length)
        tokens = expected_tokens(prompt, 16)
        first = tokens[0]
        late = f"t{tokens[5]} t{tokens[6]}"
        options, num_tokens, matched = {
            "max_tokens": ({"max_tokens": 1}, 1, ""),
            "stop token": ({"stop_token_ids": [first]}, 1, str(first)),
            "stop string": ({"stop": [f"t{first}"]}, 1, f"t{first}"),
            "late stop string": ({"stop": [late]}, 7, late),
        }[why]
        await submit(both, mixed, "r", prompt, n=4, **options)  # type: ignore[arg-type]
        _, d = await both.ended("r")
        choices = Choices(both.to_decode, "r")
        assert choices.tokens == dict.fromkeys(range(4), tokens[:num_tokens])
        assert {stop for _, stop in choices.ends.values()} == {matched} and len(choices.ends) == 4
        assert d.finished is not None and d.finished.usage.completion_tokens == 4 * num_tokens
        assert d.finished.stop_reason == matched

    run(scenario, decode_role=Role.MIXED if mixed else Role.DECODE)


@ROLES
@pytest.mark.parametrize("wait_s", [0.0, 0.03])
def test_an_abort_ends_all_choices_and_is_answered_once(wait_s: float, mixed: bool) -> None:
    async def scenario(both: Pair) -> None:
        for i in range(3):
            await submit(both, mixed, f"r{i}", prompt_of(600, i), n=4, max_tokens=2000)
        await asyncio.sleep(wait_s)
        workers = [both.to_decode] if mixed else [both.to_prefill, both.to_decode]
        for i in range(3):
            await asyncio.gather(*(both.abort(worker, f"r{i}") for worker in workers))

    run(scenario, decode_role=Role.MIXED if mixed else Role.DECODE)


def tiny() -> EngineConfig:
    return engine_config(num_pages=24, max_num_seqs=3)


@ROLES
def test_a_pool_too_small_for_all_choices_at_once(mixed: bool) -> None:
    async def scenario(both: Pair) -> None:
        await submit(both, mixed, "a", prompt_of(250), n=16, max_tokens=40)
        await submit(both, mixed, "b", prompt_of(100), n=5, max_tokens=40)
        for request_id, length, n in (("a", 250, 16), ("b", 100, 5)):
            _, d = await both.ended(request_id)
            assert d.failed is None
            right = expected_tokens(prompt_of(length), 40)
            assert Choices(both.to_decode, request_id).tokens == dict.fromkeys(range(n), right)

    run(scenario, decode=tiny(), decode_role=Role.MIXED if mixed else Role.DECODE)


def test_a_request_that_can_never_fit_is_refused_once() -> None:
    async def scenario(both: Pair) -> None:
        await submit(both, True, "r", prompt_of(24 * 16), n=4)
        _, d = await both.ended("r")
        assert d.failed is not None and d.failed.reason == "PROMPT_TOO_LONG"

    run(scenario, decode=tiny(), decode_role=Role.MIXED)


def test_a_transfer_that_fails_is_told_once() -> None:
    async def scenario(both: Pair) -> None:
        await both.submit("r", prompt_of(4000), n=3)
        await both.abort(both.to_prefill, "r")
        _, d = await both.ended("r")
        assert d.failed is not None and d.finished is None

    run(scenario, prefill=CREEPING)


def test_emitted_tokens_of_several_choices_are_refused() -> None:
    async def scenario(both: Pair) -> None:
        message = both.submission("r", prompt_of(5), common_pb2.ROLE_MIXED, emitted=[1], n=2)
        await both.to_decode.send(submit=message)
        await until(lambda: both.to_decode.of("r").failed is not None, "the refusal")
        assert isinstance(failed := both.to_decode.of("r").failed, common_pb2.ErrorDetail)
        assert failed.reason == "BAD_SUBMIT"

    run(scenario, decode_role=Role.MIXED)


def test_the_session_of_a_lost_router_takes_all_choices_with_it() -> None:
    async def scenario(both: Pair) -> None:
        await submit(both, False, "r", prompt_of(100), n=4, max_tokens=3000)
        await until(lambda: len(Choices(both.to_decode, "r").tokens) == 4, "all choices")
        for router in (both.to_prefill, both.to_decode):
            await router.send(abort=worker_pb2.Abort(fence=both.submission("r", [1]).fence, reason="GONE"))

    run(scenario)
