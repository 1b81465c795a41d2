"""The hand-off of KV pages as data: legal states, and what each side does on each event. No clock, no I/O, no tasks.

Both sides are values: `on_source(transfer, event, now)` and `on_sink(transfer, event, now)` return the next value and
the actions that the caller must carry out in order. What they guard:

| invariant | how |
| --- | --- |
| a page is read only while its lease lives | the end brings `Withdraw`; `ReportEnded` (then free) after `Withdrawn` |
| a destination is freed only when no writer can reach it | `Resolve` (then free) never comes while a pull runs |
| terminal states are sticky, each end is told once | every event is checked against the tables below |
| late messages harm nothing | counted in `num_late`, dropped |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from pdserve.kvtransfer.transport import SourcePageRef


class TransferState(StrEnum):
    """Where a transfer is, on either side."""

    INIT = "init"
    READY = "ready"
    PULLING = "pulling"
    VERIFYING = "verifying"
    COMPLETE = "complete"
    FAILED = "failed"
    ABORTED = "aborted"
    EXPIRED = "expired"


T = TransferState
TERMINAL = frozenset({T.COMPLETE, T.FAILED, T.ABORTED, T.EXPIRED})

# Source: INIT offered; READY opened by decode, watermarks flow; VERIFYING the manifest is out, the lease runs.
SOURCE_TRANSITIONS: Mapping[TransferState, frozenset[TransferState]] = {
    T.INIT: frozenset({T.READY}) | TERMINAL,
    T.READY: frozenset({T.VERIFYING}) | TERMINAL,
    T.VERIFYING: TERMINAL,
    **{state: frozenset() for state in TERMINAL},
}
# Sink: INIT asked; READY pages are known; PULLING a first pull began; VERIFYING the manifest came, the rest is pulled.
SINK_TRANSITIONS: Mapping[TransferState, frozenset[TransferState]] = {
    T.INIT: frozenset({T.READY, T.VERIFYING}) | TERMINAL,
    T.READY: frozenset({T.PULLING}) | TERMINAL,
    T.PULLING: frozenset({T.VERIFYING}) | TERMINAL,
    T.VERIFYING: TERMINAL,
    **{state: frozenset() for state in TERMINAL},
}


@dataclass(frozen=True, slots=True)
class ManifestFacts:
    """What prefill says of a computed prompt; see `Manifest` in kvtransfer.proto."""

    num_pages: int
    num_tokens: int
    token_id: int
    index: int
    prompt_digest: bytes
    finished: bool = False


# ---- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opened:
    """Source: decode has reserved its pages and wants all but the first `num_cached_pages`."""

    num_cached_pages: int


@dataclass(frozen=True, slots=True)
class PagesFinal:
    """Source: these pages are final and hashed. Sink: the watermark that says so."""

    first_page: int
    pages: tuple[SourcePageRef, ...]


@dataclass(frozen=True, slots=True)
class Computed:
    """Source: the prompt is computed, the lease starts. Sink: the manifest that says so."""

    manifest: ManifestFacts


@dataclass(frozen=True, slots=True)
class Ended:
    """The transfer ends: by the peer's message, by our owner, or because the control stream died.

    Attributes:
        state: A terminal state.
        reason: UPPER_SNAKE_CASE.
        by_peer: The peer knows already; it is not told again.
    """

    state: TransferState
    reason: str
    by_peer: bool = False


@dataclass(frozen=True, slots=True)
class Renewed:
    """Source: somebody who wants the pages is alive."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Source: time passed."""


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """Source: the data plane serves no page of the transfer and no read is in flight."""


@dataclass(frozen=True, slots=True)
class PullEnded:
    """Sink: the running pull has ended and writes nothing any more.

    Attributes:
        num_bytes: Bytes on the wire.
        error: UPPER_SNAKE_CASE; None when all its pages are there and verified.
    """

    num_bytes: int
    error: str | None = None


SourceEvent = Opened | PagesFinal | Computed | Ended | Renewed | Tick | Withdrawn
SinkEvent = PagesFinal | Computed | Ended | PullEnded


# ---- actions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReportOpened:
    """Source: tell the owner that the destination is reserved."""


@dataclass(frozen=True, slots=True)
class Announce:
    """Source: publish these pages to the data plane, then send the watermark."""

    first_page: int
    pages: tuple[SourcePageRef, ...]


@dataclass(frozen=True, slots=True)
class SendManifest:
    """Source: send the manifest."""

    manifest: ManifestFacts


@dataclass(frozen=True, slots=True)
class SendClosed:
    """Tell the peer that the transfer ended on this side."""

    state: TransferState
    reason: str


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Source: end all reads; feed `Withdrawn` when none is in flight."""


@dataclass(frozen=True, slots=True)
class ReportEnded:
    """Source: tell the owner; the pages may be freed."""

    state: TransferState
    reason: str


@dataclass(frozen=True, slots=True)
class Pull:
    """Sink: pull these pages into the destinations from `position` on; feed `PullEnded`.

    Attributes:
        position: Index within the prompt of the first of `pages`, counted in pages.
        pages: What to read.
    """

    position: int
    pages: tuple[SourcePageRef, ...]


@dataclass(frozen=True, slots=True)
class CancelPull:
    """Sink: end the running pull; feed `PullEnded` when it writes nothing any more."""


@dataclass(frozen=True, slots=True)
class Resolve:
    """Sink: tell the owner how it ended; the destinations are VALID (COMPLETE) or may be freed."""

    state: TransferState
    reason: str


SourceAction = ReportOpened | Announce | SendManifest | SendClosed | Withdraw | ReportEnded
SinkAction = Pull | CancelPull | SendClosed | Resolve


# ---- source ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SourceTransfer:
    """One transfer on the prefill side.

    Attributes:
        num_pages: Pages of the prompt.
        lease_s: Length of a lease.
        state: Where it is.
        reason: Why it ended.
        num_cached_pages: Leading pages that decode has; None until it opened the transfer.
        pages: Final pages from the prompt's start.
        manifest: Set when the prompt is computed.
        lease_expires_s: Set when the prompt is computed.
        withdrawn: No read is or will be in flight.
        num_late: Events dropped because they came too late or twice.
    """

    num_pages: int
    lease_s: float
    state: TransferState = T.INIT
    reason: str = ""
    num_cached_pages: int | None = None
    pages: tuple[SourcePageRef, ...] = ()
    manifest: ManifestFacts | None = None
    lease_expires_s: float | None = None
    withdrawn: bool = False
    num_late: int = 0

    @property
    def may_free_pages(self) -> bool:
        """True once no reader can reach the pages."""
        return self.state in TERMINAL and self.withdrawn


def on_source(transfer: SourceTransfer, event: SourceEvent, now: float) -> tuple[SourceTransfer, list[SourceAction]]:
    """Advances the prefill side of a transfer.

    Args:
        transfer: Where it is.
        event: What happened.
        now: Monotonic seconds.

    Returns:
        Where it is now, and what to do, in order.
    """
    if transfer.state in TERMINAL:
        if isinstance(event, Withdrawn) and not transfer.withdrawn:
            return replace(transfer, withdrawn=True), [ReportEnded(transfer.state, transfer.reason)]
        return _late(transfer), []
    match event:
        case Opened():
            return _source_opened(transfer, event)
        case PagesFinal():
            return _source_pages(transfer, event)
        case Computed():
            return _source_computed(transfer, event, now)
        case Renewed():
            if transfer.lease_expires_s is None:
                return transfer, []
            return replace(transfer, lease_expires_s=max(transfer.lease_expires_s, now + transfer.lease_s)), []
        case Tick():
            if transfer.lease_expires_s is None or now < transfer.lease_expires_s:
                return transfer, []
            return _source_end(transfer, Ended(T.EXPIRED, "LEASE_EXPIRED"))
        case Ended():
            return _source_end(transfer, event)
        case Withdrawn():
            return _late(transfer), []


def _source_opened(transfer: SourceTransfer, event: Opened) -> tuple[SourceTransfer, list[SourceAction]]:
    if transfer.num_cached_pages is not None:
        return _late(transfer), []
    if event.num_cached_pages > transfer.num_pages:
        return _source_end(transfer, Ended(T.FAILED, "BAD_OPEN"))
    actions: list[SourceAction] = [ReportOpened()]
    if pages := transfer.pages[event.num_cached_pages :]:
        actions.append(Announce(event.num_cached_pages, pages))
    transfer = _moved(SOURCE_TRANSITIONS, replace(transfer, num_cached_pages=event.num_cached_pages), T.READY)
    if transfer.manifest is not None:
        actions.append(SendManifest(transfer.manifest))
        transfer = _moved(SOURCE_TRANSITIONS, transfer, T.VERIFYING)
    return transfer, actions


def _source_pages(transfer: SourceTransfer, event: PagesFinal) -> tuple[SourceTransfer, list[SourceAction]]:
    """Pages come once each and in order; anything else means that the engine moved them: nothing of it is served."""
    end = event.first_page + len(event.pages)
    if event.first_page != len(transfer.pages) or end > transfer.num_pages or transfer.manifest is not None:
        return _source_end(transfer, Ended(T.FAILED, "PAGES_OUT_OF_ORDER"))
    transfer = replace(transfer, pages=transfer.pages + event.pages)
    if transfer.num_cached_pages is None or end <= transfer.num_cached_pages:
        return transfer, []
    first = max(event.first_page, transfer.num_cached_pages)
    return transfer, [Announce(first, event.pages[first - event.first_page :])]


def _source_computed(
    transfer: SourceTransfer, event: Computed, now: float
) -> tuple[SourceTransfer, list[SourceAction]]:
    if transfer.manifest is not None:
        return _late(transfer), []
    if not event.manifest.finished and len(transfer.pages) != transfer.num_pages:
        return _source_end(transfer, Ended(T.FAILED, "PAGES_MISSING"))
    transfer = replace(transfer, manifest=event.manifest, lease_expires_s=now + transfer.lease_s)
    if transfer.num_cached_pages is None:
        return transfer, []
    return _moved(SOURCE_TRANSITIONS, transfer, T.VERIFYING), [SendManifest(event.manifest)]


def _source_end(transfer: SourceTransfer, event: Ended) -> tuple[SourceTransfer, list[SourceAction]]:
    actions: list[SourceAction] = []
    if transfer.num_cached_pages is not None and not event.by_peer:
        actions.append(SendClosed(event.state, event.reason))
    actions.append(Withdraw())
    return _moved(SOURCE_TRANSITIONS, replace(transfer, reason=event.reason), event.state), actions


# ---- sink -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SinkTransfer:
    """One transfer on the decode side.

    Attributes:
        num_pages: Pages of the prompt at the source, cached ones included.
        num_cached_pages: Leading ones of them of which every token is here already.
        num_tokens: Tokens that the manifest must name.
        prompt_digest: Digest that the manifest must carry.
        state: Where it is.
        reason: Why it ended.
        known: Source pages announced, from `num_cached_pages` on.
        num_asked: Of these, pages given to pulls.
        pulling: A pull may write destination pages.
        told: The peer knows that it ended, or need not know.
        manifest: What prefill said.
        num_bytes: Bytes on the wire so far.
        first_pull_s: When the first pull began.
        last_pull_s: When the last pull ended.
        manifest_s: When the manifest came.
        num_late: Events dropped because they came too late or twice.
    """

    num_pages: int
    num_cached_pages: int
    num_tokens: int
    prompt_digest: bytes
    state: TransferState = T.INIT
    reason: str = ""
    known: tuple[SourcePageRef, ...] = ()
    num_asked: int = 0
    pulling: bool = False
    told: bool = False
    manifest: ManifestFacts | None = None
    num_bytes: int = 0
    first_pull_s: float | None = None
    last_pull_s: float | None = None
    manifest_s: float | None = None
    num_late: int = 0

    @property
    def may_free_pages(self) -> bool:
        """True once no writer can reach the destinations."""
        return self.state in TERMINAL and not self.pulling


def on_sink(transfer: SinkTransfer, event: SinkEvent, now: float) -> tuple[SinkTransfer, list[SinkAction]]:
    """Advances the decode side of a transfer; arguments and result as in `on_source`."""
    if isinstance(event, PullEnded):
        return _sink_pull_ended(transfer, event, now)
    if transfer.state in TERMINAL:
        return _late(transfer), []
    match event:
        case PagesFinal():
            return _sink_pages(transfer, event, now)
        case Computed():
            return _sink_manifest(transfer, event, now)
        case Ended():
            return _sink_end(transfer, event)


def _sink_pages(transfer: SinkTransfer, event: PagesFinal, now: float) -> tuple[SinkTransfer, list[SinkAction]]:
    at = transfer.num_cached_pages + len(transfer.known)
    end = event.first_page + len(event.pages)
    if end <= at:
        return _late(transfer), []
    if event.first_page != at or end > transfer.num_pages:
        return _sink_end(transfer, Ended(T.FAILED, "BAD_WATERMARK"))
    transfer = replace(transfer, known=transfer.known + event.pages)
    if transfer.state is T.INIT:
        transfer = _moved(SINK_TRANSITIONS, transfer, T.READY)
    return _sink_next(transfer, now)


def _sink_manifest(transfer: SinkTransfer, event: Computed, now: float) -> tuple[SinkTransfer, list[SinkAction]]:
    if transfer.manifest is not None:
        return _late(transfer), []
    m = event.manifest
    transfer = replace(transfer, manifest=m, manifest_s=now)
    if (m.num_pages, m.num_tokens, m.prompt_digest) != (
        transfer.num_pages,
        transfer.num_tokens,
        transfer.prompt_digest,
    ):
        return _sink_end(transfer, Ended(T.FAILED, "MANIFEST_MISMATCH"))
    if m.finished:
        return _sink_end(transfer, Ended(T.COMPLETE, "FINISHED"))
    if transfer.num_cached_pages + len(transfer.known) != transfer.num_pages:
        return _sink_end(transfer, Ended(T.FAILED, "PAGES_MISSING"))
    return _sink_next(_moved(SINK_TRANSITIONS, transfer, T.VERIFYING), now)


def _sink_pull_ended(transfer: SinkTransfer, event: PullEnded, now: float) -> tuple[SinkTransfer, list[SinkAction]]:
    if not transfer.pulling:
        return _late(transfer), []
    transfer = replace(transfer, pulling=False, num_bytes=transfer.num_bytes + event.num_bytes, last_pull_s=now)
    if transfer.state in TERMINAL:
        return transfer, _sink_resolve(transfer)
    if event.error is not None:
        return _sink_end(transfer, Ended(T.FAILED, event.error))
    return _sink_next(transfer, now)


def _sink_next(transfer: SinkTransfer, now: float) -> tuple[SinkTransfer, list[SinkAction]]:
    """Starts the next pull, or completes."""
    if transfer.pulling:
        return transfer, []
    if pages := transfer.known[transfer.num_asked :]:
        action = Pull(transfer.num_cached_pages + transfer.num_asked, pages)
        if transfer.state is T.READY:
            transfer = _moved(SINK_TRANSITIONS, transfer, T.PULLING)
        first = now if transfer.first_pull_s is None else transfer.first_pull_s
        return replace(transfer, pulling=True, num_asked=len(transfer.known), first_pull_s=first), [action]
    if transfer.manifest is not None:
        return _sink_end(transfer, Ended(T.COMPLETE, "COMPLETE"))
    return transfer, []


def _sink_end(transfer: SinkTransfer, event: Ended) -> tuple[SinkTransfer, list[SinkAction]]:
    transfer = _moved(SINK_TRANSITIONS, replace(transfer, reason=event.reason, told=event.by_peer), event.state)
    return transfer, [CancelPull()] if transfer.pulling else _sink_resolve(transfer)


def _sink_resolve(transfer: SinkTransfer) -> list[SinkAction]:
    closing: list[SinkAction] = [] if transfer.told else [SendClosed(transfer.state, transfer.reason)]
    return [*closing, Resolve(transfer.state, transfer.reason)]


S = TypeVar("S", SourceTransfer, SinkTransfer)


# ---- both -----------------------------------------------------------------------------------------------------------


def _moved(table: Mapping[TransferState, frozenset[TransferState]], transfer: S, state: TransferState) -> S:
    assert state in table[transfer.state], f"{transfer.state} -> {state}"
    return replace(transfer, state=state)


def _late(transfer: S) -> S:
    return replace(transfer, num_late=transfer.num_late + 1)
