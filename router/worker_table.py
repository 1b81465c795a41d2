"""What the router knows of workers, and which of them can serve together. Pure: no clock, no network.

A worker is *listed* while the registry names it and *live* while its session is open; only live ones are routed to, and
a live one is never removed because the registry is empty or slow. Which workers belong together is decided without
history, so that all routers decide the same:

1. Workers of another model than the router's are incompatible.
2. Of the rest, one identity digest and one dtype win: the pool that can serve (has a MIXED worker, or PREFILL and
   DECODE) before one that cannot, then the one with more workers, then the smaller digest. Workers of other digests are
   incompatible, and those of other dtypes but for decode workers that convert.
3. A prefill and a decode worker pair only if their KV layouts agree but for what both say may be converted (a page of
   prefill must fit into decode's staging memory then), and if they have a data plane in common (one that names none is
   of the version before, and may have); one that fits no peer is incompatible.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pdserve.core.data_planes import common_plane, no_common_plane, same_host
from pdserve.core.layout import DTYPE, KVLayout, incompatibility
from pdserve.core.request import Role


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """A worker as the registry names it.

    Attributes:
        worker_id: Stable name.
        role: What it computes.
        incarnation: Process start, as hex.
        address: host:port of its gRPC endpoint.
    """

    worker_id: str
    role: Role
    incarnation: str
    address: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFacts:
    """What a worker said of itself in its Welcome; constant for one incarnation.

    Attributes:
        worker_id: Stable name.
        role: What it computes.
        incarnation: Process start, as hex.
        address: host:port of its gRPC endpoint.
        model: Served model name.
        identity_digest: Equal on every worker of a pool.
        layout: Where KV lies in a page.
        max_model_len: Prompt and output tokens together, at most.
        vocab_size: Size of the vocabulary.
        num_pages: Pages in all.
        max_num_seqs: Sequences that may run at once.
        kv_converts: What may differ between its KV layout and a peer's, if the peer says so too.
        transports: Its data planes, most wanted first; empty: it does not say.
        host_id: Where it runs; planes within a host need an equal one on both sides.
        kv_staging_bytes: Through which KV of another layout comes; a page of it must fit. 0: it does not say.
    """

    worker_id: str
    role: Role
    incarnation: str
    address: str
    model: str
    identity_digest: bytes
    layout: KVLayout
    max_model_len: int
    vocab_size: int
    num_pages: int
    max_num_seqs: int
    kv_converts: frozenset[str] = frozenset()
    transports: tuple[str, ...] = ()
    host_id: str = ""
    kv_staging_bytes: int = 0


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Load that a worker reported last.

    Attributes:
        num_running: Sequences running.
        num_waiting: Sequences waiting, reserved ones included.
        num_free_pages: Pages free or evictable.
        num_pending_prefill_tokens: Prompt tokens not computed yet.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_free_pages: int = 0
    num_pending_prefill_tokens: int = 0


@dataclass(slots=True)
class LiveWorker:
    """A worker with an open session.

    Attributes:
        facts: What it is.
        load: What it reported last.
        draining: Finishes what runs, takes nothing new.
        inflight: This router's attempts on it by key, with the prompt tokens that they still owe.
    """

    facts: WorkerFacts
    load: WorkerLoad = WorkerLoad()
    draining: bool = False
    inflight: dict[str, int] = field(default_factory=dict)

    @property
    def pending_prefill_tokens(self) -> int:
        """Prompt tokens ahead of a new request: reported ones, or this router's own where the report is older."""
        return max(self.load.num_pending_prefill_tokens, sum(self.inflight.values()))

    @property
    def num_sequences(self) -> int:
        """Sequences running, waiting or reserved: reported ones, or this router's own where the report is older."""
        return max(self.load.num_running + self.load.num_waiting, len(self.inflight))


@dataclass(frozen=True, slots=True)
class Limits:
    """What every usable worker accepts.

    Attributes:
        max_model_len: Prompt and output tokens together, at most.
        vocab_size: Size of the vocabulary.
    """

    max_model_len: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Pool:
    """Live, compatible workers that accept new requests, each list sorted by worker id."""

    prefill: tuple[LiveWorker, ...]
    decode: tuple[LiveWorker, ...]
    mixed: tuple[LiveWorker, ...]


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker for `ListModels`.

    Attributes:
        worker_id: Stable name.
        role: What it computes.
        incarnation: Process start, as hex.
        address: host:port of its gRPC endpoint.
        state: "ready", "draining", "connecting", "connecting: <why the last try failed>" or "incompatible: <reason>".
        load: What it reported last.
        num_pages: Pages in all; 0 while connecting.
    """

    worker_id: str
    role: Role
    incarnation: str
    address: str
    state: str
    load: WorkerLoad
    num_pages: int


class WorkerTable:
    """The workers of one served model.

    Args:
        model: Served model name; workers of other models are incompatible.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self._listed: dict[str, Listed] = {}
        self._live: dict[str, LiveWorker] = {}
        self._faults: dict[str, str] = {}
        self._why_not_open: dict[str, str] = {}

    # ---- what happens

    def set_listed(self, records: Iterable[Listed]) -> None:
        """Replaces what the registry names; live workers stay whatever it says."""
        before, self._listed = self._listed, {r.worker_id: r for r in records}
        same = {name for name, record in self._listed.items() if record == before.get(name)}
        self._why_not_open = {name: why for name, why in self._why_not_open.items() if name in same}

    def connected(self, facts: WorkerFacts) -> None:
        """A session is open."""
        self._why_not_open.pop(facts.worker_id, None)
        self._live[facts.worker_id] = LiveWorker(facts, WorkerLoad(num_free_pages=facts.num_pages))
        self._refresh()

    def disconnected(self, worker_id: str, why_not_open: str = "") -> None:
        """A session ended, or could not be opened; nothing runs there for this router any more."""
        if why_not_open:
            self._why_not_open[worker_id] = why_not_open
        self._live.pop(worker_id, None)
        self._refresh()

    def loaded(self, worker_id: str, load: WorkerLoad) -> None:
        """A worker reported its load."""
        if worker := self._live.get(worker_id):
            worker.load = load

    def set_draining(self, worker_id: str, draining: bool) -> bool:
        """A worker said whether it drains.

        Returns:
            True if that is news.
        """
        worker = self._live.get(worker_id)
        if worker is None or worker.draining == draining:
            return False
        worker.draining = draining
        self._refresh()
        return True

    def placed(self, worker_id: str, key: str, prompt_tokens: int) -> None:
        """An attempt was sent to a worker; `prompt_tokens` is what it has to compute there (0 on decode)."""
        if worker := self._live.get(worker_id):
            worker.inflight[key] = prompt_tokens

    def computed(self, worker_id: str, key: str) -> None:
        """The prompt of an attempt is computed; it still runs there."""
        worker = self._live.get(worker_id)
        if worker and key in worker.inflight:
            worker.inflight[key] = 0

    def released(self, worker_id: str, key: str) -> None:
        """An attempt left a worker. Unknown ones are ignored (the worker may have gone first)."""
        if worker := self._live.get(worker_id):
            worker.inflight.pop(key, None)

    # ---- what is so

    def live(self, worker_id: str) -> LiveWorker | None:
        """The worker with that name, if its session is open."""
        return self._live.get(worker_id)

    def pool(self) -> Pool:
        """Workers that a new request may go to."""
        usable = [w for w in self._live.values() if not w.draining and w.facts.worker_id not in self._faults]
        by_role = {
            role: tuple(sorted((w for w in usable if w.facts.role is role), key=lambda w: w.facts.worker_id))
            for role in Role
        }
        return Pool(by_role[Role.PREFILL], by_role[Role.DECODE], by_role[Role.MIXED])

    def limits(self) -> Limits | None:
        """What every compatible worker accepts; None while none is live."""
        facts = [w.facts for w in self._live.values() if w.facts.worker_id not in self._faults]
        if not facts:
            return None
        return Limits(min(f.max_model_len for f in facts), min(f.vocab_size for f in facts))

    def missing(self) -> str:
        """Says, for an error message, why nothing can be routed."""
        pool, notes = self.pool(), []
        if not pool.prefill and not pool.decode:
            notes.append("no prefill and no decode worker is ready")
        else:
            notes += [f"no {name} worker is ready" for name in ("prefill", "decode") if not getattr(pool, name)]
        if not notes:
            notes.append("no prefill and decode worker fit each other")
        notes += [f"{row.worker_id} is {row.state}" for row in self.rows() if row.state != "ready"]
        return "; ".join(notes)

    def rows(self) -> list[WorkerRow]:
        """Every worker that is listed or live, sorted by name."""
        names = sorted(self._listed.keys() | self._live.keys())
        return [self._row(name) for name in names]

    def _row(self, name: str) -> WorkerRow:
        worker = self._live.get(name)
        if worker is None:
            r = self._listed[name]
            why = self._why_not_open.get(name)
            state = f"connecting: {why}" if why else "connecting"
            return WorkerRow(name, r.role, r.incarnation, r.address, state, WorkerLoad(), 0)
        f = worker.facts
        if fault := self._faults.get(name):
            state = f"incompatible: {fault}"
        else:
            state = "draining" if worker.draining else "ready"
        return WorkerRow(name, f.role, f.incarnation, f.address, state, worker.load, f.num_pages)

    def _refresh(self) -> None:
        self._faults = incompatibilities(self.model, [w.facts for w in self._live.values() if not w.draining])


def can_pair(prefill: WorkerFacts, decode: WorkerFacts) -> bool:
    """True when KV of `prefill` can be brought into the pages of `decode`."""
    return prefill.identity_digest == decode.identity_digest and _misfit(decode, prefill) is None


def incompatibilities(model: str, workers: list[WorkerFacts]) -> dict[str, str]:
    """Worker id -> why it serves nothing, by the rules of this module's docstring. Compatible workers are absent."""
    faults = {
        f.worker_id: f"serves model {f.model!r}, this router serves {model!r}" for f in workers if f.model != model
    }
    ours = [f for f in workers if f.model == model]
    if not ours:
        return faults
    winner, dtype = _winning_pool(ours)
    for f in ours:
        if f.identity_digest != winner:
            faults[f.worker_id] = (
                f"identity digest {f.identity_digest.hex()[:12]} differs from the pool's {winner.hex()[:12]} "
                "(other weights, --quantization or attention config)"
            )
        elif not _belongs(f, winner, dtype):
            faults[f.worker_id] = (
                f"dtype is {f.layout.dtype}, the pool's is {dtype}; give all workers one --dtype, or a decode worker "
                "--kv-convert-dtype"
            )
    pool = sorted((f for f in ours if f.worker_id not in faults), key=lambda f: f.worker_id)
    for f in pool:
        peers = [p for p in pool if {p.role, f.role} == {Role.PREFILL, Role.DECODE}]
        reasons = [reason for p in peers if (reason := _misfit(f, p))]
        if reasons and len(reasons) == len(peers):
            faults[f.worker_id] = reasons[0]
    return faults


def _misfit(f: WorkerFacts, peer: WorkerFacts) -> str | None:
    """Why the two do not pair, as `f` is told."""
    if reason := incompatibility(f.layout, peer.layout, f.kv_converts & peer.kv_converts):
        return f"KV layout fits no {peer.role} worker: {reason}"
    prefill, decode = (f, peer) if f.role is Role.PREFILL else (peer, f)
    if prefill.layout != decode.layout and 0 < decode.kv_staging_bytes < prefill.layout.page_bytes:
        return (
            f"KV layouts of {prefill.worker_id} and {decode.worker_id} differ, and a page of "
            f"{prefill.layout.page_bytes} bytes does not fit into {decode.kv_staging_bytes} "
            f"(--kv-staging-bytes of {decode.worker_id})"
        )
    if not f.transports or not peer.transports:
        return None  # of the version before: the two find out by themselves
    if common_plane(f.transports, peer.transports, same_host=same_host(f.host_id, peer.host_id)):
        return None
    missing = no_common_plane("this worker", f.transports, peer.worker_id, peer.transports)
    return f"{missing} (--kv-transfer-config)"


def _belongs(f: WorkerFacts, digest: bytes, dtype: str) -> bool:
    converts = f.role is Role.DECODE and DTYPE in f.kv_converts
    return f.identity_digest == digest and (f.layout.dtype == dtype or converts)


def _winning_pool(workers: list[WorkerFacts]) -> tuple[bytes, str]:
    def rank(pool: tuple[bytes, str]) -> tuple[bool, int, bytes, str]:
        members = [f for f in workers if _belongs(f, *pool)]
        roles = {f.role for f in members}
        serves = Role.MIXED in roles or {Role.PREFILL, Role.DECODE} <= roles
        return (not serves, -len(members), *pool)

    return min({(f.identity_digest, f.layout.dtype) for f in workers}, key=rank)
