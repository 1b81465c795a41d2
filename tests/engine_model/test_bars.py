"""The bar of an offline batch."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from pdserve import LLM, SamplingParams
from pdserve.core.errors import RequestError
from pdserve.engine.bars import BatchBar


class Request:
    """So much of a request as a bar asks for."""

    ended = False
    num_tokens = 0


@pytest.fixture
def llm() -> LLM:
    return LLM(runner="fake", page_size=4, num_pages=64, max_num_batched_tokens=8, max_num_seqs=8)


def test_counts_prompts_and_tokens() -> None:
    requests = [Request(), Request(), Request()]
    out = io.StringIO()
    bar = BatchBar(requests, Console(file=out, force_terminal=True, width=100))
    requests[1].ended, requests[0].num_tokens, requests[1].num_tokens = True, 3, 9
    bar.show(bar.start_s + 2.0)
    with bar.display:
        pass
    assert re.search(r"1/3.* 12 tokens, 6\.0/s", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()))


def test_counts_no_oftener_than_it_is_looked_at() -> None:
    requests = [Request()]
    bar = BatchBar(requests, Console(file=io.StringIO()))
    requests[0].ended = True
    bar.update(bar.start_s + 0.01)
    assert bar.display.tasks[0].completed == 0
    bar.update(bar.start_s + 0.2)
    assert bar.display.tasks[0].completed == 1


def test_a_batch_with_a_bar_is_the_batch_without_one(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["t1 t2 t3", [5, 6]]
    params = SamplingParams(temperature=0, max_tokens=9, n=2)
    plain = llm.generate(prompts, params)
    assert capsys.readouterr().err == ""
    assert [c.token_ids for c in llm.generate(prompts, params, progress=True)] == [c.token_ids for c in plain]
    assert re.search(r"2/2.* 36 tokens", capsys.readouterr().err)


def test_no_bar_for_what_is_refused(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RequestError):
        llm.generate(["t1", []], progress=True)
    assert capsys.readouterr().err == ""
