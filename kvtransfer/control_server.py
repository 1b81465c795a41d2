"""TransferServer: the prefill side of the control plane. One stream per decode worker, one lease table for all.

Life of a transfer: the service offers it, decode opens it (in either order), pages become final, the prompt is
computed, decode closes it. Whatever ends it, the owner hears `on_ended` once, after the data plane was fenced; only
then may the pages be freed. Everything runs on the event loop, except hashing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

import grpc
import grpc.aio

from pdserve.core.background import Background
from pdserve.core.clock import Clock
from pdserve.core.data_planes import same_host
from pdserve.core.errors import PdserveError, TransferError
from pdserve.core.layout import KVLayout
from pdserve.kvtransfer import handoff, negotiation
from pdserve.kvtransfer import hello as hellos
from pdserve.kvtransfer.checksums import PageChecksums, PageGeneration
from pdserve.kvtransfer.control_messages import OUTCOMES, closed, manifest, reason_of
from pdserve.kvtransfer.handoff import SourceTransfer, TransferState
from pdserve.kvtransfer.pool import PageMemory
from pdserve.kvtransfer.recent import remember
from pdserve.kvtransfer.served_stream import ControlContext, ServedStream
from pdserve.kvtransfer.stream_places import StreamPlaces
from pdserve.kvtransfer.transport import PageSource
from pdserve.v1 import kvtransfer_pb2 as pb
from pdserve.v1 import kvtransfer_pb2_grpc as rpc

log = logging.getLogger(__name__)
MAX_TRANSFER_ID_BYTES = 128
MAX_NAME_CHARS = 128
HELLO_TIMEOUT_S = 5.0


class TransferListener(Protocol):
    """The owner of the pages. Both are called on the event loop and must not block."""

    def on_opened(self, transfer_id: str) -> None:
        """Decode has reserved its pages."""
        ...

    def on_ended(self, transfer_id: str, state: TransferState, reason: str) -> None:
        """The transfer is over and nobody reads its pages any more. Once per offered transfer."""
        ...


@dataclass(eq=False)
class _Entry:
    """One offered transfer."""

    transfer: SourceTransfer
    stream: ServedStream | None = None
    work: deque[tuple[int, tuple[PageGeneration, ...]] | handoff.Computed] = field(default_factory=deque)
    working: bool = False


class TransferServer(rpc.KvTransferServicer):
    """`KvTransfer` servicer and lease table of a prefill worker.

    Args:
        memory: The pool that is served.
        sources: Data planes over the same pool, by name; the caller closes them.
        layout: The pool's layout.
        first_kv_heads: Of a worker that has a range of the KV heads: per layer group of `layout`, the model's
            KV head that is its first one. Empty: it has all heads.
        identity_digest: Must equal decode's.
        incarnation: This process's start, as hex.
        listener: Who frees the pages.
        clock: Time.
        lease_s: How long computed pages wait for a sign of life, seconds.
        integrity: See `PageChecksums`.
        max_pending_opens: Per stream: opens kept for transfers that are not offered yet.
        pending_open_s: How long such an open is kept, seconds.
        heartbeat_s: Time between signs of life to decode, seconds.
        hashers: See `PageChecksums`.
        host_id: See `negotiation.host_id`; empty: no plane within the host.
        places: For control streams; None: as many as is usual.
        fail: Told when a task of the server failed: then a lease may never end, and the process must. None: logged.
    """

    def __init__(
        self,
        *,
        memory: PageMemory,
        sources: Mapping[str, PageSource],
        layout: KVLayout,
        identity_digest: bytes,
        incarnation: str,
        listener: TransferListener,
        clock: Clock,
        lease_s: float = 10.0,
        integrity: str = "host",
        max_pending_opens: int = 1024,
        pending_open_s: float = 30.0,
        heartbeat_s: float = 1.0,
        hashers: Executor | None = None,
        host_id: str = "",
        places: StreamPlaces | None = None,
        first_kv_heads: Sequence[int] = (),
        fail: Callable[[PdserveError], None] | None = None,
    ) -> None:
        self._sources, self._layout, self._clock = dict(sources), layout, clock
        self._identity_digest, self._incarnation, self._listener = identity_digest, incarnation, listener
        self._lease_s, self._heartbeat_s, self._host_id = lease_s, heartbeat_s, host_id
        self._max_pending_opens, self._pending_open_s = max_pending_opens, pending_open_s
        self._first_kv_heads = hellos.own_first_heads(first_kv_heads, layout)
        self._entries: dict[str, _Entry] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()  # the last ones, so that a late open is told why
        self._given_up: OrderedDict[str, handoff.Ended] = OrderedDict()  # opened and closed before they were offered
        self._streams: set[ServedStream] = set()
        self._places = places or StreamPlaces()
        self._work, self._timer = Background(fail or _log_failure), Background(fail or _log_failure)
        self._checksums = PageChecksums(memory, integrity, hashers)
        self._stopping = asyncio.Event()
        self.num_late = 0

    # ---- life -------------------------------------------------------------------------------------------------------

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicer to a server."""
        rpc.add_KvTransferServicer_to_server(self, server)  # type: ignore[no-untyped-call]

    async def start(self) -> None:
        """Starts the sweep of leases, which runs on its own timer."""
        self._timer.start(self._sweep_forever(), "sweep of leases")

    async def stop(self) -> None:
        """Ends all streams and transfers; returns when every `on_ended` was called. Idempotent."""
        self._stopping.set()
        for transfer_id in list(self._entries):
            self.close(transfer_id, "ABORTED")
        await self._timer.cancel()
        await self._work.wait()
        self._checksums.close()

    # ---- the prefill service's side ---------------------------------------------------------------------------------

    @property
    def num_leases(self) -> int:
        """Offered transfers whose pages may not be freed yet."""
        return len(self._entries)

    @property
    def num_streams(self) -> int:
        """Decode workers connected."""
        return len(self._streams)

    def offer(self, transfer_id: str, num_prompt_pages: int) -> None:
        """Makes a transfer known; decode may have opened it already.

        Raises:
            TransferError: The id is in use, or longer than the data plane carries.
        """
        if not 0 < len(transfer_id.encode()) <= MAX_TRANSFER_ID_BYTES:
            raise TransferError(
                f"transfer id has {len(transfer_id.encode())} bytes; 1..{MAX_TRANSFER_ID_BYTES} are allowed",
                reason="BAD_TRANSFER_ID",
                status="INVALID_ARGUMENT",
            )
        if transfer_id in self._entries:
            raise TransferError(
                f"transfer {transfer_id} was offered before", reason="DUPLICATE_TRANSFER", status="ALREADY_EXISTS"
            )
        self._entries[transfer_id] = _Entry(SourceTransfer(num_prompt_pages, self._lease_s))
        for stream in self._streams:
            if (num_cached_pages := stream.take(transfer_id)) is not None:
                self._open(transfer_id, stream, num_cached_pages)
                return
        if (ended := self._given_up.pop(transfer_id, None)) is not None:
            self._feed(transfer_id, ended)

    def pages_ready(self, transfer_id: str, first_page: int, pages: Sequence[PageGeneration]) -> None:
        """Pages are final: hashes them off the loop, publishes them, sends the watermark. Unknown ids are counted."""
        self._enqueue(transfer_id, (first_page, tuple(pages)))

    def complete(
        self,
        transfer_id: str,
        *,
        num_tokens: int,
        token_id: int,
        index: int,
        prompt_digest: bytes,
        finished: bool = False,
    ) -> None:
        """The prompt is computed: sends the manifest after all watermarks, starts the lease. Unknown ids are counted.

        Args:
            transfer_id: The transfer.
            num_tokens: Tokens whose KV the pages hold.
            token_id: The sampled token.
            index: Its output index.
            prompt_digest: SHA-256 over the computed ids.
            finished: The token ended the request; decode pulls nothing more.
        """
        if (entry := self._entries.get(transfer_id)) is None:
            self.num_late += 1
            return
        manifest = handoff.ManifestFacts(entry.transfer.num_pages, num_tokens, token_id, index, prompt_digest, finished)
        self._enqueue(transfer_id, handoff.Computed(manifest))

    def close(self, transfer_id: str, reason: str) -> None:
        """Ends a transfer from this side; `on_ended` follows. Idempotent; unknown ids are counted.

        Args:
            transfer_id: The transfer.
            reason: "ABORTED", "FINISHED", "ENGINE_FAILED" or another UPPER_SNAKE_CASE word, told to decode.
        """
        state = TransferState.ABORTED if reason in ("ABORTED", "FINISHED") else TransferState.FAILED
        self._feed(transfer_id, handoff.Ended(state, reason))

    def renew(self, transfer_ids: Iterable[str]) -> None:
        """Keeps leases alive (router or decode); unknown ids are counted."""
        for transfer_id in transfer_ids:
            self._feed(transfer_id, handoff.Renewed())

    # ---- decode's side: the RPC -------------------------------------------------------------------------------------

    async def Control(  # noqa: N802, RUF100 (name given by the proto)
        self, request_iterator: object, context: ControlContext
    ) -> None:
        """See kvtransfer.proto."""
        await context.send_initial_metadata(())  # on its own: see `core.session`
        name = "(unknown)"
        with ExitStack() as place:
            try:
                with self._places.mute():
                    hello = await self._read_hello(context)
                name = hello.worker_id[:MAX_NAME_CHARS]
                place.enter_context(self._places.of(name, hello.incarnation[:MAX_NAME_CHARS]))
                version = negotiation.version(hello.protocol_version)
                transport = self._admit(hello)
            except TransferError as e:
                log.warning("decode worker %s is refused: %s: %s", name, e.reason, e.message)
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{e.reason}: {e.message}")
            stream = ServedStream(name, transport, self._sources[transport], self._max_pending_opens)
            await self._serve(stream, context, self._welcome(stream, version))

    async def _serve(self, stream: ServedStream, context: ControlContext, welcome: pb.TransferWelcome) -> None:
        """Speaks with a decode worker until either side ends it."""
        log.info("decode worker %s reads pages over %s", stream.peer, stream.transport)
        self._streams.add(stream)
        writer = asyncio.create_task(stream.write(context, welcome, self._clock, self._heartbeat_s))
        reader = asyncio.create_task(self._read(stream, context))
        stops = [asyncio.create_task(e.wait()) for e in (stream.overflow, self._stopping)]
        try:
            await asyncio.wait([writer, reader, *stops], return_when=asyncio.FIRST_COMPLETED)
        finally:
            lost = self._lose(stream)
            for task in (writer, reader, *stops):
                task.cancel()
            stream.log_end(lost, await asyncio.gather(writer, reader, *stops, return_exceptions=True))

    async def _read_hello(self, context: ControlContext) -> pb.TransferHello:
        try:
            first = await self._clock.wait_for(context.read(), HELLO_TIMEOUT_S)
        except TimeoutError:
            first = None
        if not isinstance(first, pb.ControlRequest) or first.WhichOneof("message") != "hello":
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "NO_HELLO: the first message must be a hello")
        hello: pb.TransferHello = first.hello
        return hello

    def _admit(self, hello: pb.TransferHello) -> str:
        """The pair's data plane.

        Raises:
            TransferError: The pair does not fit.
        """
        hellos.check(hello, self._incarnation, self._identity_digest, self._layout, self._first_kv_heads)
        near = same_host(self._host_id, hello.host_id)
        return negotiation.choose(hello.transports, self._sources, same_host=near)

    def _welcome(self, stream: ServedStream, version: int) -> pb.TransferWelcome:
        return pb.TransferWelcome(
            protocol_version=version,
            incarnation=self._incarnation,
            data_address=stream.source.address,
            data_token=stream.token,
            lease_ms=round(self._lease_s * 1000),
            integrity=self._checksums.integrity,
            layout=self._layout.to_json(),
            transport=stream.transport,
            first_kv_heads=self._first_kv_heads,
        )

    async def _read(self, stream: ServedStream, context: ControlContext) -> None:
        while True:
            message: object = await context.read()
            if not isinstance(message, pb.ControlRequest):
                return  # end of stream
            match message.WhichOneof("message"):
                case "open":
                    await self._on_open(stream, message.open)
                case "renew":
                    self.renew(t for t in message.renew.transfer_ids if t in stream.open)
                case "close":
                    self._on_close(stream, message.close)
                case _:
                    self.num_late += 1

    async def _on_open(self, stream: ServedStream, message: pb.OpenTransfer) -> None:
        transfer_id, entry = message.transfer_id, self._entries.get(message.transfer_id)
        if not 0 < len(transfer_id.encode()) <= MAX_TRANSFER_ID_BYTES:
            self.num_late += 1  # never offered; and an answer, which has to wait in memory, would be as long
            return
        over = entry.transfer.reason if entry is not None and entry.transfer.state in handoff.TERMINAL else None
        if over is None and transfer_id in stream.open:
            self.num_late += 1  # it came twice
            return
        if entry is not None and entry.stream is None and over is None:
            self._open(transfer_id, stream, message.num_cached_pages)
            return
        until_s = self._clock.now() + self._pending_open_s
        is_early = entry is None and transfer_id not in self._ended
        if is_early and stream.wait_for_offer(transfer_id, message.num_cached_pages, until_s):
            self._given_up.pop(transfer_id, None)
            return
        reason = over or self._ended.get(transfer_id, "UNKNOWN_TRANSFER")
        self.num_late += 1
        await stream.answer(closed(transfer_id, reason))

    def _open(self, transfer_id: str, stream: ServedStream, num_cached_pages: int) -> None:
        self._entries[transfer_id].stream = stream
        stream.open.add(transfer_id)
        self._feed(transfer_id, handoff.Opened(num_cached_pages))

    def _on_close(self, stream: ServedStream, message: pb.CloseTransfer) -> None:
        state = OUTCOMES.get(message.outcome, TransferState.FAILED)
        ended = handoff.Ended(state, reason_of(message.reason, state.upper()), by_peer=True)
        if message.transfer_id in stream.open:
            self._feed(message.transfer_id, ended)
        elif stream.take(message.transfer_id) is not None:
            remember(self._given_up, message.transfer_id, ended)
        else:
            self.num_late += 1

    def _lose(self, stream: ServedStream) -> list[str]:
        """The stream died: its readers and all its transfers end. Returns those that had not ended."""
        self._streams.discard(stream)
        stream.source.drop_reader(stream.token)
        lost = [t for t in stream.open if self._entries[t].transfer.state not in handoff.TERMINAL]
        for transfer_id in list(stream.open):
            self._feed(transfer_id, handoff.Ended(TransferState.FAILED, "PEER_LOST", by_peer=True))
        return sorted(lost)

    # ---- the table --------------------------------------------------------------------------------------------------

    def _feed(self, transfer_id: str, event: handoff.SourceEvent) -> None:
        """Gives one transfer an event and carries the actions out."""
        if (entry := self._entries.get(transfer_id)) is None:
            self.num_late += 1
            return
        late = entry.transfer.num_late
        entry.transfer, actions = handoff.on_source(entry.transfer, event, self._clock.now())
        self.num_late += entry.transfer.num_late - late
        for action in actions:
            self._carry_out(transfer_id, entry, action)

    def _carry_out(self, transfer_id: str, entry: _Entry, action: handoff.SourceAction) -> None:
        match action:
            case handoff.ReportOpened():
                self._listener.on_opened(transfer_id)
            case handoff.Announce():
                assert entry.stream is not None
                entry.stream.source.publish(transfer_id, entry.stream.token, action.pages)
                pages = [
                    pb.SourcePage(page_id=p.page_id, generation=p.generation, checksum=p.checksum) for p in action.pages
                ]
                watermark = pb.Watermark(transfer_id=transfer_id, first_page=action.first_page, pages=pages)
                entry.stream.send(pb.ControlResponse(watermark=watermark))
            case handoff.SendManifest():
                assert entry.stream is not None
                entry.stream.send(pb.ControlResponse(manifest=manifest(transfer_id, action.manifest)))
            case handoff.SendClosed():
                assert entry.stream is not None
                entry.stream.send(closed(transfer_id, action.reason))
            case handoff.Withdraw():
                self._work.start(self._withdraw(transfer_id, entry.stream), f"withdrawal of {transfer_id}")
            case handoff.ReportEnded():
                del self._entries[transfer_id]
                remember(self._ended, transfer_id, action.reason)
                if entry.stream is not None:
                    entry.stream.open.discard(transfer_id)
                self._listener.on_ended(transfer_id, action.state, action.reason)

    async def _withdraw(self, transfer_id: str, stream: ServedStream | None) -> None:
        if stream is not None:  # else nothing of it was ever published
            await stream.source.withdraw(transfer_id)
        self._feed(transfer_id, handoff.Withdrawn())

    def _enqueue(self, transfer_id: str, work: tuple[int, tuple[PageGeneration, ...]] | handoff.Computed) -> None:
        """Keeps watermarks and the manifest in order while pages are hashed."""
        if (entry := self._entries.get(transfer_id)) is None:
            self.num_late += 1
            return
        entry.work.append(work)
        if not entry.working:
            entry.working = True
            self._work.start(self._catch_up(transfer_id, entry), f"watermarks of {transfer_id}")

    async def _catch_up(self, transfer_id: str, entry: _Entry) -> None:
        while entry.work:
            event: handoff.SourceEvent
            match entry.work.popleft():
                case handoff.Computed() as computed:
                    event = computed
                case _ if entry.transfer.state in handoff.TERMINAL:
                    self.num_late += 1
                    continue
                case (first_page, pages):
                    event = handoff.PagesFinal(first_page, await self._checksums.refs(pages))
            if self._entries.get(transfer_id) is entry:
                self._feed(transfer_id, event)
            else:  # it ended meanwhile, and the id may be another transfer's
                self.num_late += 1
        entry.working = False

    async def _sweep_forever(self) -> None:
        while True:
            await self._clock.sleep(min(self._lease_s / 5, 1.0))
            self.sweep()

    def sweep(self) -> None:
        """Ends every transfer whose lease ran out and forgets every open that waited too long."""
        for transfer_id in list(self._entries):
            self._feed(transfer_id, handoff.Tick())
        now = self._clock.now()
        for stream in self._streams:
            for transfer_id in stream.take_overdue(now):
                stream.send(closed(transfer_id, "UNKNOWN_TRANSFER"))
                self.num_late += 1


def _log_failure(error: PdserveError) -> None:
    log.error("KV transfer server: %s (%s)", error.message, error.reason)
