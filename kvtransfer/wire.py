"""The tcp data plane's frames: a fixed 64-byte little-endian header, then at most one bounded body.

| frame | from | header fields after the common 8 bytes | body |
| --- | --- | --- | --- |
| HELLO | sink | token 16s, identity digest prefix 16s | - |
| GET | sink | number of pages u32, length of transfer id u32 | transfer id, (page_id u32, generation u32) per page |
| PAGE | source | page_id u32, generation u32, checksum u64, length u32 | the raw bytes of the page |
| END | source | number of pages u32 | - |
| ERR | source | code u32, text 48s (UTF-8, zero-padded) | - |
| MEMORY | source | number of pages u32, bytes of a page u64 | - (two descriptors come with it, see `shm_source`) |

Common: magic u32, version u8, kind u8, reserved u16. Bytes that a frame does not use are zero. The incarnation is not
repeated: a token is minted for one control stream, whose hello named both incarnations. Decoding never allocates more
than the limits below; everything else is a `TransferError` with reason BAD_FRAME.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from pdserve.core.errors import TransferError
from pdserve.kvtransfer.transport import SourcePageRef

VERSION = 1
HEADER_BYTES = 64
TOKEN_BYTES = 16
DIGEST_PREFIX_BYTES = 16
MAX_TRANSFER_ID_BYTES = 128
MAX_GET_PAGES = 1024
_MAGIC = 0x564B4450  # "PDKV"
_COMMON = struct.Struct("<IBBH")
_PAGE_ASK = struct.Struct("<II")


class Kind(IntEnum):
    """Kinds of frames."""

    HELLO = 1
    GET = 2
    PAGE = 3
    END = 4
    ERR = 5
    MEMORY = 6


class ErrCode(IntEnum):
    """Why the source refuses; the names are reasons of `TransferError`."""

    ERR_STALE = 1
    ERR_BAD_FRAME = 2
    ERR_BUSY = 3
    ERR_TLS = 4


@dataclass(frozen=True, slots=True)
class HelloFrame:
    """Who asks."""

    token: bytes
    digest_prefix: bytes


@dataclass(frozen=True, slots=True)
class GetHeader:
    """An ask; its body follows."""

    num_pages: int
    id_bytes: int

    @property
    def body_bytes(self) -> int:
        """Length of the body, at most MAX_TRANSFER_ID_BYTES + 8 * MAX_GET_PAGES."""
        return self.id_bytes + _PAGE_ASK.size * self.num_pages


@dataclass(frozen=True, slots=True)
class PageHeader:
    """One page; `length` raw bytes follow."""

    page_id: int
    generation: int
    checksum: int
    length: int


@dataclass(frozen=True, slots=True)
class EndFrame:
    """All pages of the ask were sent."""

    num_pages: int


@dataclass(frozen=True, slots=True)
class ErrFrame:
    """The ask is refused; nothing follows."""

    code: ErrCode
    text: str


@dataclass(frozen=True, slots=True)
class MemoryFrame:
    """The pool that the descriptors beside it show."""

    num_pages: int
    page_bytes: int


Frame = HelloFrame | GetHeader | PageHeader | EndFrame | ErrFrame | MemoryFrame

_FIELDS = {
    Kind.HELLO: struct.Struct("<16s16s24x"),
    Kind.GET: struct.Struct("<II48x"),
    Kind.PAGE: struct.Struct("<IIQI36x"),
    Kind.END: struct.Struct("<I52x"),
    Kind.ERR: struct.Struct("<I48s4x"),
    Kind.MEMORY: struct.Struct("<IQ44x"),
}
_WHOLE = {kind: struct.Struct(_COMMON.format + fields.format[1:]) for kind, fields in _FIELDS.items()}


def encode_hello(token: bytes, identity_digest: bytes) -> bytes:
    """HELLO frame; `token` has 16 bytes, of the digest the first 16 are sent."""
    return _frame(Kind.HELLO, token, identity_digest[:DIGEST_PREFIX_BYTES])


def encode_get(transfer_id: str, pages: Sequence[SourcePageRef]) -> bytes:
    """GET frame with its body, for 1..MAX_GET_PAGES pages."""
    raw = transfer_id.encode()
    body = b"".join(_PAGE_ASK.pack(p.page_id, p.generation) for p in pages)
    return _frame(Kind.GET, len(pages), len(raw)) + raw + body


def encode_page(page: PageHeader) -> bytes:
    """PAGE header; the raw bytes follow it."""
    return _frame(Kind.PAGE, page.page_id, page.generation, page.checksum, page.length)


def encode_end(num_pages: int) -> bytes:
    """END frame."""
    return _frame(Kind.END, num_pages)


def encode_err(code: ErrCode, text: str) -> bytes:
    """ERR frame; a long text is cut."""
    return _frame(Kind.ERR, code, text.encode()[:48].decode(errors="ignore").encode())


def encode_memory(memory: MemoryFrame) -> bytes:
    """MEMORY frame."""
    return _frame(Kind.MEMORY, memory.num_pages, memory.page_bytes)


def decode_header(raw: bytes | bytearray | memoryview) -> Frame:
    """Reads one header.

    Args:
        raw: HEADER_BYTES bytes.

    Raises:
        TransferError: BAD_FRAME: not a frame of this version, or a field out of its range.
    """
    if len(raw) != HEADER_BYTES:
        raise _bad(f"header of {len(raw)} bytes")
    magic, version, kind, reserved = _COMMON.unpack_from(raw)
    if magic != _MAGIC or version != VERSION or reserved != 0:
        raise _bad(f"magic {magic:#x}, version {version}")
    if kind not in _FIELDS:
        raise _bad(f"kind {kind}")
    values = _FIELDS[Kind(kind)].unpack_from(raw, _COMMON.size)
    frame = _build(Kind(kind), values)
    if _frame(Kind(kind), *values) != bytes(raw):
        raise _bad("unused bytes are not zero")
    return frame


def decode_get_body(header: GetHeader, body: bytes | bytearray | memoryview) -> tuple[str, list[tuple[int, int]]]:
    """Reads the body of a GET.

    Returns:
        The transfer id and (page_id, generation) per page.

    Raises:
        TransferError: BAD_FRAME.
    """
    if len(body) != header.body_bytes:
        raise _bad(f"body of {len(body)} bytes, not {header.body_bytes}")
    try:
        transfer_id = bytes(body[: header.id_bytes]).decode()
    except UnicodeDecodeError:
        raise _bad("transfer id is not UTF-8") from None
    return transfer_id, list(_PAGE_ASK.iter_unpack(body[header.id_bytes :]))


def _build(kind: Kind, values: tuple[int | bytes, ...]) -> Frame:
    match kind, values:
        case Kind.HELLO, (bytes(token), bytes(prefix)):
            return HelloFrame(token, prefix)
        case Kind.GET, (int(num_pages), int(id_bytes)):
            if not 1 <= num_pages <= MAX_GET_PAGES or not 1 <= id_bytes <= MAX_TRANSFER_ID_BYTES:
                raise _bad(f"GET of {num_pages} pages, transfer id of {id_bytes} bytes")
            return GetHeader(num_pages, id_bytes)
        case Kind.PAGE, (int(page_id), int(generation), int(checksum), int(length)):
            return PageHeader(page_id, generation, checksum, length)
        case Kind.END, (int(num_pages),):
            return EndFrame(num_pages)
        case Kind.ERR, (int(code), bytes(text)):
            try:
                return ErrFrame(ErrCode(code), text.rstrip(b"\0").decode())
            except ValueError:
                raise _bad(f"ERR {code}") from None
        case Kind.MEMORY, (int(num_pages), int(page_bytes)):
            return MemoryFrame(num_pages, page_bytes)
    raise AssertionError(kind)


def _frame(kind: Kind, *values: int | bytes) -> bytes:
    return _WHOLE[kind].pack(_MAGIC, VERSION, kind, 0, *values)


def _bad(what: str) -> TransferError:
    return TransferError(f"the data plane peer sent something that is not a frame: {what}", reason="BAD_FRAME")
