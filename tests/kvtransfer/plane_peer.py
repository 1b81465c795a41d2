"""A prefill side in a process of its own, and the test's end of it.

python -m tests.kvtransfer.plane_peer PLANE INCARNATION GRPC_PORT DATA_PORT HALT [FIRST:NUM]

Commands on stdin: "lend ID N" (a computed prompt) | "begin ID N", "range ID FIRST END" (one that is being computed) |
"report" | "go" (no page halts any more). Events on stdout, a JSON object a line.
HALT is "no"; "wait": the first page that is read halts in its middle until "go"; "cut": its connection ends there.
With FIRST:NUM it has NUM of the KV heads, from FIRST on.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc.aio

from pdserve.core.clock import MonotonicClock
from pdserve.kvtransfer.control_client import TransferPeer
from pdserve.kvtransfer.control_server import TransferServer
from pdserve.kvtransfer.handoff import TERMINAL, TransferState
from pdserve.kvtransfer.pool import KvPool
from pdserve.kvtransfer.sockets import shut_down

from .accounts import Lender
from .planes import Plane, a_member, plane_named
from .world import DIGEST, HOST_ID, LAYOUT, PROMPT_DIGEST, Ref

NUM_PAGES = 64


def tell(**event: object) -> None:
    """One event to the test, from any thread."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


class TellingLender(Lender):
    """A lender that tells the test."""

    def on_ended(self, transfer_id: str, state: TransferState, reason: str) -> None:
        """See `Lender`."""
        super().on_ended(transfer_id, state, reason)
        tell(event="ended", id=transfer_id, state=state, reason=reason)


async def serve(
    plane: Plane, incarnation: str, grpc_port: int, data_port: int, halt: str, heads: Sequence[int] = ()
) -> None:
    """Runs until stdin ends."""
    layout, first_kv_heads = LAYOUT, heads[:1]
    if heads:
        layout = replace(LAYOUT, groups=tuple(replace(group, num_kv_heads=heads[1]) for group in LAYOUT.groups))
    go = threading.Event()
    lent = dict[str, list[Ref]]()

    def inside(sock: object) -> None:
        if not go.is_set():
            tell(event="halted")
            if halt == "cut":
                go.set()
                shut_down(sock)  # type: ignore[arg-type]
            else:
                go.wait()

    if halt != "no" and plane.halt is not None:
        plane.halt(inside)
    memory = KvPool(layout, NUM_PAGES)
    source = plane.source(memory, data_port)
    lender = TellingLender(memory, incarnation)
    server = TransferServer(
        memory=memory,
        sources={plane.name: source},
        layout=layout,
        first_kv_heads=first_kv_heads,
        identity_digest=DIGEST,
        incarnation=incarnation,
        listener=lender,
        clock=MonotonicClock(),
        host_id=HOST_ID,
        heartbeat_s=0.2,
    )
    grpc_server = grpc.aio.server()
    server.register(grpc_server)
    port = grpc_server.add_insecure_port(f"127.0.0.1:{grpc_port}")
    await grpc_server.start()
    await server.start()
    _, _, data = source.address.rpartition(":")
    tell(event="ready", grpc_port=port, data_port=int(data) if data.isdigit() else 0)
    while line := await asyncio.to_thread(sys.stdin.readline):
        match line.split():
            case ["lend", transfer_id, number]:
                num_pages = int(number)
                refs = lender.lend(transfer_id, num_pages)
                server.offer(transfer_id, num_pages)
                tell(event="lent", pages=[(ref.page_id, ref.generation) for ref in refs])
                server.pages_ready(transfer_id, 0, refs)
                server.complete(
                    transfer_id, num_tokens=num_pages * 8, token_id=42, index=0, prompt_digest=PROMPT_DIGEST
                )
            case ["begin", transfer_id, number]:
                lent[transfer_id] = lender.lend(transfer_id, int(number))
                server.offer(transfer_id, int(number))
                tell(event="lent", pages=[(ref.page_id, ref.generation) for ref in lent[transfer_id]])
            case ["range", transfer_id, first, end]:
                server.pages_ready(transfer_id, int(first), lent[transfer_id][int(first) : int(end)])
            case ["report"]:
                ending = [name for name, e in server._entries.items() if e.transfer.state in TERMINAL]
                tell(event="report", even=lender.even, leases=server.num_leases, ending=ending)
            case ["go"]:
                go.set()
    await server.stop()
    await grpc_server.stop(None)


class PlanePeer:
    """The test's end of a peer process."""

    def __init__(self, process: subprocess.Popen[str], incarnation: str) -> None:
        self.process, self.incarnation = process, incarnation
        self.ports = (0, 0)
        self._events: list[dict[str, Any]] = []

    @property
    def peer(self) -> TransferPeer:
        """How decode is told of it."""
        return TransferPeer("prefill-0", f"127.0.0.1:{self.ports[0]}", self.incarnation)

    def send(self, command: str) -> None:
        """One command."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    async def heard(self, kind: str) -> dict[str, Any]:
        """The next event of a kind; others are kept."""
        assert self.process.stdout is not None
        for event in self._events:
            if event["event"] == kind:
                self._events.remove(event)
                return event
        while True:
            line = await asyncio.wait_for(asyncio.to_thread(self.process.stdout.readline), 20)
            assert line, "the peer has ended"
            event = json.loads(line)
            if event["event"] == kind:
                return event
            self._events.append(event)

    async def lend(self, transfer_id: str, num_pages: int) -> list[Ref]:
        """Offers a computed prompt."""
        self.send(f"lend {transfer_id} {num_pages}")
        return [Ref(*page) for page in (await self.heard("lent"))["pages"]]

    async def begin(self, transfer_id: str, num_pages: int) -> list[Ref]:
        """Offers a prompt of which nothing is computed; `send` of "range ..." goes on."""
        self.send(f"begin {transfer_id} {num_pages}")
        return [Ref(*page) for page in (await self.heard("lent"))["pages"]]

    async def report(self) -> dict[str, Any]:
        """Its books."""
        self.send("report")
        return await self.heard("report")

    async def even(self) -> None:
        """Waits until every page of it is free and no lease is left."""
        async with asyncio.timeout(15):
            while not ((report := await self.report())["even"] and report["leases"] == 0):  # noqa: ASYNC110
                await asyncio.sleep(0.02)


def _launch(arguments: list[str]) -> subprocess.Popen[str]:
    a_member()  # the peer finds the files in its environment
    command = [sys.executable, "-m", "tests.kvtransfer.plane_peer", *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@asynccontextmanager
async def plane_peer(
    plane: Plane, incarnation: str, *, halt: str = "no", ports: tuple[int, int] = (0, 0), heads: str = ""
) -> AsyncIterator[PlanePeer]:
    """Starts a peer, waits until it serves, and ends it."""
    process = _launch([plane.name, incarnation, *map(str, ports), halt, *filter(None, [heads])])
    peer = PlanePeer(process, incarnation)
    try:
        ready = await peer.heard("ready")
        peer.ports = (ready["grpc_port"], ready["data_port"])
        yield peer
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        await asyncio.to_thread(process.wait, 10)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


if __name__ == "__main__":
    heads = [int(part) for argument in sys.argv[6:] for part in argument.split(":")]
    asyncio.run(serve(plane_named(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5], heads))
