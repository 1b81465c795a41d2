"""A worker process without an engine, for tests of the process's life. Its request ids are orders.

python -m tests.support.obedient_worker LOADS REDIS_URL [flags]     LOADS: "loads", "hangs", "fails", "blocks" (thread)
"""

from __future__ import annotations

import asyncio
import sys
import threading

from pdserve.core.background import in_own_thread
from pdserve.core.config import ServiceConfig, WorkerConfig, load
from pdserve.core.errors import ConfigError, EngineError
from pdserve.core.request import Role
from pdserve.core.tls import TlsConfig
from pdserve.core.worker_app import LoadedWorker, WorkerContext, run_worker
from pdserve.v1 import common_pb2, worker_pb2


class ObedientService:
    """Does what the request id of a Submit says: "sick", "well", "full" (not ready), "die", "busy", "stuck"."""

    def __init__(self, loads: str) -> None:
        self._loads = loads
        self._orders: set[str] = set()
        self._idle = asyncio.Event()
        self._context: WorkerContext

    async def start(self, context: WorkerContext) -> tuple[ObedientService, LoadedWorker]:
        self._context = context
        if self._loads == "fails":
            raise ConfigError("--model is wrong")
        if self._loads == "hangs":
            await asyncio.Event().wait()
        if self._loads == "blocks":
            await in_own_thread(threading.Event().wait)
        return self, LoadedWorker(
            identity_digest=b"\x01",
            layout="{}",
            model="smol",
            max_model_len=64,
            vocab_size=10,
            num_pages=4,
            max_num_seqs=2,
            data_address="127.0.0.1:9",
        )

    def welcome(self):
        return worker_pb2.Welcome(worker_id=self._context.worker_id, role=common_pb2.ROLE_PREFILL)

    def submit(self, session, message):
        order = message.fence.request_id
        self._orders.add(order)
        if order == "well":
            self._orders.discard("sick")
        if order == "die":
            self._context.fail(EngineError("the engine died"))
        done = worker_pb2.SequenceOutput(fence=message.fence, finished=worker_pb2.SequenceFinished())
        session.send(worker_pb2.SessionResponse(step_outputs=worker_pb2.StepOutputs(step=1, outputs=[done])))

    def abort(self, session, message):
        self._orders.discard(message.fence.request_id)
        self._idle.set()
        session.send(worker_pb2.SessionResponse(aborted=worker_pb2.Aborted(fence=message.fence, known=True)))

    def renew(self, session, transfer_ids):
        pass

    def session_ended(self, session):
        pass

    def load(self):
        return worker_pb2.Load()

    def healthy(self) -> bool:
        return "sick" not in self._orders

    def ready(self) -> bool:
        return "full" not in self._orders

    async def drain(self) -> None:
        if "busy" in self._orders:
            await self._idle.wait()

    async def stop(self) -> None:
        if "stuck" in self._orders:
            threading.Thread(target=threading.Event().wait).start()
            await asyncio.Event().wait()


def main() -> int:
    """Runs until told to stop."""
    sections = {"service": ServiceConfig, "worker": WorkerConfig, "tls": TlsConfig}
    flags = ["--redis-url", sys.argv[2], *sys.argv[3:]]
    service, worker, tls = load("obedient", "", sections, flags)
    return run_worker(Role.PREFILL, ObedientService(sys.argv[1]), service, worker, tls)


if __name__ == "__main__":
    sys.exit(main())
