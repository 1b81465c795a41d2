"""A router on fakes and virtual time: orchestrator, store and workers of one process, scripted by the test."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from pdserve.bench.virtual_time import VirtualClock
from pdserve.core.request import Role
from pdserve.core.sampling import SamplingParams
from pdserve.router.admission import Admitted, admit
from pdserve.router.config import RouterConfig
from pdserve.router.open_request import OpenRequest
from pdserve.router.orchestrator import Orchestrator
from pdserve.router.policy import least_loaded
from pdserve.router.store_fake import FakeStore
from pdserve.router.trace import NoTrace, RequestTrace
from pdserve.router.worker_fake import FakeWorkerClient
from pdserve.router.worker_set import WorkerSet
from pdserve.router.worker_table import Limits
from pdserve.v1 import common_pb2, inference_pb2, worker_pb2
from tests.router.test_worker_table import MODEL, facts

ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED}


class World:
    """Everything but gRPC and Redis. Workers are named p0, d0, m0, …"""

    def __init__(self, *workers: str, **config: object) -> None:
        self.clock = VirtualClock()
        self.store = FakeStore()
        self.workers = WorkerSet(MODEL)
        self.clients: dict[str, FakeWorkerClient] = {}
        self.orchestrator = Orchestrator(
            RouterConfig(**config),  # type: ignore[arg-type]
            "router",
            self.clock,
            self.store,
            self.workers,
            least_loaded(),
            random.Random(1),
        )
        for name in workers:
            self.connect(name)

    def connect(self, name: str) -> FakeWorkerClient:
        client = self.clients[name] = FakeWorkerClient(name)
        self.workers.session_open(client, facts(name, ROLES[name[0]]))
        return client

    def die(self, name: str, reason: str = "WORKER_DIED") -> None:
        """As the real client does it: attempts hear of it, then the table."""
        self.clients[name].die(reason)
        self.workers.session_closed(name)

    async def open(
        self,
        request_id: str = "r",
        *,
        arrival_s: float | None = None,
        deadline_s: float | None = None,
        max_tokens: int = 4,
        trace: RequestTrace | None = None,
        **sampling: int,
    ) -> OpenRequest:
        opened = await self.orchestrator.open(
            admitted(request_id, max_tokens, **sampling),
            arrival_s=self.clock.now() if arrival_s is None else arrival_s,
            deadline_s=deadline_s,
            trace=trace or NoTrace(),
        )
        await self.settle()
        return opened

    async def settle(self) -> None:
        """Lets everything run that can run without time passing."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def until(self, condition: Callable[[], bool], timeout_s: float = 1000.0) -> None:
        """Waits, on virtual time."""
        end_s = self.clock.now() + timeout_s
        while not condition():
            assert self.clock.now() < end_s, "waited in vain"
            await self.clock.sleep(0.05)

    def check_clean(self) -> None:
        """Nothing is left of any request on the router."""
        assert self.orchestrator.num_open == 0
        assert self.orchestrator.num_queued == 0
        for client in self.clients.values():
            assert client.submits == {}
            assert client.leases == set()
            worker = self.workers.table.live(client.worker_id)
            assert worker is None or worker.inflight == {}


def admitted(request_id: str = "r", max_tokens: int = 4, **sampling: Any) -> Admitted:
    return admit(
        inference_pb2.GenerateRequest(text="x"),
        request_id=request_id,
        model=MODEL,
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling),
        limits=Limits(128, 100),
        drawn_seed=1,
    )


def tokens(
    index: int, *ids: int, text: str = "", at: int = 0, finish: bool = False, **timings: float
) -> worker_pb2.SequenceOutput:
    """News of a sequence: tokens from `index` on with the text from `at` on, and maybe its end."""
    delta = common_pb2.Delta(index=index, token_ids=ids, text=text, text_offset=at)
    output = worker_pb2.SequenceOutput(delta=delta)
    if finish:
        output.finished.finish_reason = common_pb2.FINISH_REASON_LENGTH
    if timings:
        output.timings.CopyFrom(common_pb2.Timings(**timings))
    return output


def failed(reason: str, status: str = "UNAVAILABLE") -> worker_pb2.SequenceOutput:
    detail = common_pb2.ErrorDetail(status=status, reason=reason, message="it broke")
    return worker_pb2.SequenceOutput(failed=detail)


async def read_all(opened: OpenRequest) -> tuple[list[int], inference_pb2.Finished]:
    """Token ids up to Finished."""
    ids: list[int] = []
    while True:
        item = await opened.stream.next()
        if isinstance(item, inference_pb2.Finished):
            return ids, item
        assert isinstance(item, common_pb2.Delta) and item.index == len(ids)
        ids += item.token_ids
