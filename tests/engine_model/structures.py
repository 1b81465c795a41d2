"""Structured outputs without a model: real tokens of the built-in model, random logits."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from hypothesis import strategies as st

from pdserve.core.errors import PdserveError
from pdserve.core.sampling import SamplingParams
from pdserve.core.structured import StructuredOutputs
from pdserve.engine.model_store import BUILT_IN_MODEL, resolve_model
from pdserve.engine.preparation import finish
from pdserve.engine.progress import SilentProgress
from pdserve.engine.sampler import sample
from pdserve.engine.step import SampledToken, SamplingFailure, ScheduledSequence
from pdserve.engine.structured import StructuredProcessor
from tests.engine_model.models import make_model

VOCAB_SIZE = 49152
EOS = 2
PROMPT = [5, 6, 7]


def model_dir() -> Path:
    """The built-in model's directory."""
    return resolve_model(BUILT_IN_MODEL, SilentProgress())


def tiny_model(directory: Path) -> Path:
    """Saves a small random model that has the built-in model's vocabulary."""
    make_model("LlamaConfig", {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS}).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_dir() / name, directory)
    return directory


def row(structured: StructuredOutputs, output: Sequence[int], key: str = "r", **params: object) -> ScheduledSequence:
    """A sequence about to get the token after `output`."""
    sampling = SamplingParams(structured_outputs=structured, seed=1, **{"temperature": 0.0, **params})  # type: ignore[arg-type]
    known = [*PROMPT, *output]
    return ScheduledSequence(key, 0, known[-1:], [0], sampling, len(output), known, len(PROMPT))


def prepare(processor: StructuredProcessor, structured: StructuredOutputs | None) -> None:
    """Compiles a form's grammar, as every engine does before it takes the request; what is wrong the sampler tells."""
    preparation = processor._grammars.prepare(SamplingParams(structured_outputs=structured))
    assert preparation is not None
    with contextlib.suppress(PdserveError):
        finish(preparation, 20.0)


def mask(processor: StructuredProcessor, item: ScheduledSequence, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    """`[vocab_size]`: which tokens may follow."""
    assert item.sampling is not None
    prepare(processor, item.sampling.structured_outputs)
    logits = torch.zeros(vocab_size)
    failure = processor.edit(logits, item)
    assert failure is None, failure
    return torch.isfinite(logits)


def allowed(processor: StructuredProcessor, item: ScheduledSequence, vocab_size: int = VOCAB_SIZE) -> set[int]:
    """Tokens that may follow."""
    return set(torch.nonzero(mask(processor, item, vocab_size)).flatten().tolist())


def walk(
    processor: StructuredProcessor, structured: StructuredOutputs, seed: int, max_tokens: int, key: str = "r"
) -> Iterator[int | SamplingFailure]:
    """Tokens that random logits choose, until the end-of-sequence token, which is yielded too."""
    generator = torch.Generator().manual_seed(seed)
    output: list[int] = []
    prepare(processor, structured)
    while len(output) < max_tokens and output[-1:] != [EOS]:
        logits = torch.randn(1, VOCAB_SIZE, generator=generator)
        [token] = sample(logits, [row(structured, output, key)], [processor])
        yield token.token_id if isinstance(token, SampledToken) else token
        if isinstance(token, SamplingFailure):
            return
        output.append(token.token_id)


_names = st.text('abc_é "\\', min_size=1, max_size=4)
_scalars: st.SearchStrategy[dict[str, object]] = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    st.tuples(st.integers(-300, 300), st.integers(0, 500)).map(
        lambda t: {"type": "integer", "minimum": t[0], "maximum": t[0] + t[1]}
    ),
    st.just({"type": "number", "minimum": -1, "maximum": 1}),
    st.sampled_from([2, 7, 60]).map(lambda n: {"type": "integer", "minimum": 0, "maximum": 9999, "multipleOf": n}),
    st.integers(0, 6).map(lambda n: {"type": "string", "maxLength": n}),
    st.sampled_from(["^[a-c]{1,3}$", "^(x|yy)z?$", r"^\d{2}:\d{2}$"]).map(lambda p: {"type": "string", "pattern": p}),
    st.sampled_from(["date", "ipv4", "uuid"]).map(lambda f: {"type": "string", "format": f}),
    st.lists(st.one_of(st.integers(-5, 5), _names, st.none()), min_size=1, max_size=4).map(lambda v: {"enum": v}),
)


def _nested(inner: st.SearchStrategy[dict[str, object]]) -> st.SearchStrategy[dict[str, object]]:
    lists = st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
        lambda t: {"type": "array", "items": t[0], "minItems": t[1], "maxItems": t[1] + t[2]}
    )
    objects = st.tuples(st.dictionaries(_names, inner, max_size=3), st.randoms(use_true_random=False)).map(
        lambda t: {
            "type": "object",
            "properties": t[0],
            "required": [n for n in t[0] if t[1].random() < 0.6],
            "additionalProperties": False,
        }
    )
    return st.one_of(lists, objects, st.lists(inner, min_size=1, max_size=3).map(lambda s: {"anyOf": s}))


schemas: st.SearchStrategy[dict[str, object]] = st.recursive(_scalars, _nested, max_leaves=6)
"""JSON schemas whose instances are short."""
