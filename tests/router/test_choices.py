"""n > 1 at the router: every choice has its own indices, offsets and end; the request has one end."""

from __future__ import annotations

import pytest

from pdserve.bench.virtual_time import run_virtual
from pdserve.core.clock import MonotonicClock
from pdserve.core.errors import EngineError, UnavailableError
from pdserve.router.open_request import OpenRequest
from pdserve.router.output_stream import OutputStream
from pdserve.router.progress import Progress
from pdserve.router.recorder import Recorder
from pdserve.router.store_fake import FakeStore
from pdserve.router.trace import NoTrace
from pdserve.v1 import common_pb2, inference_pb2, worker_pb2
from tests.router.world import World, admitted


def news(
    choice: int, index: int, *ids: int, text: str = "", at: int = 0, end: str | None = None, last: bool = False
) -> worker_pb2.SequenceOutput:
    """News of one choice; `end` is its stop reason, `last` the end of all."""
    delta = common_pb2.Delta(choice=choice, index=index, token_ids=ids, text=text, text_offset=at)
    if end is not None:
        delta.finish_reason, delta.stop_reason = common_pb2.FINISH_REASON_STOP, end
    output = worker_pb2.SequenceOutput(delta=delta)
    if last:
        output.finished.finish_reason = common_pb2.FINISH_REASON_STOP
    return output


def computed(**timings: float) -> worker_pb2.SequenceOutput:
    return worker_pb2.SequenceOutput(timings=common_pb2.Timings(**timings))


async def open_two(w: World, request_id: str = "r") -> OpenRequest:
    two = admitted(request_id, n=2)
    opened = await w.orchestrator.open(two, arrival_s=w.clock.now(), deadline_s=None, trace=NoTrace())
    await w.settle()
    return opened


async def read(opened: OpenRequest) -> tuple[list[common_pb2.Delta], inference_pb2.Finished]:
    deltas = []
    while isinstance(item := await opened.stream.next(), common_pb2.Delta):
        deltas.append(item)
    return deltas, item


def test_a_pair_sends_all_choices_from_decode() -> None:
    async def main() -> None:
        w = World("p0", "d0")
        opened = await open_two(w)
        p, d = w.clients["p0"], w.clients["d0"]
        assert d.submits["r", 1].sampling.n == p.submits["r", 1].sampling.n == 2
        d.output("r", news(0, 0, 10, text="a"))  # before prefill's message came
        await w.settle()
        assert opened.progress.num_tokens == 0
        d.reserve("r")
        p.output("r", computed(prefill_s=1.0))
        d.output("r", news(1, 0, 20, text="bb"))
        d.output("r", news(1, 1, 21, text="c", at=2, end="c"))
        await w.clock.sleep(1)
        assert not p.leases and opened.progress.num_tokens == 3
        d.output("r", news(0, 1, 11, text="d", at=1, end="11", last=True))
        await w.settle()
        deltas, finished = await read(opened)
        assert [(x.choice, x.index, list(x.token_ids), x.text, x.stop_reason) for x in deltas] == [
            (0, 0, [10, 11], "ad", "11"),
            (1, 0, [20, 21], "bbc", "c"),
        ]
        assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (3, 4)
        t = finished.timings
        assert (t.prefill_s, t.ttft_s, t.tpot_s, t.e2e_s, t.handoff_gap_s) == (1.0, 0.0, 1.0, 1.0, 0.0)
        assert w.store.records["r"].emitted_tokens == 4
        w.check_clean()

    run_virtual(main())


def test_cached_tokens_are_counted_once() -> None:
    async def main() -> None:
        w = World("p0", "d0")
        opened = await open_two(w)
        p, d = w.clients["p0"], w.clients["d0"]
        d.reserve("r")
        prompt, decoded = computed(), news(0, 0, 1, end="x")
        prompt.cached_tokens, decoded.cached_tokens = 2, 3
        p.output("r", prompt)
        d.output("r", decoded)
        d.output("r", computed(decode_s=1.0))
        d.output("r", news(1, 0, 2, end="x", last=True))
        _, finished = await read(opened)
        assert finished.usage.cached_tokens == 2
        opened.progress.count_cached(1)  # of a later attempt
        assert opened.progress.num_cached_tokens == 2
        w.check_clean()

    run_virtual(main())


def test_a_refused_reservation_moves_all_choices() -> None:
    async def main() -> None:
        w = World("p0", "d0")
        opened = await open_two(w)
        p, d = w.clients["p0"], w.clients["d0"]
        p.output("r", computed())
        d.reserve("r", reserved=False, retry_after_ms=1000)
        await w.until(lambda: ("r", 2) in d.submits)
        d.reserve("r", 2)
        p.output("r", computed(), 2)
        d.output("r", news(0, 0, 1, end="x"), 2)
        d.output("r", news(1, 0, 2, end="x", last=True), 2)
        deltas, finished = await read(opened)
        assert [list(x.token_ids) for x in deltas] == [[1], [2]] and finished.attempt == 2
        w.check_clean()

    run_virtual(main())


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (news(1, 1, 5), "output index 1, expected 0"),
        (news(0, 2, 5, at=1), "output index 2, expected 1"),
        (news(1, 0, 5, text="x", at=1), "text offset 1, expected 0"),
        (news(2, 0, 5), "choice 2 of 2"),
    ],
)
def test_gaps_are_seen_in_each_choice(wrong: worker_pb2.SequenceOutput, what: str) -> None:
    async def main() -> None:
        w = World("m0")
        opened = await open_two(w)
        w.clients["m0"].output("r", news(0, 0, 4, text="y"))
        w.clients["m0"].output("r", wrong)
        with pytest.raises(EngineError, match=what):
            await read(opened)
        w.check_clean()

    run_virtual(main())


def test_a_token_of_prefill_is_refused() -> None:
    async def main() -> None:
        w = World("p0", "d0")
        opened = await open_two(w)
        w.clients["d0"].reserve("r")
        w.clients["p0"].output("r", news(0, 0, 4))
        with pytest.raises(EngineError, match="prefill worker p0 sent 1 tokens"):
            await read(opened)
        w.check_clean()

    run_virtual(main())


def test_a_choice_that_ends_without_news_is_told() -> None:
    async def main() -> None:
        w = World("m0")
        opened = await open_two(w)
        m = w.clients["m0"]
        m.output("r", news(0, 0, 1))
        m.output("r", news(1, 0, 2))
        await w.settle()
        assert [(await opened.stream.next()).choice for _ in range(2)] == [0, 1]  # type: ignore[union-attr]
        m.output("r", news(0, 1, end="s"))
        m.output("r", news(1, 1, end="t", last=True))
        deltas, _ = await read(opened)
        assert [(x.choice, x.stop_reason) for x in deltas] == [(0, "s"), (1, "t")]
        w.check_clean()

    run_virtual(main())


def test_what_a_slow_reader_has_not_taken_is_merged_by_choice() -> None:
    stream = OutputStream()
    progress = Progress(MonotonicClock(), 0.0, stream, Recorder(FakeStore(), "r"), NoTrace(), 3)
    for index in range(50):
        for choice in range(3):
            stream.put(common_pb2.Delta(choice=choice, index=index, token_ids=[choice]))
    assert len(stream._deltas) == 3 and len(progress.choices) == 3
    assert [(d.choice, d.index, len(d.token_ids)) for d in stream._deltas] == [(i, 0, 50) for i in range(3)]


@pytest.mark.parametrize("begun", [False, True])
def test_a_worker_that_dies_amid_several_choices_ends_the_request_once(begun: bool) -> None:
    async def main() -> None:
        w = World("m0")
        opened = await open_two(w)
        m = w.clients["m0"]
        if begun:
            m.output("r", news(0, 0, 4, text="y"))
            m.output("r", news(1, 0, 5, text="z", end="s"))
            await w.settle()
        w.die("m0")
        deltas = []
        with pytest.raises(UnavailableError) as ended:
            while isinstance(item := await opened.stream.next(), common_pb2.Delta):
                deltas.append(item)
        assert ended.value.status == "UNAVAILABLE" and ended.value.reason
        assert [(d.choice, list(d.token_ids)) for d in deltas] == ([(0, [4]), (1, [5])] if begun else [])
        w.check_clean()

    run_virtual(main())
