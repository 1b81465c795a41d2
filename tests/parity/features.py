"""Sampling parameters against transformers' `generate`: the cases, and what transformers gives for them.

Kept in `features.json`, as `reference.py` keeps its own; `python -m tests.parity.features` writes it anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.core.tokenizer import Tokenizer
from pdserve.engine.model_store import BUILT_IN_MODEL, resolve_model, weights_digest

NUM_TOKENS = 24
_FILE = Path(__file__).with_name("features.json")
_STORY = "Once upon a time there was a little girl who lived in a little house near a little wood. Every day she"
_FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
_ALLOWED = (*range(200, 900), *range(1000, 1400))
_BAD_WORDS = ("little", "house", " the", "Paris", "city of lights", "in the heart")
_BIAS = {260: -4.5, 28: 2.5, 30: -100.0, 281: 3.25}


@dataclass(frozen=True)
class Case:
    """One request.

    Attributes:
        name: For messages.
        prompt: Text or chat, as a client sends it.
        sampling: Keywords of `SamplingParams` beside `temperature`, `max_tokens` and `logprobs`.
    """

    name: str
    prompt: str | list[dict[str, str]]
    sampling: dict[str, Any]

    @property
    def digest(self) -> str:
        """Changes with the case."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Expected:
    """What transformers gives.

    Attributes:
        token_ids: Greedy output.
        logprobs: Of each, before the processors.
        gaps: Best minus second best logit after the processors, at each.
        prompt_logprobs: Of each prompt token but the first.
    """

    token_ids: list[int]
    logprobs: list[float]
    gaps: list[float]
    prompt_logprobs: list[float]


_FEATURES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "repetition rewarded": {"repetition_penalty": 0.9},
    "presence": {"presence_penalty": 1.8},
    "frequency": {"frequency_penalty": 0.9},
    "frequency rewarded": {"frequency_penalty": -0.6, "presence_penalty": -0.5},
    "min_tokens": {"min_tokens": 20},
    "logit_bias": {"logit_bias": _BIAS},
    "allowed": {"allowed_token_ids": _ALLOWED},
    "bad_words": {"bad_words": _BAD_WORDS},
    "all": {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "min_tokens": 20,
        "logit_bias": {260: -2.0, 28: 1.0, 281: 3.0},
        "allowed_token_ids": (2, *range(10, 20_000)),
        "bad_words": _BAD_WORDS,
    },
}
CASES = [
    Case(f"{name}, {kind}", prompt, sampling)
    for name, sampling in _FEATURES.items()
    for kind, prompt in (("text", _STORY), ("chat", _FRANCE))
]


def expected() -> list[Expected]:
    """What transformers gives for `CASES`, as kept in the file."""
    stored = json.loads(_FILE.read_text())
    assert stored["weights"] == weights_digest(resolve_model(BUILT_IN_MODEL)), "the model changed; write the file anew"
    assert [o["case"] for o in stored["outputs"]] == [c.digest for c in CASES], "the cases changed; write the file anew"
    return [Expected(**{k: v for k, v in o.items() if k != "case"}) for o in stored["outputs"]]


def generate(cases: Sequence[Case]) -> list[Expected]:
    """Computes what transformers gives."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    directory = resolve_model(BUILT_IN_MODEL)
    tokenizer = Tokenizer.from_dir(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    results = []
    for case in cases:
        known = tokenizer.encode(case.prompt) if isinstance(case.prompt, str) else tokenizer.encode_chat(case.prompt)
        ids = torch.tensor([known])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            output_logits=True,
            output_scores=True,
            return_dict_in_generate=True,
            **_keywords(case.sampling, len(known), tokenizer),
        )
        tokens = out.sequences[0, len(known) :].tolist()
        best = [scores[0].topk(2).values.tolist() for scores in out.scores]
        with torch.inference_mode():
            before = torch.log_softmax(model(ids).logits[0, :-1], -1)
        results.append(
            Expected(
                tokens,
                [round(float(torch.log_softmax(x[0], -1)[t]), 6) for x, t in zip(out.logits, tokens, strict=True)],
                [round(first - second, 6) for first, second in best],
                [round(float(before[i, t]), 6) for i, t in enumerate(known[1:])],
            )
        )
    return results


def _keywords(sampling: dict[str, Any], num_prompt: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """The same for `generate`; what it lacks is a processor written by the definition."""
    from transformers import LogitsProcessorList

    presence, frequency = sampling.get("presence_penalty", 0.0), sampling.get("frequency_penalty", 0.0)

    def penalties(input_ids: Any, scores: Any) -> Any:
        output = input_ids[0, num_prompt:].tolist()
        scores = scores.clone()
        for token in set(output):
            scores[0, token] -= presence + frequency * output.count(token)
        return scores

    keywords: dict[str, Any] = {"logits_processor": LogitsProcessorList([penalties])}
    for name, value in sampling.items():
        if name == "repetition_penalty":
            keywords[name] = value
        elif name == "min_tokens":
            keywords["min_new_tokens"] = value
        elif name == "logit_bias":
            keywords["sequence_bias"] = {(token,): bias for token, bias in value.items()}
        elif name == "allowed_token_ids":
            keywords["prefix_allowed_tokens_fn"] = lambda *_, ids=list(value): ids
        elif name == "bad_words":
            spelt = [tokenizer.encode_part(begin + word.lstrip()) for word in value for begin in ("", " ")]
            keywords["bad_words_ids"] = spelt
    return keywords


def _write() -> None:
    weights = weights_digest(resolve_model(BUILT_IN_MODEL))
    outputs = [json.dumps({"case": c.digest, **vars(e)}) for c, e in zip(CASES, generate(CASES), strict=True)]
    _FILE.write_text(f'{{"weights": "{weights}", "outputs": [\n' + ",\n".join(outputs) + "\n]}\n")


if __name__ == "__main__":
    _write()
