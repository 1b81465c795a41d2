"""`pdserve status`: is the router ready, and which models and workers are behind it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import grpc

from pdserve.cli.arguments import add_router, router_addresses
from pdserve.client import Client, ModelInfo, PdserveError
from pdserve.client.endpoints import CHANNEL_OPTIONS
from pdserve.core.config import Parser

READY_SERVICE = "pdserve.v1.Inference"
HEALTH_TIMEOUT_S = 5.0
_COLUMNS = ("MODEL", "WORKER", "ROLE", "STATE", "RUNNING", "WAITING", "FREE PAGES", "ADDRESS")


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0 when a router is ready and so is a model, else 1."""
    parser = Parser(
        "pdserve status",
        "Show whether the router is ready, and the models and workers behind it.\n"
        "Exit status 0: requests can be served now; 1: they cannot.",
    )
    add_router(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args(argv)
    addresses = router_addresses(args.router)
    health = {address: router_health(address) for address in addresses}
    models, problem = _models(addresses)
    ready = "SERVING" in health.values() and any(m.ready for m in models)
    if args.json:
        routers = [{"address": a, "health": h} for a, h in health.items()]
        print(json.dumps({"ready": ready, "routers": routers, "models": [asdict(m) for m in models]}))
    else:
        print("\n".join([f"router {address}: {state}" for address, state in health.items()]))
        print(f"error: {problem.message} ({problem.reason})" if problem else "\n".join(_table(models)))
    return 0 if ready else 1


def router_health(address: str) -> str:
    """Readiness of a router: "SERVING", "NOT_SERVING", or why there is no answer."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        request = health_pb2.HealthCheckRequest(service=READY_SERVICE)
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=HEALTH_TIMEOUT_S)
        except grpc.RpcError as e:
            return f"no answer ({e.code().name})"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def _models(addresses: list[str]) -> tuple[tuple[ModelInfo, ...], PdserveError | None]:
    try:
        with Client(addresses) as client:
            return client.models(), None
    except PdserveError as e:
        return (), e


def _table(models: tuple[ModelInfo, ...]) -> list[str]:
    rows: list[tuple[str, ...]] = [_COLUMNS]
    for m in models:
        rows += [
            (
                m.name,
                w.worker_id,
                w.role,
                w.state,
                str(w.num_running),
                str(w.num_waiting),
                f"{w.num_free_pages}/{w.num_pages}",
                w.address,
            )
            for w in m.workers
        ]
    if len(rows) == 1:
        return ["no workers yet; start them with 'pdserve prefill' and 'pdserve decode', or all with 'pdserve up'"]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"model {m.name}: {_readiness(m)}, {m.max_model_len} tokens at most" for m in models]
    return lines


def _readiness(model: ModelInfo) -> str:
    return "ready" if model.ready else "NOT ready"
