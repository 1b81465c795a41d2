"""The frozen prefill worker: serves the pages of one prompt to whoever opens it."""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import xxhash

from . import frames
from .messages import message, read


class FrozenPrefill:
    """Control stream and data plane.

    Args:
        pages: Bytes of the prompt's pages.
        identity_digest: Of its model.
        manifest: Fields of the manifest but the transfer's id.
        layout: JSON of its layout.
    """

    def __init__(self, pages: Sequence[bytes], identity_digest: bytes, manifest: dict[str, Any], layout: str) -> None:
        self._pages, self._digest, self._manifest, self._layout = pages, identity_digest, manifest, layout
        self._token = secrets.token_bytes(16)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.hello: Any = None
        self.closed = asyncio.Event()
        self.outcome: Any = None
        threading.Thread(target=self._serve_pages, daemon=True).start()

    def close(self) -> None:
        """Ends the data plane."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    # ---- control stream

    async def control(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """The handler of the RPC."""
        await context.send_initial_metadata(())
        async for raw in requests:
            request = read("ControlRequest", raw)
            match request.WhichOneof("message"):
                case "hello":
                    self.hello = request.hello
                    if request.hello.protocol_version != 1:
                        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "PROTOCOL_VERSION: version 1 here")
                    yield self._answer(welcome=message("TransferWelcome", **self._welcome()))
                case "open":
                    transfer_id = request.open.transfer_id
                    for at in range(0, len(self._pages), 2):
                        pages = [self._page(i) for i in range(at, min(at + 2, len(self._pages)))]
                        watermark = message("Watermark", transfer_id=transfer_id, first_page=at, pages=pages)
                        yield self._answer(watermark=watermark)
                    yield self._answer(manifest=message("Manifest", transfer_id=transfer_id, **self._manifest))
                case "close":
                    self.outcome = request.close.outcome
                    self.closed.set()

    def _answer(self, **fields: Any) -> bytes:
        return bytes(message("ControlResponse", **fields).SerializeToString())

    def _welcome(self) -> dict[str, Any]:
        return {
            "protocol_version": 1,
            "incarnation": "frozen",
            "data_address": f"127.0.0.1:{self._listener.getsockname()[1]}",
            "data_token": self._token,
            "lease_ms": 10_000,
            "integrity": "host",
            "layout": self._layout,
        }

    def _page(self, position: int) -> Any:
        checksum = xxhash.xxh3_64_intdigest(self._pages[position])
        return message("SourcePage", page_id=100 + position, generation=7, checksum=checksum)

    # ---- data plane

    def _serve_pages(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve_one, args=(sock,), daemon=True).start()

    def _serve_one(self, sock: socket.socket) -> None:
        with sock:
            try:
                kind, fields = frames.header(frames.receive(sock, 64))
                expected = (self._token, self._digest[:16])
                if kind != frames.HELLO or struct.unpack_from("<16s16s", fields) != expected:
                    return
                while True:
                    self._answer_ask(sock)
            except OSError:
                return

    def _answer_ask(self, sock: socket.socket) -> None:
        kind, fields = frames.header(frames.receive(sock, 64))
        assert kind == frames.GET
        num_pages, id_bytes = struct.unpack_from("<II", fields)
        body = frames.receive(sock, id_bytes + 8 * num_pages)
        for page_id, generation in struct.iter_unpack("<II", body[id_bytes:]):
            assert generation == 7
            page = self._pages[page_id - 100]
            checksum = xxhash.xxh3_64_intdigest(page)
            sock.sendall(frames.frame(frames.PAGE, "IIQI", page_id, generation, checksum, len(page)) + page)
        sock.sendall(frames.frame(frames.END, "I", num_pages))


@asynccontextmanager
async def frozen_prefill(
    pages: Sequence[bytes], identity_digest: bytes, manifest: dict[str, Any], layout: str
) -> AsyncIterator[tuple[FrozenPrefill, str]]:
    """Starts one; gives it and its gRPC address."""
    prefill = FrozenPrefill(pages, identity_digest, manifest, layout)
    handler = grpc.method_handlers_generic_handler(
        "pdserve.v1.KvTransfer", {"Control": grpc.stream_stream_rpc_method_handler(prefill.control)}
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield prefill, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
        prefill.close()
