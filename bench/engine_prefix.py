"""Experiment: the turns of a conversation prefill only what is new, and a workload without reuse pays little."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass

from pdserve.bench.engine_lab import Findings, Lab, Recorder, Setting, WallTime, bench_request, serve
from pdserve.bench.report import Row
from pdserve.bench.workload import random_items
from pdserve.core.config import check, option
from pdserve.core.errors import ConfigError, EngineError
from pdserve.engine.engine_core import EngineCore
from pdserve.engine.step import Add, SequenceFailed, TokensSampled

DEFAULTS: dict[str, object] = {"threads": 2, "num_pages": 1024, "max_num_seqs": 16}
QUICK: dict[str, object] = {
    "num_turns": 2,
    "first_len": 20,
    "turn_len": 5,
    "answer_len": 4,
    "num_prompts": 3,
    "repeats": 1,
}


@dataclass(frozen=True, kw_only=True)
class PrefixOptions:
    """Sizes of the prefix cache's measurement."""

    num_turns: int = option(6, "turns of the conversation", unit="turns", minimum=2)
    first_len: int = option(200, "tokens of the first prompt", unit="tokens", minimum=1)
    turn_len: int = option(30, "tokens that each further turn adds to what was said", unit="tokens", minimum=1)
    answer_len: int = option(32, "tokens of each answer", unit="tokens", minimum=1)
    num_prompts: int = option(32, "prompts of the workload without reuse", unit="requests", minimum=1)

    def __post_init__(self) -> None:
        check(self)


OPTIONS = PrefixOptions


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn.

    Attributes:
        num_prompt: Tokens of its prompt.
        num_prefilled: Of these, tokens that were computed.
        ttft_s: Seconds to its first token.
        token_ids: The answer.
    """

    num_prompt: int
    num_prefilled: int
    ttft_s: float
    token_ids: tuple[int, ...]


def run(options: PrefixOptions, setting: Setting) -> Findings:
    """Measures."""
    if not setting.engine.enable_prefix_caching:
        raise ConfigError("--enable-prefix-caching is off; this experiment compares on with off by itself")
    lab = Lab(setting.engine)
    lab.warm_up()
    talks: dict[bool, list[list[Turn]]] = {True: [], False: []}
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for at in range(setting.repeats):
        setting.say(f"run {at + 1} of {setting.repeats}")
        for on in (True, False) if at % 2 == 0 else (False, True):
            talks[on].append(converse(*lab.engine(enable_prefix_caching=on), options, lab.vocab_size, setting.seed))
            # Prompts that share nothing: every page is hashed, published and never found.
            arrivals = [0.0] * options.num_prompts
            seed = setting.seed + at
            items = random_items(arrivals, options.first_len, options.answer_len, 0.0, lab.vocab_size, seed)
            seconds[on].append(serve(*lab.engine(enable_prefix_caching=on), items, WallTime()).seconds)
    return _findings(talks, seconds)


def converse(core: EngineCore, recorder: Recorder, options: PrefixOptions, vocab_size: int, seed: int) -> list[Turn]:
    """One conversation: each prompt is all that was said before and something new."""
    rng, turns = random.Random(seed), list[Turn]()
    known = rng.choices(range(vocab_size), k=options.first_len)
    for at in range(options.num_turns):
        before, began = len(recorder.steps), time.perf_counter()
        core.begin_step([Add(bench_request(str(at), known, options.answer_len, float(at)))])
        answer: list[int] = []
        first_s = 0.0
        while len(answer) < options.answer_len:
            for event in core.step(time.perf_counter()).events:
                if isinstance(event, SequenceFailed):
                    raise EngineError(f"a request of the bench failed: {event.message}", reason=event.reason)
                if isinstance(event, TokensSampled):
                    first_s = first_s or time.perf_counter() - began
                    answer += event.token_ids
            core.begin_step(())
        prefilled = sum(step.num_chunk_tokens for step in recorder.steps[before:])
        turns.append(Turn(len(known), prefilled, first_s, tuple(answer)))
        known = [*known, *answer, *rng.choices(range(vocab_size), k=options.turn_len)]
    return turns


def _findings(talks: dict[bool, list[list[Turn]]], seconds: dict[bool, list[float]]) -> Findings:
    rows = []
    for at, turn in enumerate(talks[True][0]):
        rows.append(Row(f"turn {at + 1}: the prompt", turn.num_prompt, "tokens"))
        rows.append(Row(f"turn {at + 1}: of it computed, with the cache", turn.num_prefilled, "tokens"))
        on, off = (statistics.median(talk[at].ttft_s for talk in talks[cached]) for cached in (True, False))
        rows.append(Row(f"turn {at + 1}: first token after, with the cache", 1000 * on, "ms"))
        rows.append(Row(f"turn {at + 1}: first token after, without", 1000 * off, "ms"))
    same = all(
        ours.token_ids == theirs.token_ids
        for with_cache, without in zip(talks[True], talks[False], strict=True)
        for ours, theirs in zip(with_cache, without, strict=True)
    )
    rows.append(Row("answers equal with and without the cache (1: yes)", int(same), "", "1"))
    ratio = statistics.median(on / off for on, off in zip(seconds[True], seconds[False], strict=True))
    rows.append(Row("prompts that share nothing: time with ÷ without", ratio, "", "< 1.01"))
    note = "a turn's prompt is all that was said before and something new; medians of interleaved runs"
    return Findings(title="prefix cache", rows=rows, notes=[note])
