"""The embedded engine in the hands of a caller: wrong values, interrupts, streams that nobody reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pdserve import LLM, SamplingParams
from pdserve.core.errors import ConfigError, EngineError, RequestError
from pdserve.engine.fake import expected_tokens
from pdserve.engine.step import RunnerOutput, SchedulerOutput


def make(**options: Any) -> LLM:
    return LLM(**{"runner": "fake", "page_size": 4, "num_pages": 64, "max_num_seqs": 8, **options})


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make()


def params(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **more)


def idle(llm: LLM) -> None:
    """Runs what is queued and asserts that no page is held."""
    llm._step()
    core = llm._built.core
    core.check()
    load = core.step(0.0).load
    assert (load.num_running, load.num_waiting, load.num_free_pages) == (0, 0, load.num_pages)
    assert not llm._open


# ---- values ----


@pytest.mark.parametrize("wrong", [{"max_tokens": 4}, 5, "greedy", [{"max_tokens": 4}], [None], SamplingParams])
def test_what_is_no_sampling_params_is_refused_by_name(llm: LLM, wrong: Any) -> None:
    calls: list[Callable[[], object]] = [lambda: llm.generate("t1", wrong), lambda: llm.stream("t1", wrong)]
    for call in calls:
        with pytest.raises(RequestError, match=r"sampling_params is .*; it must be a SamplingParams"):
            call()


def test_their_number_must_be_that_of_the_prompts(llm: LLM) -> None:
    with pytest.raises(RequestError, match="sampling_params has 3 entries for 2 prompts"):
        llm.generate(["t1", "t2"], [params(1)] * 3)


@pytest.mark.parametrize("wrong", [None, 5, b"t1", {"role": "user"}, [b"t1"], [[True]], object(), np.array(5)])
def test_what_is_no_prompt_is_refused(llm: LLM, wrong: Any) -> None:
    with pytest.raises(RequestError, match="it must be text that UTF-8 can encode, a sequence of token ids"):
        llm.generate(wrong)


@pytest.mark.parametrize(
    ("message", "name"),
    [({"role": "user"}, "content"), ({"content": "t1"}, "role"), ({"role": "user", "content": ["t1"]}, "content")],
)
def test_a_chat_message_without_text_is_refused_by_name(llm: LLM, message: Any, name: str) -> None:
    with pytest.raises(RequestError, match=f"chat message 1: {name} is .*; it must be text"):
        llm.generate([{"role": "user", "content": "t1"}, message])


def test_prompts_may_come_from_any_iterable(llm: LLM) -> None:
    made = llm.generate(iter(["t1 t2", (3, 4), iter([5])]), params(4))  # type: ignore[arg-type]
    assert [list(c.token_ids) for c in made] == [expected_tokens(p, 4) for p in ([1, 2], [3, 4], [5])]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 0}, "page_size is 0; it must be at least 1 tokens"),
        ({"num_pages": "64"}, "num_pages is '64'; it must be an integer"),
        ({"num_pages": 6.5}, "num_pages is 6.5; it must be an integer"),
        ({"num_pages": True}, "num_pages is True; it must be an integer"),
        ({"page_size": None}, "page_size is None; it must be an integer"),
        ({"dtype": None}, "dtype is None; it must be text"),
        ({"enforce_eager": "no"}, "enforce_eager is 'no'; it must be True or False"),
        ({"tpot_slo_ms": float("nan")}, "tpot_slo_ms is nan; it must be a finite number"),
        ({"batching": "static", "batch_window_ms": 5}, "batch_window_ms is 5; it needs batching dynamic"),
        ({"priority_aging_s": 3}, "priority_aging_s is 3; it needs scheduling_policy priority"),
        ({"preemption_mode": "swap"}, "preemption_mode is 'swap' and swap_space_bytes is 0"),
        ({"swap_space_bytes": 5}, "swap_space_bytes is 5; one page of this model takes"),
        ({"max_sequences": 5}, "LLM takes no max_sequences"),
        ({"quantisation": "int8"}, "LLM takes no quantisation; did you mean quantization?"),
        ({"progress": True}, "progress is True; it must have begin, update and end"),
    ],
)
def test_options_are_refused_by_the_name_that_the_caller_wrote(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        make(**options)
    assert refusal.value.message.startswith(message) and "--" not in refusal.value.message


def test_a_priority_that_is_not_honoured_is_refused_by_the_name_of_the_option(llm: LLM) -> None:
    with pytest.raises(RequestError, match="scheduling_policy priority") as refusal:
        llm.generate("t1", params(2), priority=3)
    assert "--" not in refusal.value.message
    idle(llm)


def test_what_can_never_fit_is_refused_at_once() -> None:
    """The pool holds 12 tokens; nothing is computed for what asks for more, however many choices there are."""
    llm = make(num_pages=3)
    for n in (1, 3):
        with pytest.raises(RequestError, match=r"'max_tokens' is 9; the prompt of 4 tokens leaves 8 of .* 12"):
            llm.generate(range(4), params(9, n=n))
        with pytest.raises(RequestError, match="'min_tokens' is 9"):
            llm.generate(range(4), SamplingParams(min_tokens=9, n=n))
        with pytest.raises(RequestError, match="the prompt has 12 tokens"):
            llm.generate(range(12), params(1, n=n))
        assert llm._built.core.load().num_waiting == 0
        [whole] = llm.generate(range(4), params(8, n=n))
        assert [list(c.token_ids) for c in whole.choices] == [expected_tokens(range(4), 8)] * n
        [default] = llm.generate(range(4), SamplingParams(temperature=0.0, n=n))
        assert default.usage.completion_tokens == 8 * n
    idle(llm)


# ---- who leaves ----


def test_a_stream_that_is_dropped_unread_costs_nothing(llm: LLM) -> None:
    for read in (False, True):
        stream = llm.stream([1, 2, 3], params(40))
        if read:
            next(stream)
        del stream
        assert not llm._open
        idle(llm)
    closed = llm.stream([1, 2, 3], params(40))
    closed.close()  # type: ignore[attr-defined]
    idle(llm)


class Interrupted:
    """A runner that is interrupted, as by Ctrl-C, in one step.

    Args:
        llm: Whose runner it takes the place of.
        at: Says whether this is the step.
        before: Before anything of the step was done, rather than after all of it.
    """

    def __init__(self, llm: LLM, at: Callable[[SchedulerOutput], bool], before: bool) -> None:
        self._runner, self._at, self._before = llm._built.core._runner, at, before
        self.num_interrupts = 0
        llm._built.core._runner = self

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        if self.num_interrupts or not self._at(output):
            return self._runner.execute(output)
        self.num_interrupts += 1
        if not self._before:
            self._runner.execute(output)
        raise KeyboardInterrupt


@pytest.mark.parametrize("before", [True, False])
def test_an_interrupt_ends_the_batch_and_nothing_else(before: bool) -> None:
    llm = make()
    other = llm.stream([7, 8, 9], params(20))
    got = list(next(other).token_ids)
    runner = Interrupted(llm, lambda output: any(len(i.token_ids) > 5 for i in output.sequences), before)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([range(6), range(9)], params(30))
    assert runner.num_interrupts == 1
    [again] = llm.generate([range(9)], params(30))
    assert list(again.token_ids) == expected_tokens(range(9), 30)
    got += [t for delta in other for t in delta.token_ids]
    assert got == expected_tokens([7, 8, 9], 20)
    idle(llm)


@pytest.mark.parametrize("before", [True, False])
def test_an_interrupt_among_page_copies_ends_the_engine(before: bool) -> None:
    """Nobody knows which copies were made: a token computed on such pages would be wrong without a sign."""
    llm = make()
    other = llm.stream([7, 8, 9], params(20))
    next(other)
    Interrupted(llm, lambda output: bool(output.copies), before)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([range(6)], params(5, n=2))  # the fork's last page is a copy
    for call in (lambda: list(other), lambda: llm.generate([range(6)], params(5))):
        with pytest.raises(EngineError, match="must be restarted: KeyboardInterrupt"):
            call()
