"""Types of sampling parameters: what a caller of Python may have got wrong before any range can be looked at.

A wrong type that came through would fail in the middle of a step that many sequences share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral, Real

from pdserve.core.errors import RequestError

_BOOLS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "echo")
_INTS = ("n", "top_k", "max_tokens", "min_tokens", "seed", "logprobs", "prompt_logprobs")
_OPTIONAL = ("max_tokens", "seed", "logprobs", "prompt_logprobs", "logit_bias")
_FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_STRINGS = ("stop", "bad_words")
_TOKENS = ("stop_token_ids", "allowed_token_ids")


def is_text(value: object) -> bool:
    """Says whether a value is a string that UTF-8 can encode."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def typed(name: str, value: object) -> object:
    """A field's value in the type that the engine computes with, e.g. int of numpy's int64.

    Raises:
        RequestError: BAD_PARAMETER, with the field's name.
    """
    reading = _READINGS.get(name)
    if reading is None or (value is None and name in _OPTIONAL):
        return value
    read, expected = reading
    try:
        return read(value)
    except (TypeError, ValueError, OverflowError):
        raise RequestError(
            f"sampling parameter '{name}' is {value!r:.80}; it must be {expected}", reason="BAD_PARAMETER"
        ) from None


def _bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _int(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError
    return int(value)


def _float(value: object) -> float:
    if isinstance(value, int) and not isinstance(value, bool) and -(2**53) < value < 2**53:
        return value  # as exact as a float
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError
    return float(value)


def _text(value: object) -> str:
    if not isinstance(value, str) or not is_text(value):
        raise TypeError
    return value


def _strings(value: object) -> tuple[str, ...]:
    return (_text(value),) if isinstance(value, str) else tuple(map(_text, _items(value)))


def _tokens(value: object) -> tuple[int, ...]:
    return tuple(map(_int, _items(value)))


def _bias(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise TypeError
    return {_int(token): _float(bias) for token, bias in value.items()}


def _items(value: object) -> tuple[object, ...]:
    if isinstance(value, str | bytes | Mapping):
        raise TypeError
    return tuple(value)  # type: ignore[arg-type]  # not iterable: TypeError


_READINGS: dict[str, tuple[Callable[[object], object], str]] = {
    **dict.fromkeys(_BOOLS, (_bool, "True or False")),
    **dict.fromkeys(_INTS, (_int, "an integer")),
    **dict.fromkeys(_FLOATS, (_float, "a number")),
    **dict.fromkeys(_STRINGS, (_strings, "a sequence of strings that UTF-8 can encode")),
    **dict.fromkeys(_TOKENS, (_tokens, "a sequence of token ids")),
    "logit_bias": (_bias, "numbers by token id"),
}
