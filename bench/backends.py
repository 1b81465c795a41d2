"""What `pdserve bench serve` can measure: our gRPC, and any OpenAI-compatible HTTP server."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from pdserve.bench.load import RequestFailed
from pdserve.bench.workload import Item
from pdserve.client import AsyncClient, ModelInfo, PdserveError
from pdserve.core.errors import ConfigError

CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Generation:
    """What every request asks for beside prompt and length.

    Attributes:
        model: Served model name; None: the only one (our gRPC only).
        temperature: 0 is greedy.
        ignore_eos: Always generate the full length.
        timeout_s: Deadline of one request, seconds; None: none.
    """

    model: str | None
    temperature: float
    ignore_eos: bool
    timeout_s: float | None


class PdserveBackend:
    """Our gRPC API, through the SDK.

    Args:
        client: Connected to the routers under test.
        generation: What to ask for.
    """

    def __init__(self, client: AsyncClient, generation: Generation) -> None:
        self._client = client
        self._generation = generation

    async def model(self) -> ModelInfo:
        """The model that will be asked.

        Raises:
            ConfigError: It is not served.
            PdserveError: No router answers.
        """
        models = await self._client.models()
        wanted = [m for m in models if self._generation.model in (None, m.name)]
        if len(wanted) != 1:
            raise ConfigError(f"--model: choose one of {', '.join(m.name for m in models) or 'none (no workers yet)'}")
        return wanted[0]

    async def send(self, item: Item, on_output: Callable[[], None]) -> int:
        """See `Backend`."""
        g = self._generation
        stream = self._client.stream(
            prompt_token_ids=item.prompt_token_ids,
            max_tokens=item.max_tokens,
            temperature=g.temperature,
            ignore_eos=g.ignore_eos,
            model=g.model,
            timeout_s=g.timeout_s,
        )
        try:
            async with stream:
                async for delta in stream:
                    if delta.token_ids:
                        on_output()
                return len(stream.result.token_ids)
        except PdserveError as e:
            raise RequestFailed(f"{e.status} {e.reason}" if e.reason != e.status else e.status) from e


class OpenAIBackend:
    """An OpenAI-compatible completions endpoint that takes token ids and streams server-sent events.

    Args:
        client: HTTP client.
        url: Of the endpoint.
        generation: What to ask for; `model` must be set.
    """

    def __init__(self, client: httpx2.AsyncClient, url: str, generation: Generation) -> None:
        self._client = client
        self._url = url
        self._generation = generation

    async def send(self, item: Item, on_output: Callable[[], None]) -> int:
        """See `Backend`. Tokens are counted by the server's usage, else one per event."""
        body = {
            "model": self._generation.model,
            "prompt": list(item.prompt_token_ids),
            "max_tokens": item.max_tokens,
            "temperature": self._generation.temperature,
            "ignore_eos": self._generation.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        timeout = httpx2.Timeout(self._generation.timeout_s, connect=CONNECT_TIMEOUT_S)
        try:
            async with self._client.stream("POST", self._url, json=body, timeout=timeout) as response:
                if response.status_code != 200:
                    raise RequestFailed(f"HTTP {response.status_code}")
                return await _count_events(response, on_output)
        except httpx2.HTTPError as e:
            raise RequestFailed(type(e).__name__) from e


async def _count_events(response: httpx2.Response, on_output: Callable[[], None]) -> int:
    outputs, usage_tokens = 0, None
    async for event in httpx2.EventSource(response):
        if event.data == "[DONE]":
            return outputs if usage_tokens is None else usage_tokens
        chunk = _parse(event.data)
        if "error" in chunk:
            raise RequestFailed("error event in the stream")
        try:
            if chunk.get("usage"):
                usage_tokens = int(chunk["usage"]["completion_tokens"])
            has_output = any(_has_output(choice) for choice in chunk.get("choices") or ())
        except (AttributeError, LookupError, TypeError, ValueError) as e:
            raise RequestFailed("an event is not one of completions") from e
        if has_output:
            outputs += 1
            on_output()
    raise RequestFailed("the stream was cut")


def _parse(data: str) -> Mapping[str, Any]:
    try:
        chunk = json.loads(data)
    except ValueError as e:
        raise RequestFailed("an event is not JSON") from e
    if not isinstance(chunk, Mapping):
        raise RequestFailed("an event is not a JSON object")
    return chunk


def _has_output(choice: Mapping[str, Any]) -> bool:
    """A chunk that carries a token: text may be empty in the middle of a character, but not with a finish reason."""
    return bool(choice.get("text")) or not choice.get("finish_reason")
