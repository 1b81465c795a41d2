"""What decode asks of a prefill worker's welcome before it pulls anything from it."""

from __future__ import annotations

from collections.abc import Collection

from pdserve.core.errors import TransferError
from pdserve.core.layout import KVLayout
from pdserve.kvtransfer.negotiation import BEFORE_NEGOTIATION, OLDEST_VERSION, PROTOCOL_VERSION
from pdserve.kvtransfer.wire import TOKEN_BYTES
from pdserve.v1 import kvtransfer_pb2 as pb

INTEGRITY_MODES = ("host", "none")


def check(welcome: pb.TransferWelcome, worker_id: str, integrity: str) -> None:
    """Refuses a welcome that makes no sense, or promises less than this worker wants.

    Args:
        welcome: Prefill's first message.
        worker_id: Prefill's name.
        integrity: See `TransferClient`.

    Raises:
        TransferError: PROTOCOL_VERSION, BAD_WELCOME or INTEGRITY.
    """
    if not OLDEST_VERSION <= welcome.protocol_version <= PROTOCOL_VERSION:
        raise TransferError(
            f"prefill worker {worker_id} wants to speak version {welcome.protocol_version}; versions "
            f"{OLDEST_VERSION} to {PROTOCOL_VERSION} are spoken here",
            reason="PROTOCOL_VERSION",
            status="FAILED_PRECONDITION",
        )
    if welcome.integrity not in INTEGRITY_MODES or not welcome.lease_ms or len(welcome.data_token) != TOKEN_BYTES:
        sizes = f"lease of {welcome.lease_ms} ms, token of {len(welcome.data_token)} bytes"
        raise TransferError(f"prefill offers integrity {welcome.integrity!r}, {sizes}", reason="BAD_WELCOME")
    if integrity == "host" and welcome.integrity != "host":
        raise TransferError(
            f"prefill worker {worker_id} sends no page checksums and this worker wants them: start both with the same "
            "--kv-integrity",
            reason="INTEGRITY",
            status="FAILED_PRECONDITION",
        )


def plane_of(welcome: pb.TransferWelcome, worker_id: str, sinks: Collection[str]) -> str:
    """The data plane that prefill chose.

    Args:
        welcome: Prefill's first message.
        worker_id: Prefill's name.
        sinks: Planes of this worker.

    Raises:
        TransferError: TRANSPORT: it is none of them.
    """
    name = welcome.transport or BEFORE_NEGOTIATION
    if name not in sinks:
        raise TransferError(
            f"prefill worker {worker_id} sends pages over {name[:32]!r}; this worker has {', '.join(sinks)}",
            reason="TRANSPORT",
            status="FAILED_PRECONDITION",
        )
    return name


def first_heads_of(welcome: pb.TransferWelcome, worker_id: str, layout: KVLayout) -> tuple[int, ...]:
    """Which of our KV heads are the first ones of the source's range, per layer group; empty: it has all heads.

    Args:
        welcome: Prefill's first message.
        worker_id: Prefill's name.
        layout: Of its pages.

    Raises:
        TransferError: BAD_WELCOME: not one for each group.
    """
    if (num := len(welcome.first_kv_heads)) not in (0, len(layout.groups)):
        raise TransferError(
            f"prefill worker {worker_id} names {num} first KV heads for {len(layout.groups)} layer groups",
            reason="BAD_WELCOME",
        )
    return tuple(welcome.first_kv_heads)
