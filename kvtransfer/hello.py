"""What prefill asks of a decode worker's hello before it serves it anything."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.core.errors import ConfigError, TransferError
from pdserve.core.layout import KVLayout, incompatibility
from pdserve.kvtransfer.convert import HeadShard, range_fault
from pdserve.v1 import kvtransfer_pb2 as pb


def check(
    hello: pb.TransferHello,
    incarnation: str,
    identity_digest: bytes,
    layout: KVLayout,
    first_kv_heads: tuple[int, ...] = (),
) -> None:
    """Refuses a pair that does not fit; the version and the data plane are `negotiation`'s.

    Args:
        hello: Decode's first message.
        incarnation: This process's start, as hex.
        identity_digest: This worker's.
        layout: This worker's.
        first_kv_heads: Per layer group, decode's KV head that is this worker's first one; empty: it has all heads.

    Raises:
        TransferError: INCARNATION, IDENTITY, LAYOUT or BAD_LAYOUT.
    """
    if hello.expected_incarnation != incarnation:
        raise _refused("INCARNATION", f"this process is {incarnation}, not {hello.expected_incarnation:.64}")
    if hello.identity_digest != identity_digest:
        raise _refused("IDENTITY", "model, weights, --quantization or attention config differ: start both alike")
    theirs = KVLayout.from_json(hello.layout)
    if first_kv_heads:
        fault = range_fault(HeadShard(layout, first_kv_heads), theirs, hello.kv_converts)
        reason = None if fault is None else f"as the decode worker sees it, {fault}"
    else:
        reason = incompatibility(layout, theirs, hello.kv_converts)
    if reason:
        raise _refused("LAYOUT", reason)


def own_first_heads(first_kv_heads: Sequence[int], layout: KVLayout) -> tuple[int, ...]:
    """Which heads this worker says it has: one number for each layer group of its layout, or none at all.

    Raises:
        ConfigError: Another number of them.
    """
    if len(first_kv_heads) not in (0, len(layout.groups)):
        raise ConfigError(f"first_kv_heads: {len(first_kv_heads)} heads for {len(layout.groups)} layer groups")
    return tuple(first_kv_heads)


def _refused(reason: str, message: str) -> TransferError:
    return TransferError(message, reason=reason, status="FAILED_PRECONDITION")
