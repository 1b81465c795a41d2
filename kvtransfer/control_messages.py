"""The control stream's messages made of the hand-off's values."""

from __future__ import annotations

from pdserve.kvtransfer import handoff
from pdserve.kvtransfer.handoff import TransferState
from pdserve.v1 import kvtransfer_pb2 as pb

OUTCOMES = {
    pb.TRANSFER_OUTCOME_COMPLETE: TransferState.COMPLETE,
    pb.TRANSFER_OUTCOME_ABORTED: TransferState.ABORTED,
    pb.TRANSFER_OUTCOME_FAILED: TransferState.FAILED,
}


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
