"""ControlStream: one control stream of a decode worker to one prefill process, from its hello to its end.

    hello ─▶ welcome ─▶ messages, until either side dies ─▶ every transfer on it is told why

What is queued before the welcome goes out after it. A stream that ends is not opened again: the next transfer opens
another one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from pdserve.core.errors import TransferError
from pdserve.core.layout import KVLayout
from pdserve.kvtransfer import welcome
from pdserve.kvtransfer.arrival import Inlet, open_inlet
from pdserve.kvtransfer.control_messages import stream_error
from pdserve.kvtransfer.negotiation import PROTOCOL_VERSION
from pdserve.v1 import kvtransfer_pb2 as pb
from pdserve.v1 import kvtransfer_pb2_grpc as rpc

if TYPE_CHECKING:
    from pdserve.kvtransfer.control_client import TransferClient, TransferPeer
    from pdserve.kvtransfer.incoming import IncomingTransfer

log = logging.getLogger(__name__)
MIN_RENEWAL_S = 0.05
_SILENT_TICKS = 6
ControlCall = grpc.aio.StreamStreamCall[pb.ControlRequest, pb.ControlResponse]
Outgoing = pb.ControlRequest | Callable[[], pb.ControlRequest | None]
"""A message, or what makes it, or finds nothing to say, once the welcome is there."""


class ControlStream:
    """See the module.

    Args:
        client: Whose it is.
        peer: The prefill process.

    Attributes:
        welcome: Prefill's first message, once it is there; then the next two are set.
        transport: Data plane of the pair.
        inlet: How its pages come in.
        transfers: Open transfers by id.
        num_late: Messages of transfers that are not open.
        task: Runs it to its end.
    """

    def __init__(self, client: TransferClient, peer: TransferPeer) -> None:
        self.peer = peer
        self.welcome: pb.TransferWelcome | None = None
        self.transport = ""
        self.inlet: Inlet | None = None
        self.transfers: dict[str, IncomingTransfer] = {}
        self.num_late = 0
        self._client = client
        self._outbox: asyncio.Queue[Outgoing] = asyncio.Queue()
        self._renewal_waits = False
        self._silent_ticks = 0
        self.task = asyncio.get_running_loop().create_task(self._run())

    @property
    def checks_pages(self) -> bool:
        """Every page comes with a checksum."""
        return self.welcome is not None and self.welcome.integrity == "host"

    def send(self, message: Outgoing) -> None:
        """Queues a message."""
        self._outbox.put_nowait(message)

    def forget(self, transfer_id: str) -> None:
        """The transfer has ended."""
        self.transfers.pop(transfer_id, None)

    async def _run(self) -> None:
        error = TransferError("internal error of a control stream; the log has it", reason="CONTROL_FAILED")
        try:
            await self._talk()
        except asyncio.CancelledError:
            error = TransferError("the transfer client was closed", reason="CLIENT_CLOSED")
            raise
        except TransferError as e:
            error = e
        finally:
            self._client.on_stream_ended(self)
            for transfer in list(self.transfers.values()):
                transfer.on_stream_lost(error)

    async def _talk(self) -> None:
        """Runs the stream until it dies; raises why."""
        client, channel = self._client, self._client.open_channel(self.peer.address)
        async with channel:
            call: ControlCall = rpc.KvTransferStub(channel).Control()  # type: ignore[no-untyped-call]
            tasks: list[asyncio.Task[None]] = []
            try:
                await client.clock.wait_for(call.write(self._hello()), client.connect_timeout_s)
                first = await self._read(call, client.connect_timeout_s)
                if first.WhichOneof("message") != "welcome":
                    raise TransferError("prefill did not begin with a welcome", reason="BAD_WELCOME")
                welcome.check(first.welcome, self.peer.worker_id, client.integrity)
                await self._open_inlet(first.welcome)
                self.welcome = first.welcome
                parts = (self._listen(call), self._write(call), self._renew(), self._watch_silence())
                tasks = [asyncio.create_task(part) for part in parts]
                running = set(tasks)
                while True:  # a writer that ends only noticed first that the call died
                    ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    for task in ended:
                        task.result()  # raises what went wrong
            except grpc.aio.AioRpcError as e:
                raise await self._why_ended(e) from e
            except TimeoutError as e:
                raise TransferError(
                    f"prefill worker {self.peer.worker_id} at {self.peer.address} is silent", reason="PEER_SILENT"
                ) from e
            finally:
                client.on_stream_ended(self)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                call.cancel()
                if self.inlet is not None:
                    self.inlet.close()

    def _hello(self) -> pb.ControlRequest:
        client = self._client
        hello = pb.TransferHello(
            protocol_version=PROTOCOL_VERSION,
            worker_id=client.worker_id,
            incarnation=client.incarnation,
            identity_digest=client.identity_digest,
            layout=client.layout.to_json(),
            expected_incarnation=self.peer.incarnation,
            transports=list(client.sinks),
            host_id=client.host_id,
            kv_converts=sorted(client.stages.converts) if client.stages else (),
        )
        return pb.ControlRequest(hello=hello)

    async def _why_ended(self, ended: grpc.aio.AioRpcError) -> TransferError:
        """Where prefill ended it without a word, TLS may be the reason: then gRPC does not say so."""
        client, peer = self._client, self.peer
        client.on_stream_ended(self)  # what starts from now on opens another one
        error = stream_error(peer.worker_id, peer.address, ended)
        if error.reason != "PEER_LOST" or self.welcome is not None or client.refusal is None:
            return error
        why = await asyncio.to_thread(client.refusal, peer.address)
        if why is None:
            return error
        return TransferError(f"prefill worker {peer.worker_id} at {peer.address}: {why}", reason="TLS_REFUSED")

    async def _open_inlet(self, first: pb.TransferWelcome) -> None:
        client = self._client
        self.transport = name = welcome.plane_of(first, self.peer.worker_id, client.sinks)
        theirs = KVLayout.from_json(first.layout)
        first_heads = welcome.first_heads_of(first, self.peer.worker_id, theirs)
        sink, stages, ours = client.sinks[name], client.stages, client.layout
        self.inlet = await open_inlet(name, sink, stages, ours, theirs, first_heads)
        log.info("pages of prefill worker %s come over %s%s", self.peer.worker_id, name, _converted(theirs, ours))

    async def _read(self, call: ControlCall, timeout_s: float | None) -> pb.ControlResponse:
        message = await self._client.clock.wait_for(call.read(), timeout_s)
        if not isinstance(message, pb.ControlResponse):
            raise TransferError(f"prefill worker {self.peer.worker_id} ended the stream", reason="PEER_LOST")
        return message

    async def _listen(self, call: ControlCall) -> None:
        while True:
            message = await self._read(call, None)
            self._silent_ticks = 0
            self._on_message(message)

    async def _watch_silence(self) -> None:
        """Raises TimeoutError when the peer is silent; in ticks, as in `core.session`: a stalled loop blames nobody."""
        while self._silent_ticks < _SILENT_TICKS:
            await self._client.clock.sleep(self._client.peer_timeout_s / _SILENT_TICKS)
            self._silent_ticks += 1
        raise TimeoutError

    async def _write(self, call: ControlCall) -> None:
        """Sends what is queued; when the call died, the reader sees it and ends the stream."""
        while True:
            queued = await self._outbox.get()
            message = queued if isinstance(queued, pb.ControlRequest) else queued()
            if message is None:
                continue
            try:
                await call.write(message)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return

    async def _renew(self) -> None:
        assert self.welcome is not None
        while True:
            await self._client.clock.sleep(max(self.welcome.lease_ms / 5000, MIN_RENEWAL_S))
            if self.transfers and not self._renewal_waits:
                self._renewal_waits = True
                self.send(self._renewal)

    def _renewal(self) -> pb.ControlRequest:
        """Of what is open when it is sent: one is queued at a time, also for a prefill worker that reads nothing."""
        self._renewal_waits = False
        return pb.ControlRequest(renew=pb.RenewTransfers(transfer_ids=list(self.transfers)))

    def _on_message(self, message: pb.ControlResponse) -> None:
        kind = message.WhichOneof("message")
        if kind not in ("watermark", "manifest", "closed"):
            return
        transfer = self.transfers.get(getattr(message, kind).transfer_id)
        if transfer is None:
            self.num_late += 1
        else:
            transfer.on_message(message)


def _converted(theirs: KVLayout, ours: KVLayout) -> str:
    """What costs another pass over the bytes, for the log."""
    return "" if theirs == ours else f", converted from pages of {theirs.page_size} tokens in {theirs.dtype}"
