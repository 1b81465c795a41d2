"""The frozen decode worker: opens one transfer, pulls what is announced, checks it, and closes it."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import grpc.aio
import xxhash

from . import frames
from .messages import METHOD, message, read


def pull(address: str, token: bytes, digest: bytes, transfer_id: str, pages: list[Any], page_bytes: int) -> list[bytes]:
    """Pulls pages over one connection."""
    host, _, port = address.rpartition(":")
    name = transfer_id.encode()
    asks = b"".join(struct.pack("<II", p.page_id, p.generation) for p in pages)
    received = []
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(frames.frame(frames.HELLO, "16s16s", token, digest[:16]))
        sock.sendall(frames.frame(frames.GET, "II", len(pages), len(name)) + name + asks)
        for page in pages:
            kind, fields = frames.header(frames.receive(sock, 64))
            assert kind == frames.PAGE, kind
            assert struct.unpack_from("<IIQI", fields) == (page.page_id, page.generation, page.checksum, page_bytes)
            received.append(frames.receive(sock, page_bytes))
            assert xxhash.xxh3_64_intdigest(received[-1]) == page.checksum
        kind, fields = frames.header(frames.receive(sock, 64))
        assert (kind, struct.unpack_from("<I", fields)) == (frames.END, (len(pages),))
    return received


async def fetch(address: str, transfer_id: str, *, hello: dict[str, Any], page_bytes: int) -> tuple[list[bytes], Any]:
    """One whole transfer from a prefill worker.

    Args:
        address: Its gRPC endpoint.
        transfer_id: What to open; all pages are wanted.
        hello: Fields of the hello.
        page_bytes: Bytes of a page.

    Returns:
        The pages in prompt order, and the manifest.
    """
    pages, known = list[bytes](), list[Any]()
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream(METHOD)()
        await call.write(message("ControlRequest", hello=message("TransferHello", **hello)).SerializeToString())
        opening = message("ControlRequest", open=message("OpenTransfer", transfer_id=transfer_id))
        await call.write(opening.SerializeToString())
        welcome = None
        while True:
            raw = await asyncio.wait_for(call.read(), 10)
            assert isinstance(raw, bytes), "prefill ended the stream"
            answer = read("ControlResponse", raw)
            match answer.WhichOneof("message"):
                case "welcome":
                    welcome = answer.welcome
                    assert (
                        welcome.protocol_version == 1 and welcome.integrity == "host" and len(welcome.data_token) == 16
                    )
                case "watermark":
                    assert answer.watermark.first_page == len(known)
                    known += answer.watermark.pages
                    ask = (welcome.data_address, welcome.data_token, hello["identity_digest"], transfer_id)
                    pages += await asyncio.to_thread(pull, *ask, list(answer.watermark.pages), page_bytes)
                case "manifest":
                    assert answer.manifest.num_pages == len(pages)
                    closing = message("CloseTransfer", transfer_id=transfer_id, outcome=1)
                    await call.write(message("ControlRequest", close=closing).SerializeToString())
                    await call.done_writing()
                    while isinstance(await asyncio.wait_for(call.read(), 10), bytes):
                        pass
                    return pages, answer.manifest
                case "closed":
                    raise AssertionError(f"prefill closed the transfer: {answer.closed.reason}")
