"""The control stream's messages made of the hand-off's values, and what its end means."""

from __future__ import annotations

import grpc
import grpc.aio

from pdserve.core.errors import TransferError
from pdserve.core.grpc_server import error_from_rpc
from pdserve.kvtransfer import handoff
from pdserve.kvtransfer.handoff import TransferState
from pdserve.v1 import kvtransfer_pb2 as pb

OUTCOMES = {
    pb.TRANSFER_OUTCOME_COMPLETE: TransferState.COMPLETE,
    pb.TRANSFER_OUTCOME_ABORTED: TransferState.ABORTED,
    pb.TRANSFER_OUTCOME_FAILED: TransferState.FAILED,
}
_MAX_REASON_CHARS = 64


def reason_of(told: str, otherwise: str) -> str:
    """A peer's reason, which becomes a label of metrics and is remembered: one that is no short word is replaced."""
    short = len(told) <= _MAX_REASON_CHARS and told.isascii()
    return told if short and told.isidentifier() and told.isupper() else otherwise


def closed(transfer_id: str, reason: str) -> pb.ControlResponse:
    """The transfer ended on prefill's side."""
    return pb.ControlResponse(closed=pb.TransferClosed(transfer_id=transfer_id, reason=reason))


def manifest(transfer_id: str, facts: handoff.ManifestFacts) -> pb.Manifest:
    """What prefill says of a computed prompt."""
    return pb.Manifest(
        transfer_id=transfer_id,
        num_pages=facts.num_pages,
        num_tokens=facts.num_tokens,
        token_id=facts.token_id,
        index=facts.index,
        prompt_digest=facts.prompt_digest,
        finished=facts.finished,
    )


def stream_error(worker_id: str, address: str, error: grpc.aio.AioRpcError) -> TransferError:
    """How decode's end of a control stream died.

    Args:
        worker_id: Of the prefill worker.
        address: Its host:port.
        error: What gRPC says.

    Returns:
        With prefill's own reason ("REASON: sentence") when it refused; anything else is a lost peer.
    """
    details = error.details() or ""
    if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
        told, _, sentence = details.partition(": ")
        if (reason := reason_of(told, "PAIR_REFUSED")) != told:
            sentence = details
        return TransferError(
            f"prefill worker {worker_id} refused the pair: {sentence}", reason=reason, status="FAILED_PRECONDITION"
        )
    told = error_from_rpc(error).reason
    reason = told if told in ("TLS_FAILED", "NOT_A_MEMBER") else "PEER_LOST"
    return TransferError(f"lost prefill worker {worker_id} at {address}: {error.code().name} {details}", reason=reason)


def facts_of(manifest: pb.Manifest) -> handoff.ManifestFacts:
    """What prefill says of a computed prompt."""
    m = manifest
    return handoff.ManifestFacts(m.num_pages, m.num_tokens, m.token_id, m.index, m.prompt_digest, m.finished)
