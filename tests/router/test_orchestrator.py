"""The life of a request, event by event, on fakes and virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from pdserve.bench.virtual_time import run_virtual
from pdserve.core.errors import CapacityError, DeadlineError, PdserveError, UnavailableError
from pdserve.router.inbox import Inbox, WorkersChanged
from pdserve.router.record import DuplicateRequestError, RequestState
from pdserve.router.trace import NoTrace
from pdserve.v1 import common_pb2, worker_pb2
from tests.router.world import World, failed, read_all, tokens

S = RequestState


def test_pair_both_submitted_at_once_and_the_stream_is_whole() -> None:
    async def main() -> None:
        w = World("p0", "d0")
        opened = await w.open()
        p, d = w.clients["p0"], w.clients["d0"]
        to_p, to_d = p.submits["r", 1], d.submits["r", 1]
        assert (to_p.part, to_d.part) == (common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE)
        assert to_p.transfer_id == to_d.transfer_id != ""
        assert to_p.prefill.worker_id == to_d.prefill.worker_id == "p0"
        assert p.leases == {to_p.transfer_id}
        await w.clock.sleep(1)
        d.reserve("r")
        first = tokens(0, 10, queue_s=0.5, prefill_s=1.0)
        first.cached_tokens = 2
        p.output("r", first)
        await w.clock.sleep(1)
        assert p.leases, "renewed until decode streams"
        d.output("r", tokens(1, 11))
        await w.clock.sleep(2)
        assert not p.leases
        d.output("r", tokens(2, 12, 13, finish=True, transfer_s=0.25, transfer_bytes=7, decode_s=3.0))
        ids, finished = await read_all(opened)
        assert ids == [10, 11, 12, 13]
        t = finished.timings
        assert (t.queue_s, t.prefill_s, t.transfer_s, t.transfer_bytes) == (0.5, 1.0, 0.25, 7)
        assert (t.ttft_s, t.handoff_gap_s, t.tpot_s, t.e2e_s) == (1.0, 1.0, 1.0, 4.0)
        usage = finished.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 4, 2)
        assert w.store.history["r"] == [(1, S.QUEUED), (1, S.PLACED), (1, S.DECODING), (1, S.FINISHED)]
        assert w.store.records["r"].emitted_tokens == 4
        assert p.aborted == d.aborted == []
        w.check_clean()

    run_virtual(main())


def test_token_1_waits_for_the_reservation_and_early_decode_output_waits_for_token_1() -> None:
    async def main() -> None:
        w = World("p0", "d0")
        opened = await w.open()
        p, d = w.clients["p0"], w.clients["d0"]
        p.output("r", tokens(0, 10))
        await w.clock.sleep(3)
        assert opened.progress.num_tokens == 0
        d.reserve("r")
        await w.settle()
        assert opened.progress.num_tokens == 1
        assert opened.progress.timings().ttft_s == 3.0, "TTFT is the release, not the arrival at the router"
        d.output("r", tokens(1, 11, 12, 13, finish=True))
        assert (await read_all(opened))[0] == [10, 11, 12, 13]

        opened = await w.open("s")
        d.reserve("s")
        d.output("s", tokens(1, 21))
        d.output("s", tokens(2, 22, 23, finish=True))
        await w.settle()
        assert opened.progress.num_tokens == 0
        p.output("s", tokens(0, 20))
        assert (await read_all(opened))[0] == [20, 21, 22, 23]
        w.check_clean()

    run_virtual(main())


def test_request_that_ends_at_prefill_gives_the_reservation_back() -> None:
    async def main() -> None:
        w = World("p0", "d0")
        opened = await w.open(max_tokens=1)
        w.clients["p0"].output("r", tokens(0, 10, finish=True))
        ids, finished = await read_all(opened)
        assert ids == [10]
        assert finished.finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert w.clients["d0"].aborted == [("r", 1, "FINISHED")]
        assert w.clients["p0"].aborted == []
        w.check_clean()

    run_virtual(main())


def test_mixed_route() -> None:
    async def main() -> None:
        w = World("m0")
        opened = await w.open()
        submit = w.clients["m0"].submits["r", 1]
        assert submit.part == common_pb2.ROLE_MIXED
        assert not submit.transfer_id
        w.clients["m0"].output("r", tokens(0, 10))
        w.clients["m0"].output("r", tokens(1, 11, 12, 13, finish=True))
        assert (await read_all(opened))[0] == [10, 11, 12, 13]
        w.check_clean()

    run_virtual(main())


def test_refusal_goes_to_another_decode_worker_as_the_next_attempt() -> None:
    async def main() -> None:
        w = World("p0", "d0", "d1")
        opened = await w.open()
        here, other = w.clients["d0"], w.clients["d1"]
        if not here.submits:
            here, other = other, here
        first = here.submits["r", 1]
        w.clients["p0"].output("r", tokens(0, 10))
        here.reserve("r", reserved=False, retry_after_ms=5000)
        await w.settle()
        assert w.clients["p0"].aborted == [("r", 1, "RESERVATION_REFUSED")]
        second = other.submits["r", 2]
        assert first.reservation_id == second.reservation_id
        assert first.transfer_id != second.transfer_id
        assert w.clock.now() == 0.0
        other.reserve("r", 2)
        w.clients["p0"].output("r", tokens(0, 10), 2)
        other.output("r", tokens(1, 11, 12, 13, finish=True), 2)
        ids, finished = await read_all(opened)
        assert ids == [10, 11, 12, 13], "the token of the refused attempt was never released"
        assert finished.attempt == 2
        w.check_clean()

    run_virtual(main())


def test_refused_by_the_only_one_waits_its_time_and_gives_up_in_the_end() -> None:
    async def main() -> None:
        w = World("p0", "d0", queue_timeout_s=10.0)
        opened = await w.open()
        for attempt in (1, 2):
            w.clients["d0"].reserve("r", attempt, reserved=False, retry_after_ms=4000)
            await w.settle()
            assert ("r", attempt + 1) not in w.clients["d0"].submits
            await w.clock.sleep(4.1)
        w.clients["d0"].reserve("r", 3, reserved=False, retry_after_ms=4000)
        with pytest.raises(CapacityError) as caught:
            await read_all(opened)
        assert caught.value.reason == "NO_CAPACITY"
        assert w.clock.now() == 10.0
        assert w.store.records["r"].state is S.FAILED
        w.check_clean()

    run_virtual(main())


@pytest.mark.parametrize("retry_after_s", [(1, 5), (5, 1)])
def test_refused_by_all_goes_to_the_first_that_may_have_room(retry_after_s: tuple[int, int]) -> None:
    async def main() -> None:
        w = World("p0", "d0", "d1")
        await w.open()
        wait_s = dict(zip(("d0", "d1"), retry_after_s, strict=True))
        for attempt in (1, 2):
            (name,) = (n for n in wait_s if w.clients[n].submits)
            w.clients[name].reserve("r", attempt, reserved=False, retry_after_ms=1000 * wait_s[name])
            await w.settle()
        await w.clock.sleep(1.1)
        assert ("r", 3) in w.clients[min(wait_s, key=wait_s.__getitem__)].submits

    run_virtual(main())


def test_request_that_can_never_fit_is_told_so() -> None:
    async def main() -> None:
        w = World("p0", "d0")
        opened = await w.open()
        w.clients["d0"].reserve("r", reserved=False)
        with pytest.raises(CapacityError) as caught:
            await read_all(opened)
        assert caught.value.reason == "DOES_NOT_FIT"
        assert w.clients["p0"].aborted == [("r", 1, "DOES_NOT_FIT")]
        w.check_clean()

    run_virtual(main())


Script = Callable[[World], None]


def token_1(w: World) -> None:
    w.clients["p0"].output("r", tokens(0, 10))


def reserved(w: World) -> None:
    w.clients["d0"].reserve("r")


def token_2(w: World) -> None:
    w.clients["d0"].output("r", tokens(1, 11))


PHASES: dict[str, list[Script]] = {
    "placed": [],
    "reserved": [reserved],
    "computed": [token_1],
    "transferring": [reserved, token_1],
    "decoding": [reserved, token_1, token_2],
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("how", ["cancel", "disconnect", "deadline"])
def test_cancel_at_each_phase(phase: str, how: str) -> None:
    async def main() -> None:
        w = World("p0", "d0")
        opened = await w.open(deadline_s=7.0 if how == "deadline" else None)
        for step in PHASES[phase]:
            step(w)
        await w.settle()
        if how == "deadline":
            await w.clock.sleep(8)
        else:
            opened.cancel("CLIENT_CANCELLED" if how == "cancel" else "CLIENT_DISCONNECTED")
        if how == "deadline":
            with pytest.raises(DeadlineError):
                await read_all(opened)
        else:
            _, finished = await read_all(opened)
            assert finished.finish_reason == common_pb2.FINISH_REASON_CANCELLED
        assert [a[:2] for a in w.clients["d0"].aborted] == [("r", 1)]
        assert [a[:2] for a in w.clients["p0"].aborted] == [("r", 1)]
        assert w.store.records["r"].state is S.CANCELLED
        w.check_clean()

    run_virtual(main())


def test_cancel_and_deadline_in_the_queue() -> None:
    async def main() -> None:
        w = World("d0")
        opened = await w.open("a")
        late = await w.open("b", deadline_s=2.0)
        opened.cancel("CLIENT_CANCELLED")
        _, finished = await read_all(opened)
        assert finished.finish_reason == common_pb2.FINISH_REASON_CANCELLED
        with pytest.raises(DeadlineError):
            await read_all(late)
        assert w.clock.now() == 2.0
        assert w.clients["d0"].aborted == []
        w.check_clean()

    run_virtual(main())


def test_abort_that_is_never_answered_is_bounded() -> None:
    async def main() -> None:
        w = World("p0", "d0")
        w.clients["d0"].answers_aborts = False
        opened = await w.open()
        opened.cancel("CLIENT_CANCELLED")
        await read_all(opened)
        w.check_clean()

    run_virtual(main())


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("victim", ["p0", "d0"])
def test_death_at_each_phase(phase: str, victim: str) -> None:
    async def main() -> None:
        w = World("p0", "d0")
        opened = await w.open()
        for step in PHASES[phase]:
            step(w)
        await w.settle()
        w.die(victim)
        await w.settle()
        survivor = w.clients["d0" if victim == "p0" else "p0"]
        if victim == "p0" and token_1 in PHASES[phase]:
            assert survivor.aborted == [], "decode has every page or says what it misses"
            if reserved not in PHASES[phase]:
                reserved(w)
            survivor.output("r", tokens(2 if phase == "decoding" else 1, 12, 13, finish=True))
            assert (await read_all(opened))[0][:1] == [10]
        else:
            with pytest.raises(UnavailableError) as caught:
                await read_all(opened)
            assert caught.value.reason == "WORKER_DIED"
            assert victim in caught.value.message
            assert survivor.aborted == [("r", 1, "WORKER_DIED")]
            assert w.store.records["r"].state is S.FAILED
        w.check_clean()

    run_virtual(main())


@pytest.mark.parametrize("victim", ["p0", "d0"])
@pytest.mark.parametrize("how", ["refuses", "ends"])
def test_a_worker_that_drains_passes_the_request_on(victim: str, how: str) -> None:
    """The Submit was on its way when the worker began to drain: another takes the request, the client sees nothing."""

    async def main() -> None:
        w = World("p0", "d0")
        opened = await w.open()
        w.connect(victim[0] + "1")
        readiness = Inbox()
        w.workers.subscribe(readiness)
        if how == "refuses":
            w.clients[victim].output("r", failed("DRAINING"))
        else:
            w.die(victim, "DRAINING")
        await w.settle()
        p, d = ("p1", "d0") if victim == "p0" else ("p0", "d1")
        assert w.clients[p].submits.keys() == w.clients[d].submits.keys() == {("r", 2)}
        async with asyncio.timeout(1):
            assert isinstance(await readiness.get(), WorkersChanged)
        w.clients[d].reserve("r", 2)
        w.clients[p].output("r", tokens(0, 10), 2)
        w.clients[d].output("r", tokens(1, 11, 12, 13, finish=True), 2)
        ids, finished = await read_all(opened)
        assert (ids, finished.attempt) == ([10, 11, 12, 13], 2)
        w.check_clean()

    run_virtual(main())


def test_a_worker_that_ends_while_it_drains_fails_what_has_begun() -> None:
    async def main() -> None:
        w = World("p0", "d0", "d1")
        opened = await w.open()
        d = next(name for name in ("d0", "d1") if w.clients[name].submits)
        w.clients[d].reserve("r")
        w.clients["p0"].output("r", tokens(0, 10))
        await w.settle()
        w.die(d, "DRAINING")
        with pytest.raises(UnavailableError) as caught:
            await read_all(opened)
        assert caught.value.reason == "DRAINING"
        w.check_clean()

    run_virtual(main())


@pytest.mark.parametrize("who", ["p0", "d0"])
def test_failed_output_ends_the_other_side(who: str) -> None:
    async def main() -> None:
        w = World("p0", "d0")
        opened = await w.open()
        w.clients[who].output("r", failed("TRANSFER_FAILED"))
        with pytest.raises(PdserveError) as caught:
            await read_all(opened)
        assert caught.value.reason == "TRANSFER_FAILED"
        assert "p0" in caught.value.message
        assert "d0" in caught.value.message
        assert w.clients[who].aborted == []
        other = w.clients["d0" if who == "p0" else "p0"]
        assert other.aborted == [("r", 1, "TRANSFER_FAILED")]
        w.check_clean()

    run_virtual(main())


@pytest.mark.parametrize("bad_index", [0, 1, 3])
def test_gap_or_repeat_is_an_internal_error_and_never_passed_on(bad_index: int) -> None:
    async def main() -> None:
        w = World("p0", "d0")
        opened = await w.open()
        for step in PHASES["decoding"]:
            step(w)
        w.clients["d0"].output("r", tokens(bad_index, 99))
        got = await opened.stream.next()
        assert isinstance(got, common_pb2.Delta)
        with pytest.raises(PdserveError) as caught:
            await opened.stream.next()
        assert caught.value.status == "INTERNAL"
        assert list(got.token_ids) == [10, 11]
        assert [a[:2] for a in w.clients["d0"].aborted] == [("r", 1)]
        w.check_clean()

    run_virtual(main())


@pytest.mark.parametrize("bad_offset", [0, 2, 4])
@pytest.mark.parametrize("news", [tokens(2, 12, text="d"), tokens(2, 12), tokens(2, text="d", finish=True)])
def test_gap_or_repeat_in_the_text_is_an_internal_error_too(news: worker_pb2.SequenceOutput, bad_offset: int) -> None:
    async def main() -> None:
        w = World("p0", "d0")
        opened = await w.open()
        reserved(w)
        w.clients["p0"].output("r", tokens(0, 10, text="aé"))
        w.clients["d0"].output("r", tokens(1, 11, text="c", at=2))
        broken = worker_pb2.SequenceOutput()
        broken.CopyFrom(news)
        broken.delta.text_offset = bad_offset
        w.clients["d0"].output("r", broken)
        got = await opened.stream.next()
        assert isinstance(got, common_pb2.Delta)
        assert got.text == "aéc"
        with pytest.raises(PdserveError) as caught:
            await opened.stream.next()
        assert (caught.value.status, caught.value.reason) == ("INTERNAL", "BROKEN_STREAM")
        assert [a[:2] for a in w.clients["d0"].aborted] == [("r", 1)]
        w.check_clean()

    run_virtual(main())


def test_the_text_of_prefill_may_come_with_decode() -> None:
    async def main() -> None:
        w = World("p0", "d0")
        opened = await w.open()
        reserved(w)
        w.clients["p0"].output("r", tokens(0, 10))  # half a character
        w.clients["d0"].output("r", tokens(1, 11, text="é"))
        w.clients["d0"].output("r", tokens(2, text="!", at=1, finish=True))
        assert (await read_all(opened))[0] == [10, 11]

    run_virtual(main())


def test_slow_reader_gets_everything_in_few_messages() -> None:
    async def main() -> None:
        w = World("m0")
        opened = await w.open(max_tokens=100)
        at = 0
        for i in range(100):
            w.clients["m0"].output("r", tokens(i, i, text=f"{i},", at=at, finish=i == 99))
            at += len(f"{i},")
        await w.until(lambda: w.orchestrator.num_open == 0)
        delta = await opened.stream.next()
        assert isinstance(delta, common_pb2.Delta)
        assert list(delta.token_ids) == list(range(100))
        assert delta.text == "".join(f"{i}," for i in range(100))
        assert not isinstance(await opened.stream.next(), common_pb2.Delta)

    run_virtual(main())


class Ends(NoTrace):
    """Notes how requests ended."""

    def __init__(self) -> None:
        self.ends: list[tuple[str, str]] = []

    def ended(
        self, outcome: str, error: PdserveError | None, timings: common_pb2.Timings, usage: common_pb2.Usage
    ) -> None:
        self.ends.append((outcome, error.reason if error else ""))


def test_a_fault_of_ours_ends_the_request_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    async def main() -> None:
        w, trace = World("p0", "d0"), Ends()
        monkeypatch.setattr(w.clients["d0"], "submit", fault)
        opened = await w.open(trace=trace)
        with pytest.raises(PdserveError, match="its log") as caught:
            await read_all(opened)
        assert caught.value.status == "INTERNAL"
        assert w.clients["p0"].aborted == [("r", 1, "ROUTER_FAILED")]
        assert w.store.records["r"].state is S.FAILED
        assert trace.ends == [("failed", "INTERNAL")], "counted, and its span ended"
        w.check_clean()

    run_virtual(main())


def test_a_worker_that_ends_for_no_known_reason_is_told_as_a_fault() -> None:
    async def main() -> None:
        w, trace = World("m0"), Ends()
        opened = await w.open(trace=trace)
        output = worker_pb2.SequenceOutput()
        output.finished.finish_reason = common_pb2.FINISH_REASON_UNSPECIFIED
        w.clients["m0"].output("r", output)
        with pytest.raises(PdserveError, match="UNSPECIFIED") as caught:
            await read_all(opened)
        assert (caught.value.status, caught.value.reason) == ("INTERNAL", "BROKEN_STREAM")
        assert trace.ends == [("failed", "BROKEN_STREAM")]
        w.check_clean()

    run_virtual(main())


def test_queue_time_begins_with_the_arrival() -> None:
    async def main() -> None:
        w = World("m0")
        await w.clock.sleep(3)  # tokenising, or waiting for the first worker
        opened = await w.open(arrival_s=1.0)
        w.clients["m0"].output("r", tokens(0, 1, 2, 3, 4, finish=True))
        _, finished = await read_all(opened)
        assert (finished.timings.queue_s, finished.timings.ttft_s) == (2.0, 2.0)

    run_virtual(main())


def test_waits_for_a_worker_and_is_woken_by_it() -> None:
    async def main() -> None:
        w = World("p0")
        opened = await w.open()
        await w.clock.sleep(2)
        w.connect("d0")
        await w.settle()
        assert ("r", 1) in w.clients["d0"].submits
        opened.cancel("CLIENT_CANCELLED")
        _, finished = await read_all(opened)
        assert finished.timings.queue_s == 2.0

    run_virtual(main())


def test_no_worker_is_told_with_what_is_missing() -> None:
    async def main() -> None:
        w = World("p0", no_worker_timeout_s=5.0)
        opened = await w.open()
        with pytest.raises(UnavailableError, match="no decode worker is ready") as caught:
            await read_all(opened)
        assert caught.value.reason == "NO_WORKER"
        assert w.clock.now() == 5.0
        empty = World(no_worker_timeout_s=5.0)
        with pytest.raises(UnavailableError, match="no prefill and no decode"):
            await empty.orchestrator.limits()
        w.check_clean()
        empty.check_clean()

    run_virtual(main())


async def refuse(w: World, request_id: str = "r") -> PdserveError:
    with pytest.raises(PdserveError) as caught:
        await w.open(request_id)
    return caught.value


def test_store_down_refuses_new_requests_and_running_ones_go_on() -> None:
    async def main() -> None:
        w = World("m0")
        opened = await w.open()
        w.store.down = True
        error = await refuse(w, "s")
        assert (error.status, error.reason) == ("UNAVAILABLE", "STORE_UNAVAILABLE")
        w.clients["m0"].output("r", tokens(0, 1, 2, 3, 4, finish=True))
        assert (await read_all(opened))[0] == [1, 2, 3, 4]
        w.check_clean()

    run_virtual(main())


def test_second_request_with_the_same_id() -> None:
    async def main() -> None:
        w = World("m0")
        opened = await w.open()
        running = await refuse(w)
        opened.cancel("CLIENT_CANCELLED")
        await read_all(opened)
        ended = await refuse(w)
        for error in (running, ended):
            assert isinstance(error, DuplicateRequestError)
            assert error.status == "ALREADY_EXISTS"
            assert "Attach" in error.message
        assert "placed" in running.message
        assert "cancelled" in ended.message

    run_virtual(main())


def test_id_that_was_deleted_is_a_new_request_of_a_newer_epoch() -> None:
    async def main() -> None:
        w = World("p0", "d0")
        epochs = []
        for _ in range(3):
            opened = await w.open()
            for worker in ("p0", "d0"):
                submitted = w.clients[worker].submits["r", 1].fence
                epochs.append(submitted.owner_epoch)
            opened.cancel("CLIENT_CANCELLED")
            await read_all(opened)
            assert w.store.records["r"].state is S.CANCELLED
            assert await w.store.delete("r")
        assert epochs == [1, 1, 2, 2, 3, 3]
        w.check_clean()

    run_virtual(main())


def test_queue_limit() -> None:
    async def main() -> None:
        w = World("m0", max_queue=2)
        await w.open("a")
        await w.open("b")
        error = await refuse(w, "c")
        assert (error.status, error.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")

    run_virtual(main())


def test_drain_lets_running_requests_end_and_takes_no_new_ones() -> None:
    async def main() -> None:
        w = World("m0")
        opened = await w.open()
        w.orchestrator.begin_drain()
        assert (await refuse(w, "late")).reason == "DRAINING"
        w.clients["m0"].output("r", tokens(0, 1, 2, 3, 4, finish=True))
        await w.orchestrator.drain(30.0)
        assert (await read_all(opened))[0] == [1, 2, 3, 4]
        w.check_clean()

    run_virtual(main())


def test_drain_ends_what_outlives_the_grace() -> None:
    async def main() -> None:
        w = World("m0")
        opened = await w.open()
        await w.orchestrator.drain(3.0)
        assert w.clock.now() == 3.0
        with pytest.raises(UnavailableError) as caught:
            await read_all(opened)
        assert caught.value.reason == "DRAINING"
        assert w.clients["m0"].aborted == [("r", 1, "ROUTER_DRAINING")]
        w.check_clean()

    run_virtual(main())


def test_client_that_leaves_while_its_record_is_written_is_cancelled() -> None:
    async def main() -> None:
        w = World("m0")
        opening = asyncio.create_task(w.open())
        await asyncio.sleep(0)
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        await w.until(lambda: w.orchestrator.num_open == 0)
        assert w.store.records["r"].state is S.CANCELLED
        w.check_clean()

    run_virtual(main())


def told(position: int, *ids: int) -> worker_pb2.SequenceOutput:
    """Log-probabilities of the prompt from a position on."""
    chosen = (common_pb2.PositionLogprobs(chosen=common_pb2.TokenLogprob(token_id=i)) for i in ids)
    return worker_pb2.SequenceOutput(prompt_logprobs=common_pb2.PromptLogprobs(position=position, logprobs=chosen))


def test_what_a_refused_attempt_told_of_the_prompt_is_not_repeated() -> None:
    async def main() -> None:
        w = World("p0", "d0", "d1")
        opened = await w.open(prompt_logprobs=0)
        w.clients["p0"].output("r", told(1, 2))
        await w.settle()
        first = next(d for d in (w.clients["d0"], w.clients["d1"]) if d.submits)
        first.reserve("r", reserved=False, retry_after_ms=50_000)
        await w.settle()
        other = next(d for d in (w.clients["d0"], w.clients["d1"]) if d.submits)
        p = w.clients["p0"]
        p.output("r", told(1, 2, 3), attempt=2)
        other.reserve("r", attempt=2)
        p.output("r", tokens(0, 10), attempt=2)
        other.output("r", tokens(1, 11, finish=True), attempt=2)
        items = [await opened.stream.next() for _ in range(3)]
        assert [(i.position, [x.chosen.token_id for x in i.logprobs]) for i in items[:2]] == [(1, [2]), (2, [3])]  # type: ignore[union-attr]
        assert list(items[2].token_ids) == [10, 11]  # type: ignore[union-attr]
        await opened.stream.next()
        w.check_clean()

    run_virtual(main())


@pytest.mark.parametrize(
    "outputs",
    [[told(2, 3)], [told(1, 2, 3, 9)], [told(0, 1)], [told(1, 2), tokens(0, 10)], [tokens(0, 10)]],
    ids=["gap", "too many", "position 0", "output too early", "none"],
)
def test_a_prompt_told_wrong_fails_the_request(outputs: list[worker_pb2.SequenceOutput]) -> None:
    async def main() -> None:
        w = World("m0")
        opened = await w.open(prompt_logprobs=0)
        for output in outputs:
            w.clients["m0"].output("r", output)
        with pytest.raises(PdserveError) as caught:
            while True:
                await opened.stream.next()
        assert caught.value.reason == "BROKEN_STREAM"
        w.check_clean()

    run_virtual(main())
