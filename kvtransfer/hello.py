"""What prefill asks of a decode worker's hello before it serves it anything."""

from __future__ import annotations

from pdserve.core.errors import TransferError
from pdserve.core.layout import KVLayout, incompatibility
from pdserve.v1 import kvtransfer_pb2 as pb


def check(hello: pb.TransferHello, incarnation: str, identity_digest: bytes, layout: KVLayout) -> None:
    """Refuses a pair that does not fit; the version and the data plane are `negotiation`'s.

    Args:
        hello: Decode's first message.
        incarnation: This process's start, as hex.
        identity_digest: This worker's.
        layout: This worker's.

    Raises:
        TransferError: INCARNATION, IDENTITY, LAYOUT or BAD_LAYOUT.
    """
    if hello.expected_incarnation != incarnation:
        raise _refused("INCARNATION", f"this process is {incarnation}, not {hello.expected_incarnation:.64}")
    if hello.identity_digest != identity_digest:
        raise _refused("IDENTITY", "model, weights, --quantization or attention config differ: start both alike")
    if reason := incompatibility(layout, KVLayout.from_json(hello.layout), hello.kv_converts):
        raise _refused("LAYOUT", reason)


def _refused(reason: str, message: str) -> TransferError:
    return TransferError(message, reason=reason, status="FAILED_PRECONDITION")
