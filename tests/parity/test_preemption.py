"""Sequences that are swapped out in the middle, on the real model: greedy against transformers' `generate`."""

from __future__ import annotations

import pytest

from pdserve import LLM, SamplingParams
from pdserve.engine.model_store import BUILT_IN_MODEL
from tests.parity.reference import assert_parity, references


@pytest.mark.timeout(300)
def test_swapped_sequences_go_on_as_if_nothing_had_been() -> None:
    llm = LLM(
        model=BUILT_IN_MODEL,
        dtype="float32",
        page_size=1,
        num_pages=20,
        max_num_batched_tokens=64,
        preemption_mode="swap",
        swap_space_bytes=64 << 20,
    )
    expected = [r for r in references() if len(r.prompt.token_ids) <= 10 and len(r.token_ids) == 8][:4]
    prompts = [r.prompt.prompt for r in expected]
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    seeded = [SamplingParams(temperature=0.9, top_k=100, seed=i, max_tokens=8) for i in range(2)]
    sampling = [seeded[0], greedy, seeded[1], greedy]  # the youngest are those that give way
    outputs = llm.generate(prompts, sampling)
    load = llm._built.core.load()
    assert load.preemptions.num_swaps >= 2 and load.preemptions.num_recomputes == 0
    assert load.num_free_pages == 20
    assert_parity([expected[1], expected[3]], [outputs[1].token_ids, outputs[3].token_ids])
    assert llm.generate(prompts[2], seeded[1])[0].token_ids == outputs[2].token_ids
