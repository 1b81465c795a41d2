"""Frames: what is encoded is decoded, and nothing else is; no input makes the decoder allocate beyond its limits."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdserve.core.errors import TransferError
from pdserve.kvtransfer import wire
from pdserve.kvtransfer.transport import SourcePageRef

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
REFS = st.lists(st.builds(SourcePageRef, U32, U32, U64), min_size=1, max_size=20)
GET = wire.encode_get("t", [SourcePageRef(1, 2, 3)])[: wire.HEADER_BYTES]


@given(st.text(min_size=1, max_size=30), REFS)
def test_an_ask_comes_back_whole(transfer_id: str, refs: list[SourcePageRef]) -> None:
    raw = wire.encode_get(transfer_id, refs)
    header = wire.decode_header(raw[: wire.HEADER_BYTES])
    assert isinstance(header, wire.GetHeader)
    assert wire.HEADER_BYTES + header.body_bytes == len(raw)
    body = wire.decode_get_body(header, raw[wire.HEADER_BYTES :])
    assert body == (transfer_id, [(r.page_id, r.generation) for r in refs])


@given(U32, U32, U64, U32, st.binary(min_size=16, max_size=16), st.text(max_size=80))
def test_headers_come_back_whole(a: int, b: int, c: int, d: int, token: bytes, text: str) -> None:
    page = wire.PageHeader(a, b, c, d)
    assert wire.decode_header(wire.encode_page(page)) == page
    assert wire.decode_header(wire.encode_end(a)) == wire.EndFrame(a)
    memory = wire.MemoryFrame(a, c)
    assert wire.decode_header(wire.encode_memory(memory)) == memory
    assert wire.decode_header(wire.encode_hello(token, b"d" * 32)) == wire.HelloFrame(token, b"d" * 16)
    err = wire.decode_header(wire.encode_err(wire.ErrCode.ERR_STALE, text))
    assert isinstance(err, wire.ErrFrame)
    assert text.startswith(err.text) or "\0" in text


@given(st.binary(max_size=80) | st.binary(min_size=56, max_size=56).map(lambda b: GET[:8] + b))
@example(b"")
@example(GET)
def test_garbage_is_a_typed_error_or_a_frame_within_the_limits(raw: bytes) -> None:
    try:
        frame = wire.decode_header(raw)
    except TransferError as e:
        assert e.reason == "BAD_FRAME"
        return
    assert len(raw) == wire.HEADER_BYTES
    if isinstance(frame, wire.GetHeader):
        assert frame.body_bytes <= wire.MAX_TRANSFER_ID_BYTES + 8 * wire.MAX_GET_PAGES


@given(st.integers(0, wire.HEADER_BYTES - 1), st.integers(1, 255))
def test_a_flipped_byte_outside_the_fields_is_refused(at: int, flip: int) -> None:
    raw = bytearray(GET)
    raw[at] ^= flip
    if 8 <= at < 16:  # the two numbers themselves: range is checked, see above
        return
    with pytest.raises(TransferError):
        frame = wire.decode_header(raw)
        # a flip of `kind` may name another frame; then its fields, read from a GET, are other fields
        assert not isinstance(frame, wire.GetHeader)
        raise TransferError("another kind")


@given(st.binary(max_size=64))
def test_a_body_of_the_wrong_length_or_text_is_refused(body: bytes) -> None:
    header = wire.GetHeader(num_pages=2, id_bytes=3)
    try:
        transfer_id, asks = wire.decode_get_body(header, body)
    except TransferError as e:
        assert e.reason == "BAD_FRAME"
    else:
        assert len(body) == 19 and len(transfer_id.encode()) == 3 and len(asks) == 2
