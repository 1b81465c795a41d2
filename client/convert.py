"""Python values to `pdserve.v1` messages and back. Types are checked here; ranges are the server's business."""

from __future__ import annotations

import difflib
import json
import numbers
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from pdserve.client.errors import InvalidRequest
from pdserve.client.types import (
    Delta,
    FinishReason,
    ModelInfo,
    PositionLogprobs,
    RequestOptions,
    RequestRecord,
    Timings,
    TokenLogprob,
    Usage,
    WorkerInfo,
)
from pdserve.v1 import common_pb2, inference_pb2

_INTS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
_FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_BOOLS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "echo")
_INT_LISTS = ("stop_token_ids", "allowed_token_ids")
_STR_LISTS = ("stop", "bad_words")
_FORMS = tuple(common_pb2.StructuredOutputs.DESCRIPTOR.fields_by_name)
_COUNTS = ("transfer_bytes", "transfer_last_pages", "transfer_last_bytes")
_REQUEST_STRINGS = ("model", "tenant", "cache_salt")
_FINISH: dict[int, FinishReason] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_CANCELLED: "cancelled",
}


def generate_request(
    *,
    prompt: str | None = None,
    prompt_token_ids: Sequence[int] | None = None,
    messages: Sequence[Mapping[str, str]] | None = None,
    options: RequestOptions,
) -> inference_pb2.GenerateRequest:
    """Builds the message of one request; without `request_id` in `options` it gets a fresh unguessable one.

    Raises:
        TypeError: A keyword is unknown, a value has the wrong type, or there is not exactly one prompt.
        InvalidRequest: A value cannot be sent at all (e.g. a negative token id).
    """
    check_names(options)
    given = {name: value for name, value in options.items() if value is not None}
    request = inference_pb2.GenerateRequest(request_id=_string("request_id", given.get("request_id", new_request_id())))
    _set_prompt(request, prompt, prompt_token_ids, messages)
    for name in _REQUEST_STRINGS:
        if name in given:
            _encode(request, name, _string(name, given[name]))
    if "priority" in given:
        _encode(request, "priority", _integer("priority", given["priority"]))
    _set_sampling(request.sampling, given)
    return request


def check_names(options: Mapping[str, object]) -> None:
    """Refuses unknown keywords.

    Raises:
        TypeError: With the keyword and close matches.
    """
    known = RequestOptions.__annotations__
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise TypeError(f"unknown keyword '{name}'{hint}")


def timeout_of(options: RequestOptions) -> float | None:
    """The deadline in `options`, seconds.

    Raises:
        TypeError: It is not a number.
    """
    value = options.get("timeout_s")
    return None if value is None else _number("timeout_s", value)


def new_request_id() -> str:
    """An unguessable request id."""
    return uuid.uuid4().hex


def to_delta(message: common_pb2.Delta) -> Delta:
    """A delta from its message."""
    logprobs = tuple(map(_position, message.logprobs))
    return Delta(message.index, tuple(message.token_ids), message.text, logprobs, message.choice)


def to_prompt_logprobs(message: common_pb2.PromptLogprobs) -> tuple[PositionLogprobs, ...]:
    """Log-probabilities of prompt tokens from their message."""
    return tuple(map(_position, message.logprobs))


def to_finish_reason(value: int) -> FinishReason | None:
    """A finish reason from its number; None when it is not one."""
    return _FINISH.get(value)


def to_usage(message: common_pb2.Usage) -> Usage:
    """Token counts from their message."""
    return Usage(message.prompt_tokens, message.completion_tokens, message.cached_tokens)


def to_timings(message: common_pb2.Timings) -> Timings:
    """Durations from their message; an unset one becomes None."""
    values: dict[str, Any] = {f.name: getattr(message, f.name) or None for f in fields(Timings)}
    return Timings(**values | {name: getattr(message, name) for name in _COUNTS})


def to_record(message: inference_pb2.GetRequestResponse) -> RequestRecord:
    """A request's record from its message."""
    failed = message.HasField("error")
    return RequestRecord(
        request_id=message.request_id,
        state=_enum_word(inference_pb2.RequestState.Name(message.state), "REQUEST_STATE_"),
        attempt=message.attempt,
        model=message.model,
        prefill_worker_id=message.prefill_worker_id or None,
        decode_worker_id=message.decode_worker_id or None,
        emitted_tokens=message.emitted_tokens,
        finish_reason=to_finish_reason(message.finish_reason),
        error=f"{message.error.reason}: {message.error.message}" if failed else None,
    )


def to_models(message: inference_pb2.ListModelsResponse) -> tuple[ModelInfo, ...]:
    """Models and their workers from the message."""
    return tuple(
        ModelInfo(
            name=m.name,
            max_model_len=m.max_model_len,
            vocab_size=m.vocab_size,
            ready=m.ready,
            workers=tuple(_worker(w) for w in m.workers),
        )
        for m in message.models
    )


def _worker(w: inference_pb2.WorkerInfo) -> WorkerInfo:
    return WorkerInfo(
        worker_id=w.worker_id,
        role=_enum_word(common_pb2.Role.Name(w.role), "ROLE_"),
        incarnation=w.incarnation,
        address=w.address,
        state=w.state,
        num_running=w.num_running,
        num_waiting=w.num_waiting,
        num_free_pages=w.num_free_pages,
        num_pages=w.num_pages,
    )


def _enum_word(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).lower()


def _position(message: common_pb2.PositionLogprobs) -> PositionLogprobs:
    return PositionLogprobs(_logprob(message.chosen), tuple(map(_logprob, message.top)))


def _logprob(message: common_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(message.token_id, message.logprob, message.rank)


def _set_prompt(
    request: inference_pb2.GenerateRequest,
    prompt: str | None,
    token_ids: Sequence[int] | None,
    messages: Sequence[Mapping[str, str]] | None,
) -> None:
    if sum(p is not None for p in (prompt, token_ids, messages)) != 1:
        raise TypeError("give exactly one of prompt (text), prompt_token_ids, or chat messages")
    if prompt is not None:
        if not isinstance(prompt, str):
            raise TypeError(f"prompt must be str, not {type(prompt).__name__}; token ids go in prompt_token_ids=")
        _encode(request, "text", prompt, label="prompt")
    elif token_ids is not None:
        request.tokens.SetInParent()
        _extend(request.tokens.token_ids, "prompt_token_ids", _list("prompt_token_ids", token_ids, _integer))
    else:
        request.chat.SetInParent()
        for i, message in enumerate(_list("messages", messages, lambda _, m: m)):
            where = f"messages[{i}]"
            if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
                raise TypeError(f"{where} must be a mapping with exactly the keys 'role' and 'content'")
            added = request.chat.messages.add()
            _encode(added, "role", _string(f"{where}['role']", message["role"]), label=f"{where}['role']")
            _encode(added, "content", _string(f"{where}['content']", message["content"]), label=f"{where}['content']")


def _set_sampling(sampling: common_pb2.SamplingParams, given: Mapping[str, object]) -> None:
    checks: tuple[tuple[tuple[str, ...], Callable[[str, object], object]], ...] = (
        (_INTS, _integer),
        (_FLOATS, _number),
        (_BOOLS, _boolean),
    )
    for names, check in checks:
        for name in names:
            if name in given:
                _encode(sampling, name, check(name, given[name]))
    for name in _STR_LISTS:
        if name in given:
            value = [given[name]] if isinstance(given[name], str) else given[name]
            _extend(getattr(sampling, name), name, _list(name, value, _string))
    for name in _INT_LISTS:
        if name in given:
            _extend(getattr(sampling, name), name, _list(name, given[name], _integer))
    if "logit_bias" in given:
        for token, bias in _mapping("logit_bias", given["logit_bias"]).items():
            try:
                sampling.logit_bias[_integer("logit_bias", token)] = _number("logit_bias", bias)
            except ValueError as e:
                raise _unsendable("logit_bias", token, e) from e
    if "structured_outputs" in given:
        value = given["structured_outputs"]
        if is_dataclass(value):  # pdserve.StructuredOutputs, which the light client does not import
            value = {f.name: v for f in fields(value) if (v := getattr(value, f.name)) not in (None, (), False)}
        form = dict(_mapping("structured_outputs", value))
        if unknown := form.keys() - set(_FORMS):
            raise TypeError(f"structured_outputs has no {min(map(str, unknown))!r}; give one of {', '.join(_FORMS)}")
        try:
            if isinstance(form.get("json"), Mapping):
                form["json"] = json.dumps(form["json"], ensure_ascii=False)
            sampling.structured_outputs.CopyFrom(common_pb2.StructuredOutputs(**form))
        except (TypeError, ValueError) as e:
            raise TypeError(f"structured_outputs is {form!r:.200}: {e}") from e


def _encode(message: Any, name: str, value: object, label: str | None = None) -> None:
    try:
        setattr(message, name, value)
    except (ValueError, UnicodeError) as e:
        raise _unsendable(label or name, value, e) from e


def _extend(target: Any, name: str, values: list[Any]) -> None:
    try:
        target.extend(values)
    except (ValueError, UnicodeError) as e:
        raise _unsendable(name, values, e) from e


def _unsendable(name: str, value: object, error: Exception) -> InvalidRequest:
    shown = ascii(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    what = "it is not valid Unicode" if isinstance(error, UnicodeError) else "it is out of range"
    return InvalidRequest(f"'{name}' is {shown}: {what} and cannot be sent ({error})", reason="BAD_PARAMETER")


def _list(name: str, value: object, check: Callable[[str, Any], Any]) -> list[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__"):
        raise TypeError(f"{name} must be a sequence, not {type(value).__name__}")
    return [check(name, item) for item in value]


def _mapping(name: str, value: object) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a mapping, not {type(value).__name__}")
    return value


def _integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be int, not {type(value).__name__}")
    return int(value)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    return float(value)


def _boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be bool, not {type(value).__name__}")
    return value


def _string(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be str, not {type(value).__name__}")
    return value
