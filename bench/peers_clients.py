"""How a started system is asked: whether it serves, one answer to look at, and the client that a load goes through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

import grpc
import httpx2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.bench.backends import Generation, OpenAIBackend, PdserveBackend
from pdserve.bench.load import Backend, RequestFailed
from pdserve.bench.peers_process import SystemFailed
from pdserve.bench.workload import Item
from pdserve.client import AsyncClient, PdserveError

SERVED = "peer"
"""Name of the model at every system."""
PROBE_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class Endpoint:
    """Where and how a system is asked.

    Attributes:
        api: Its interface.
        ports: Where it serves, on 127.0.0.1; vllm-disaggregated: prefill, decode.
    """

    api: Literal["pdserve", "openai", "vllm-disaggregated"]
    ports: tuple[int, ...]

    def ready(self) -> bool:
        """True when every port serves."""
        return all(_serves_grpc(p) if self.api == "pdserve" else _serves_http(p) for p in self.ports)

    @asynccontextmanager
    async def backend(self, timeout_s: float) -> AsyncIterator[Backend]:
        """A client of it; every request has `timeout_s`."""
        generation = Generation(SERVED, 0.0, True, timeout_s)
        if self.api == "pdserve":
            async with AsyncClient([f"127.0.0.1:{self.ports[0]}"]) as client:
                yield PdserveBackend(client, generation)
            return
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx2.AsyncClient(limits=limits, trust_env=False) as http:
            decode = OpenAIBackend(http, _url(self.ports[-1], "/v1/completions"), generation)
            if self.api == "openai":
                yield decode
            else:
                yield Disaggregated(http, _url(self.ports[0], "/v1/completions"), decode, timeout_s)


class Disaggregated:
    """What vLLM's small proxy does, without the hop: one token from prefill, then the stream of decode.

    Args:
        http: HTTP client.
        prefill_url: Completions of the prefill instance.
        decode: The decode instance.
        timeout_s: Limit of the prefill request, seconds.
    """

    def __init__(self, http: httpx2.AsyncClient, prefill_url: str, decode: Backend, timeout_s: float) -> None:
        self._http = http
        self._prefill_url = prefill_url
        self._decode = decode
        self._timeout_s = timeout_s

    async def send(self, item: Item, on_output: Callable[[], None]) -> int:
        """See `Backend`."""
        body = {"model": SERVED, "prompt": list(item.prompt_token_ids), "max_tokens": 1, "temperature": 0.0}
        try:
            answer = await self._http.post(self._prefill_url, json=body, timeout=self._timeout_s)
        except httpx2.HTTPError as e:
            raise RequestFailed(f"prefill: {type(e).__name__}") from e
        if answer.status_code != 200:
            raise RequestFailed(f"prefill: HTTP {answer.status_code}")
        return await self._decode.send(item, on_output)


def ask(endpoint: Endpoint, prompt: tuple[int, ...], max_tokens: int, timeout_s: float) -> str:
    """One greedy answer as text; checks that prompt and answer were counted as what they are.

    Raises:
        SystemFailed: It does not answer, or counts otherwise.
    """
    if endpoint.api == "pdserve":
        return asyncio.run(_ask_pdserve(endpoint.ports[0], prompt, max_tokens, timeout_s))
    text, counts = "", (0, 0)
    for port in endpoint.ports:  # disaggregated: decode finds what prefill has stored
        body = {
            "model": SERVED,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        try:
            answer = httpx2.post(_url(port, "/v1/completions"), json=body, timeout=timeout_s, trust_env=False)
            answer.raise_for_status()
            value = answer.json()
            text = str(value["choices"][0]["text"])
            counts = (int(value["usage"]["prompt_tokens"]), int(value["usage"]["completion_tokens"]))
        except (httpx2.HTTPError, ValueError, TypeError, LookupError) as e:
            raise SystemFailed(f"it does not answer: {e!r}") from e
    _check_counts(counts, (len(prompt), max_tokens))
    return text


async def _ask_pdserve(port: int, prompt: tuple[int, ...], max_tokens: int, timeout_s: float) -> str:
    try:
        async with AsyncClient([f"127.0.0.1:{port}"]) as client:
            result = await client.generate(
                prompt_token_ids=prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, timeout_s=timeout_s
            )
    except PdserveError as e:
        raise SystemFailed(f"it does not answer: {e}") from e
    _check_counts((result.usage.prompt_tokens, len(result.token_ids)), (len(prompt), max_tokens))
    return result.text


def _check_counts(counts: tuple[int, int], wanted: tuple[int, int]) -> None:
    if counts != wanted:
        raise SystemFailed(f"it counts {counts} prompt and output tokens where {wanted} were asked for")


def _url(port: int, path: str) -> str:
    return f"http://127.0.0.1:{port}{path}"


def _serves_http(port: int) -> bool:
    try:
        return httpx2.get(_url(port, "/health"), timeout=PROBE_TIMEOUT_S, trust_env=False).status_code == 200
    except httpx2.HTTPError:
        return False


def _serves_grpc(port: int) -> bool:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        request = health_pb2.HealthCheckRequest(service="pdserve.v1.Inference")
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=PROBE_TIMEOUT_S)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
