"""Proves at load that a model answers over pages as it does by itself, or refuses it.

What a model keeps or reads beside the attention that we replace (a recurrent state, a bias of positions, a cache of its
own, a count of the tokens of a pass) would be lost without an error. Two short sequences, one a chunk and then a
decode, the other a decode and then a chunk, must get the logits that transformers' own attention gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pdserve.core.errors import ConfigError
from pdserve.core.layout import KVLayout
from pdserve.engine.attention import ATTENTION_NAME, LayerFacts, LayerRecorder, PagedContext
from pdserve.engine.forward_batch import build_batch
from pdserve.engine.kv_cache import views_of
from pdserve.engine.step import ScheduledSequence, SchedulerOutput
from pdserve.kernels.dispatch import kernels_for

_NUM_TOKENS = 7
_PAGE_SIZE = 4
_PAGES = ((3, 0), (1, 2))
_CHUNKS = ((6, 1), (1, 6))
_MAX_ERROR = {"float32": 2e-3, "float16": 0.2, "bfloat16": 0.3}
"""By type of the weights: median over the tokens of the error of their logits, by the spread of these."""


def refuse(config: Any, why: str) -> ConfigError:
    """The error that says why a model of this kind is not served."""
    return ConfigError(f"models of type {config.model_type!r} cannot be served: {why}", reason="UNSUPPORTED_MODEL")


def record_layers(model: Any, config: Any) -> dict[int, LayerFacts]:
    """What each layer says of itself, by a short pass.

    Args:
        model: With our attention.
        config: Of its text part.

    Raises:
        ConfigError: Not every layer calls our attention exactly once.
    """
    recorder = LayerRecorder()
    _guarded(config, lambda: _forward(model, _tokens(config, model.device)[:1], recorder))
    if sorted(recorder.calls) != list(range(config.num_hidden_layers)):
        called = f"{len(recorder.layers)} of {config.num_hidden_layers} layers called our attention"
        raise refuse(config, f"{called}, {len(recorder.calls)} times in all")
    return recorder.layers


def fact(config: Any, name: str) -> Any:
    """A value of the configuration; a list where it differs from layer to layer; None where there is none."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # so transformers answers for a value that each layer has of its own
        return [getattr(layer, name, None) for layer in config.per_layer_config]


def check_windows(config: Any, layers: dict[int, LayerFacts]) -> None:
    """Compares what the layers said with what the configuration says of them; short passes would not show it.

    Raises:
        ConfigError: They differ.
    """
    types = fact(config, "layer_types")
    window, softcap = (_by_layer(fact(config, n), len(layers)) for n in ("sliding_window", "attn_logit_softcapping"))
    for layer, facts in layers.items():
        if types and types[layer] != "sliding_attention":
            window[layer] = None
        if types and facts.window != window[layer]:
            raise refuse(config, f"layer {layer} asks for a window of {facts.window}, not {window[layer]}")
        if facts.softcap != softcap[layer]:
            raise refuse(config, f"layer {layer} asks for a softcap of {facts.softcap}, not {softcap[layer]}")
    has_window = any(window) and fact(config, "use_sliding_window") is not False
    if has_window and not any(facts.window for facts in layers.values()):
        raise refuse(config, f"no layer asks for the sliding window of {max(w or 0 for w in window)}")


def _by_layer(value: Any, num_layers: int) -> list[Any]:
    return list(value) if isinstance(value, list) else [value] * num_layers


def check_answers(model: Any, config: Any, layout_of: Callable[[int], KVLayout]) -> None:
    """Compares logits over pages with those of transformers' own attention.

    Args:
        model: With our attention, in eval mode; left so.
        config: Of its text part.
        layout_of: Layout of the model's KV by page size.

    Raises:
        ConfigError: They differ.
    """
    tokens = _tokens(config, model.device)
    paged = _guarded(config, lambda: _paged_logits(model, tokens, layout_of(_PAGE_SIZE)))
    model.set_attn_implementation("eager")
    try:
        plain = _guarded(config, lambda: _forward(model, tokens, None))
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    spread = plain.std(dim=-1).clamp(min=1e-12)
    error = float(((paged - plain).pow(2).mean(dim=-1).sqrt() / spread).median())
    if not error <= _MAX_ERROR[layout_of(_PAGE_SIZE).dtype]:
        raise refuse(
            config, f"over KV pages it answers other than by itself (error {error:.1g} of the spread of its logits)"
        )


def check_finite(model: Any, config: Any, layout_of: Callable[[int], KVLayout]) -> None:
    """Refuses weights of which no answer can come: every request would fail, one after the other.

    Args:
        model: A `LeanModel`.
        config: Has its `vocab_size`.
        layout_of: Layout of the model's KV by page size.

    Raises:
        ConfigError: Its logits are not finite.
    """
    if not _paged_logits(model, _tokens(config, model.device), layout_of(_PAGE_SIZE)).isfinite().all():
        raise ConfigError("the model's logits are not finite: its weights are damaged", reason="CORRUPT_MODEL")


def _tokens(config: Any, device: torch.device) -> Tensor:
    """`[2, _NUM_TOKENS]`, all different and far apart where the vocabulary allows."""
    ids = torch.arange(2 * _NUM_TOKENS, dtype=torch.int64) * 7919 + 11
    return (ids % int(config.vocab_size)).reshape(2, _NUM_TOKENS).to(device)


def _forward(model: Any, tokens: Tensor, context: object, positions: Tensor | None = None, **options: object) -> Tensor:
    if positions is None:
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    if context is not None:
        options["pdserve"] = context
    with torch.inference_mode():
        logits = model(input_ids=tokens, position_ids=positions, use_cache=False, **options).logits
        return torch.as_tensor(logits, dtype=torch.float32)


def _paged_logits(model: Any, tokens: Tensor, layout: KVLayout) -> Tensor:
    """`[2, _NUM_TOKENS, vocab_size]`, computed in two mixed steps over pages that hold NaN where nothing is stored."""
    num_pages = sum(len(pages) for pages in _PAGES)
    flat = torch.full((num_pages * layout.page_elements,), float("nan"), dtype=getattr(torch, layout.dtype))
    pages = views_of(layout, flat.to(tokens.device))
    kernels = kernels_for(tokens.device)
    known = tokens.tolist()
    done, rows = [0, 0], [[], []]  # type: tuple[list[int], list[list[Tensor]]]
    for sizes in zip(*_CHUNKS, strict=True):
        step = SchedulerOutput(0, tuple(_row(i, known[i], done[i], n) for i, n in enumerate(sizes)), sum(sizes))
        batch = build_batch(step, _PAGE_SIZE).to(tokens.device)
        context = PagedContext(batch, pages, kernels)
        every = torch.arange(step.num_tokens, device=tokens.device)
        logits = _forward(model, batch.token_ids[None], context, batch.positions[None], logits_to_keep=every)[0]
        if logits.shape[0] != step.num_tokens:
            raise ValueError("it does not select the logits that are asked for")
        for i, part in enumerate(torch.split(logits, list(sizes))):
            rows[i].append(part)
            done[i] += sizes[i]
    return torch.stack([torch.cat(parts) for parts in rows])


def _row(at: int, known: Sequence[int], start: int, num: int) -> ScheduledSequence:
    return ScheduledSequence(str(at), start, known[start : start + num], _PAGES[at], None, 0, known, len(known))


def _guarded(config: Any, call: Callable[[], Tensor]) -> Tensor:
    """Runs a pass; whatever transformers' modules raise says that they cannot be called like this."""
    try:
        return call()
    except (TypeError, ValueError, AttributeError, LookupError, RuntimeError, AssertionError) as e:
        what = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise refuse(config, f"a short pass fails: {what}") from e
