"""What transformers' `generate` gives for the parity prompts.

It takes a minute to compute, so it is kept in `reference.json`; `python -m tests.parity.reference` writes that anew.
The tests of this folder run on some of its prompts and compute some of it again; with `-m slow` all of it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pdserve.core.hashing import token_digest
from pdserve.engine.model_store import BUILT_IN_MODEL, resolve_model, weights_digest
from tests.parity.prompts import ParityPrompt, parity_prompts

NEAR_TIE_GAP = 1e-3
"""A difference is accepted only where the reference's best two logits lie nearer than this."""
MAX_NEAR_TIES = 0.02
"""Share of prompts that may differ at a near tie."""
REPRESENTATIVE = (0, 12, 18, 26, 29, 32, 34, 37, 40, 42, 43, 44, 48)
"""Indices of the prompts that `make test` runs: one of each entrance and kind, and the lengths at a page's border."""
_FILE = Path(__file__).with_name("reference.json")


@dataclass(frozen=True)
class Reference:
    """Greedy output of one prompt.

    Attributes:
        prompt: The prompt.
        token_ids: Output, with the end-of-sequence token if one came.
        gaps: Per output token, best logit minus second best.
    """

    prompt: ParityPrompt
    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]


def references() -> list[Reference]:
    """References of all parity prompts for the built-in model in fp32, as kept in the file."""
    model_dir = resolve_model(BUILT_IN_MODEL)
    prompts, stored = parity_prompts(model_dir), json.loads(_FILE.read_text())
    asked = [token_digest(p.token_ids).hex() for p in prompts]
    assert stored["weights"] == weights_digest(model_dir), "the model changed; see tests/parity/reference.py"
    assert [s["prompt"] for s in stored["outputs"]] == asked, "the prompts changed; see tests/parity/reference.py"
    return [
        Reference(p, tuple(s["token_ids"]), tuple(s["gaps"])) for p, s in zip(prompts, stored["outputs"], strict=True)
    ]


def some_references() -> list[Reference]:
    """Those of `REPRESENTATIVE`."""
    everything = references()
    return [everything[i] for i in REPRESENTATIVE]


def generate(prompts: Sequence[ParityPrompt]) -> list[Reference]:
    """Computes references with transformers."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(resolve_model(BUILT_IN_MODEL), dtype=torch.float32)
    results = []
    for prompt in prompts:
        ids = torch.tensor([prompt.token_ids])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=prompt.max_tokens,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = [logits[0].topk(2).values.tolist() for logits in out.logits]
        tokens = tuple(out.sequences[0, ids.shape[1] :].tolist())
        results.append(Reference(prompt, tokens, tuple(round(first - second, 6) for first, second in best)))
    return results


def assert_parity(expected: Sequence[Reference], outputs: Sequence[Sequence[int]]) -> None:
    """Compares outputs with the references, token for token; prints the near ties that it accepted.

    Raises:
        AssertionError: A difference that is no near tie, or too many near ties.
    """
    near_ties = []
    for reference, output in zip(expected, outputs, strict=True):
        if tuple(output) == reference.token_ids:
            continue
        pairs = zip(output, reference.token_ids, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(output), len(reference.token_ids)))
        gap = reference.gaps[at] if at < len(reference.gaps) else float("inf")
        where = f"{reference.prompt.name}, output {at}, gap {gap:.2e}"
        assert gap < NEAR_TIE_GAP, f"{where}: {list(output)} instead of {list(reference.token_ids)}"
        near_ties.append(where)
    print(f"{len(expected)} prompts, {len(near_ties)} near ties", *near_ties, sep="\n  ")  # noqa: T201
    assert len(near_ties) <= MAX_NEAR_TIES * len(expected)


def _write() -> None:
    model_dir = resolve_model(BUILT_IN_MODEL)
    outputs = [
        {"prompt": token_digest(r.prompt.token_ids).hex(), "token_ids": r.token_ids, "gaps": r.gaps}
        for r in generate(parity_prompts(model_dir))
    ]
    lines = ",\n".join(json.dumps(o) for o in outputs)
    _FILE.write_text(f'{{"weights": "{weights_digest(model_dir)}", "outputs": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    _write()
