"""SamplingParams between the wire and `core.sampling`. An unset field takes the default of `SamplingParams`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from pdserve.core.errors import UnimplementedError
from pdserve.core.sampling import SamplingParams, check_size
from pdserve.core.structured import StructuredOutputs, check_num_choices
from pdserve.v1 import common_pb2

_LISTS = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words")
_MESSAGES = ("logit_bias", "structured_outputs")


def sampling_from_proto(message: common_pb2.SamplingParams) -> SamplingParams:
    """Reads and validates sampling parameters.

    Raises:
        RequestError: A value is out of range; the message names the field.
        UnimplementedError: Something that is not supported yet; the message names the field.
    """
    values: dict[str, object] = {}
    for name in (*_LISTS, "logit_bias"):
        check_size(name, len(getattr(message, name)))
    for f in fields(SamplingParams):
        if f.name in _LISTS:
            values[f.name] = tuple(getattr(message, f.name))
        elif f.name not in _MESSAGES and message.HasField(f.name):
            value = getattr(message, f.name)
            values[f.name] = _shortest(value) if isinstance(value, float) else value
    if message.logit_bias:
        values["logit_bias"] = {token: _shortest(bias) for token, bias in message.logit_bias.items()}
    if message.HasField("structured_outputs"):
        values["structured_outputs"] = _structured_from_proto(message.structured_outputs)
    return SamplingParams(**values)  # type: ignore[arg-type]


def sampling_to_proto(params: SamplingParams) -> common_pb2.SamplingParams:
    """Writes validated parameters; fields at their default stay unset."""
    message = common_pb2.SamplingParams()
    for f in fields(params):
        value = getattr(params, f.name)
        if value is None or value == f.default:
            continue
        if f.name in _LISTS:
            getattr(message, f.name).extend(value)
        elif f.name == "logit_bias":
            message.logit_bias.update(value)
        elif isinstance(value, StructuredOutputs):
            form = common_pb2.StructuredOutputs(choice=value.choice)
            if value.field != "choice":
                setattr(form, value.field, getattr(value, value.field))
            message.structured_outputs.CopyFrom(form)
        else:
            setattr(message, f.name, value)
    return message


def _structured_from_proto(message: common_pb2.StructuredOutputs) -> StructuredOutputs:
    given = message.WhichOneof("constraint")
    if given == "structural_tag":
        raise UnimplementedError(
            "sampling parameter 'structured_outputs.structural_tag' is not supported yet; leave it out",
            reason="UNSUPPORTED_PARAMETER",
        )
    form: dict[str, Any] = {} if given is None else {given: getattr(message, given)}
    check_num_choices(len(message.choice))
    return StructuredOutputs(choice=tuple(message.choice), **form)


def _shortest(value: float) -> float:
    """The number that was meant by a float32: 0.7, not 0.699999988."""
    return float(f"{value:.7g}")
