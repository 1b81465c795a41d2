"""Serve large language models with prefill and decode on separate workers.

The public names load on first use, so that `from pdserve import Client` needs nothing but grpcio and protobuf.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.client import AsyncClient, Client
    from pdserve.core.sampling import SamplingParams
    from pdserve.core.structured import StructuredOutputs
    from pdserve.engine.llm import LLM

__all__ = ["LLM", "AsyncClient", "Client", "SamplingParams", "StructuredOutputs"]

_HOMES = {
    "AsyncClient": "pdserve.client",
    "Client": "pdserve.client",
    "LLM": "pdserve.engine.llm",
    "SamplingParams": "pdserve.core.sampling",
    "StructuredOutputs": "pdserve.core.structured",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'pdserve' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as e:
        if e.name is None or e.name.split(".")[0] == "pdserve":
            raise
        raise ModuleNotFoundError(f"pdserve.{name} needs {e.name}: pip install '.[server]'", name=e.name) from e


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
