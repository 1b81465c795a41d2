"""TransferClient: the decode side of the control plane. One stream per prefill process, one pull at a time per
transfer and source.

Life of an incoming transfer: `start` (destinations are FILLING) -> watermarks -> pulls -> manifest -> `result`. However
it ends, `result` and `abort` return only when nothing writes into the destinations any more; then they are VALID or may
be freed. A transfer waits for prefill as long as its control stream lives: prefill sends a heartbeat every second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import grpc.aio

from pdserve.core.clock import Clock
from pdserve.core.errors import TransferError
from pdserve.core.grpc_server import channel_options
from pdserve.core.layout import KVLayout
from pdserve.kvtransfer.arrival import Stages
from pdserve.kvtransfer.control_stream import ControlStream
from pdserve.kvtransfer.gathered import GatheredTransfer
from pdserve.kvtransfer.handoff import SinkTransfer
from pdserve.kvtransfer.incoming import IncomingTransfer, PartOwner
from pdserve.kvtransfer.transport import PageSink, QuarantiningSink

MAX_MESSAGE_BYTES = 16 << 20  # a watermark names its pages in about 20 bytes each


@dataclass(frozen=True, slots=True)
class TransferPeer:
    """A prefill process, as the router named it.

    Attributes:
        worker_id: Stable name.
        address: host:port of its gRPC endpoint.
        incarnation: Process start, as hex; another process at the address refuses.
    """

    worker_id: str
    address: str
    incarnation: str


Transfer = IncomingTransfer | GatheredTransfer
"""From one source, or from several."""


class TransferClient:
    """Pulls transfers into one decode worker's pool.

    Args:
        worker_id: This worker's name.
        incarnation: This process's start, as hex.
        identity_digest: Must equal prefill's.
        layout: This pool's layout.
        sinks: Data planes into this pool by name, most wanted first; closed by `close`.
        clock: Time.
        stages: For peers whose layout is another; closed by `close`. None: those are refused.
        integrity: "host": only pages with checksums are taken; "none": prefill decides.
        host_id: See `negotiation.host_id`; empty: no plane within the host.
        open_channel: Makes a gRPC channel to host:port; None: a plain one.
        connect_timeout_s: Limit for the first answer of a peer, seconds.
        peer_timeout_s: A peer silent for this long is taken for dead, seconds.
        refusal: Says why the TLS of a gRPC server at host:port refuses this process, or None; asked in a thread when
            one ended a stream before its welcome. None: not asked.
        expect: Told, once they are reserved, of the pages that a transfer will write; must not block. None: nobody is.
    """

    def __init__(
        self,
        *,
        worker_id: str,
        incarnation: str,
        identity_digest: bytes,
        layout: KVLayout,
        sinks: Mapping[str, PageSink],
        clock: Clock,
        stages: Stages | None = None,
        integrity: str = "host",
        host_id: str = "",
        open_channel: Callable[[str], grpc.aio.Channel] | None = None,
        connect_timeout_s: float = 5.0,
        peer_timeout_s: float = 3.0,
        refusal: Callable[[str], str | None] | None = None,
        expect: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        self.worker_id, self.incarnation, self.identity_digest = worker_id, incarnation, identity_digest
        self.layout, self.clock, self.integrity = layout, clock, integrity
        self.open_channel = open_channel or _plain_channel
        self.connect_timeout_s, self.peer_timeout_s = connect_timeout_s, peer_timeout_s
        self.sinks, self.host_id = dict(sinks), host_id
        self.stages, self.refusal = stages, refusal
        self._expect = expect
        self._streams: dict[tuple[str, str], ControlStream] = {}
        self._transfers: dict[str, Transfer] = {}
        self._quarantining = [s for s in self.sinks.values() if isinstance(s, QuarantiningSink)]
        for sink in self._quarantining:
            sink.on_overdue(self._on_overdue)
        if stages is not None:
            stages.on_overdue(self._on_overdue)
        self._closed = False

    @property
    def num_quarantined(self) -> int:
        """Pages of failed transfers into which something may still write; callable from any thread."""
        in_pool = sum(sink.num_quarantined for sink in self._quarantining)
        return in_pool + (self.stages.num_quarantined if self.stages else 0)

    @property
    def num_open(self) -> int:
        """Transfers that have not ended."""
        return len(self._transfers)

    def start(
        self,
        transfer_id: str,
        peer: TransferPeer,
        *,
        num_cached_pages: int,
        destinations: Sequence[int],
        expected_num_tokens: int,
        expected_digest: bytes,
        request_id: str = "",
    ) -> IncomingTransfer:
        """Opens a transfer; call it on the event loop, once the destinations are reserved.

        Args:
            transfer_id: The transfer, minted by the router for this attempt.
            peer: Who computes the prompt.
            num_cached_pages: Leading prompt pages that are here already; they are not pulled.
            destinations: Page ids of ALL prompt pages in prompt order, cached ones included.
            expected_num_tokens: Tokens whose KV the manifest must name.
            expected_digest: Prompt digest that the manifest must carry.
            request_id: For logs and traces.

        Raises:
            TransferError: A transfer of that id is open.
        """
        self._check_new(transfer_id)
        state = SinkTransfer(len(destinations), num_cached_pages, expected_num_tokens, expected_digest)
        transfer = self._add(transfer_id, peer, state, destinations, request_id, partial(self._forget, transfer_id))
        self._begun(transfer, destinations[num_cached_pages:])
        return transfer

    def gather(
        self,
        transfer_id: str,
        peers: Sequence[TransferPeer],
        *,
        num_cached_pages: int,
        destinations: Sequence[int],
        expected_num_tokens: int,
        expected_digest: bytes,
        request_id: str = "",
    ) -> Transfer:
        """Opens a transfer of a prompt whose KV heads several processes have, each a range of them.

        Args:
            transfer_id: As for `start`; every source offers its part under this id.
            peers: Who computes the prompt; the first one samples. With one it is `start`.
            num_cached_pages: As for `start`, as all that follow.
            destinations: Page ids of all prompt pages.
            expected_num_tokens: Tokens that every manifest must name.
            expected_digest: Prompt digest that every manifest must carry.
            request_id: For logs and traces.

        Raises:
            TransferError: A transfer of that id is open; SHARDS: none, one twice, or more than KV heads.
        """
        self._check_sources(peers)
        self._check_new(transfer_id)
        state = SinkTransfer(len(destinations), num_cached_pages, expected_num_tokens, expected_digest)
        over = partial(self._forget, transfer_id)
        transfer: Transfer
        if len(peers) == 1:
            transfer = self._add(transfer_id, peers[0], state, destinations, request_id, over)
        else:
            transfer = GatheredTransfer(transfer_id, self.layout, len(peers), request_id, over)
            owners = [transfer.part(index) for index in range(len(peers))]
            transfer.parts = tuple(
                self._add(transfer_id, peer, state, destinations, request_id, owner.over, owner)
                for peer, owner in zip(peers, owners, strict=True)
            )
        self._begun(transfer, destinations[num_cached_pages:])
        return transfer

    def _begun(self, transfer: Transfer, written: Sequence[int]) -> None:
        """It is open, and will write these pages."""
        self._transfers[transfer.transfer_id] = transfer
        if self._expect is not None:
            self._expect(written)

    def _check_sources(self, peers: Sequence[TransferPeer]) -> None:
        if len({(peer.address, peer.incarnation) for peer in peers}) != len(peers) or not peers:
            named = ", ".join(f"{peer.worker_id} at {peer.address}" for peer in peers) or "none"
            raise TransferError(f"the sources of a transfer must be distinct: {named}", reason="SHARDS")
        if len(peers) > (num_heads := min(group.num_kv_heads for group in self.layout.groups)):
            raise TransferError(f"{len(peers)} sources for {num_heads} KV heads", reason="SHARDS")

    def _check_new(self, transfer_id: str) -> None:
        if self._closed:
            raise TransferError("the transfer client is closed", reason="CLIENT_CLOSED")
        if transfer_id in self._transfers:
            raise TransferError(f"transfer {transfer_id} is open", reason="DUPLICATE_TRANSFER", status="ALREADY_EXISTS")

    def _add(
        self,
        transfer_id: str,
        peer: TransferPeer,
        state: SinkTransfer,
        destinations: Sequence[int],
        request_id: str,
        over: Callable[[], None],
        owner: PartOwner | None = None,
    ) -> IncomingTransfer:
        """Puts a transfer on the stream of its source, which is opened if there is none."""
        key = (peer.address, peer.incarnation)
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = ControlStream(self, peer)
        transfer = IncomingTransfer(transfer_id, state, destinations, stream, self.clock, request_id, over, owner)
        stream.transfers[transfer_id] = transfer
        stream.send(transfer.opening)
        return transfer

    def _forget(self, transfer_id: str) -> None:
        """The transfer has ended."""
        self._transfers.pop(transfer_id, None)

    def _on_overdue(self, transfer_id: str, address: str, error: TransferError) -> None:
        if (transfer := self._transfers.get(transfer_id)) is not None:
            transfer.on_overdue(address, error)

    def on_stream_ended(self, stream: ControlStream) -> None:
        """A stream died; the next `start` opens another."""
        key = (stream.peer.address, stream.peer.incarnation)
        if self._streams.get(key) is stream:
            del self._streams[key]

    async def close(self) -> None:
        """Ends all streams and transfers; returns when nothing writes into the pool any more. Idempotent."""
        self._closed = True
        streams = list(self._streams.values())
        for stream in streams:
            stream.task.cancel()
        await asyncio.gather(*(s.task for s in streams), return_exceptions=True)
        for transfer in list(self._transfers.values()):
            await transfer.abort("CLIENT_CLOSED")
        self._streams.clear()
        for sink in self.sinks.values():
            await sink.close()
        if self.stages is not None:
            await self.stages.close()


def _plain_channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=channel_options(MAX_MESSAGE_BYTES))
