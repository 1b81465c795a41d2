"""OneSidedSink: pulls pages with a library that copies them by itself, and that nobody can stop once it began.

Life of a pull, in the sink's one thread, which alone calls the library (another hashes):

    WAITING      its source has MAX_PER_PEER pulls already; a cancel ends it at once
    READING      parts of at most PART_BYTES, WINDOW at a time, each verified when it is there, while others are read
    QUARANTINED  it failed (too slow, cancelled, corrupt, lost, closed) and parts are outstanding: no new part is begun
    over         the library has said of every part that it ended: only now `pull` returns and the pages may be freed

No timer leads out of QUARANTINED. A pull that is too slow is told to `on_overdue` at once, so that its request need not
wait for the end; its source gets no other pull meanwhile. The source cannot refuse a stale read, so every page is
verified by its checksum after the copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from pdserve.core.errors import TransferError
from pdserve.kvtransfer.pool import PageMemory
from pdserve.kvtransfer.remote_reads import Library, LocalMemory, Read, ReadState, RemotePool, Runs
from pdserve.kvtransfer.tasks import submit, until_over
from pdserve.kvtransfer.transport import Capabilities, Overdue, SourcePageRef

MAX_PER_PEER = 4
MAX_PEERS = 32
PART_BYTES = 8 << 20
WINDOW = 2
POLL_S, MAX_POLL_S, QUARANTINE_POLL_S = 50e-6, 200e-6, 20e-3
SPIN_S = 200e-6
"""After any change reads are asked for so long without a pause: many are over sooner than a pause is."""
PAUSE_SHARE = 8
"""Later a pause takes this part of the time since the last change."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Part:
    """Pages of one read: where they lie, their ids there and here, and what they hash to at the source."""

    runs: Runs
    sources: NDArray[np.uint64]
    destinations: NDArray[np.uint64]
    checksums: Sequence[int]


class _Pull:
    """One pull: what its caller and the thread share is `future` and `cancelled`."""

    def __init__(
        self, address: str, source: RemotePool, transfer_id: str, num_pages: int, parts: Iterator[_Part]
    ) -> None:
        self.address, self.source, self.transfer_id = address, source, transfer_id
        self.num_pages, self.parts = num_pages, parts
        self.loop = asyncio.get_running_loop()
        self.future: Future[int] = Future()
        self.cancelled = False
        self.error: TransferError | None = None
        self.overdue = False
        self.deadline_s = self.progress_s = 0.0
        self.reads: list[tuple[Read, _Part]] = []
        self.checks: list[Future[int | None]] = []
        self.num_unread = num_pages
        self.stuck: list[Read] = []  # ended in an unknown way: kept, or the library would give them up

    def fail(self, error: TransferError) -> None:
        """No new part is begun; the first error counts."""
        self.error = self.error or error


class OneSidedSink:
    """Decode's end of a one-sided data plane.

    Args:
        memory: The pool to write into.
        transport: Name, as in addresses.
        library: Opened over that pool; closed by `close`.
        idle_s: A pull of which no part ends for this long, beyond what `min_bytes_per_s` allows, fails; seconds.
        base_s: Time allowed for any pull, seconds.
        min_bytes_per_s: Beyond `base_s` a pull must be at least this fast.
    """

    capabilities = Capabilities(quiescent_cancel=False, zero_copy=True, device_memory=False)

    def __init__(
        self,
        memory: PageMemory,
        transport: str,
        library: Library,
        *,
        idle_s: float = 2.0,
        base_s: float = 5.0,
        min_bytes_per_s: float = 50e6,
    ) -> None:
        self._memory, self._transport, self._library = memory, transport, library
        self._local = LocalMemory(memory)
        self._base_s, self._min_bytes_per_s = base_s, min_bytes_per_s
        self._pages_per_part = max(1, PART_BYTES // memory.page_bytes)
        self._idle_s = idle_s + WINDOW * self._pages_per_part * memory.page_bytes / min_bytes_per_s
        self._lock = threading.Lock()  # a pull is queued before the end, or refused
        self._inbox: deque[_Pull] = deque()
        self._wake, self._closing, self._ended = threading.Event(), False, Future[None]()
        self._decoded: dict[str, RemotePool] = {}
        self._on_overdue: Overdue | None = None
        # The thread's own:
        self._waiting: list[_Pull] = []
        self._active: list[_Pull] = []
        self._peers: OrderedDict[RemotePool, None] = OrderedDict()
        self._lost: set[RemotePool] = set()
        self._num_quarantined = 0
        self._changed_s = 0.0
        self._verifier = ThreadPoolExecutor(1, thread_name_prefix=f"kv-{transport}-verify")
        self._thread = threading.Thread(target=self._run, name=f"kv-{transport}", daemon=True)
        self._thread.start()

    @property
    def num_quarantined(self) -> int:
        """Pages of pulls that failed, into which something may still write; all, once the library itself failed."""
        return self._num_quarantined

    def on_overdue(self, callback: Overdue) -> None:
        """Sets who is told, on the pull's loop, that a transfer's pull is too slow; it goes on until nothing writes."""
        self._on_overdue = callback

    async def pull(
        self,
        address: str,
        token: bytes,
        transfer_id: str,
        sources: Sequence[SourcePageRef],
        destinations: Sequence[int],
    ) -> int:
        """See `PageSink`. However it ends, the library has ended every read of it."""
        source = self._decode(address)
        self._check(source, sources)
        if not sources:
            return 0
        pull = _Pull(address, source, transfer_id, len(sources), self._parts(source, sources, destinations))
        with self._lock:
            if self._closing:
                raise TransferError("the data plane is closed", reason="SINK_CLOSED")
            self._inbox.append(pull)
        self._wake.set()

        def stop() -> None:
            pull.cancelled = True
            self._wake.set()

        return await until_over(pull.future, stop)

    async def close(self) -> None:
        """See `PageSink`. Waits for quarantined pulls, however long: the pool must not be freed before."""
        with self._lock:
            self._closing = True
        self._wake.set()
        await asyncio.shield(asyncio.wrap_future(self._ended))

    def _decode(self, address: str) -> RemotePool:
        """What a source is called does not change: it is read once."""
        if (source := self._decoded.get(address)) is None:
            source = RemotePool.decode(address, self._transport)
            if len(self._decoded) >= MAX_PEERS:
                self._decoded.clear()
            self._decoded[address] = source
        return source

    def _parts(
        self, source: RemotePool, sources: Sequence[SourcePageRef], destinations: Sequence[int]
    ) -> Iterator[_Part]:
        """Shares pages out in the order of the source, where neighbours are read as one."""
        if len(destinations) != len(sources):
            raise ValueError(f"{len(sources)} pages into {len(destinations)}")
        ids = np.fromiter((page.page_id for page in sources), np.uint64, len(sources))
        order, size = np.argsort(ids, kind="stable"), self._pages_per_part
        ids, into = ids[order], np.array(destinations, np.uint64)[order]
        checksums = [sources[i].checksum for i in order.tolist()]
        shares = (slice(at, at + size) for at in range(0, len(order), size))
        runs = Runs.of_pages(source, self._local.base, ids, into, size)
        return (_Part(part, ids[at], into[at], checksums[at]) for part, at in zip(runs, shares, strict=True))

    def _check(self, source: RemotePool, sources: Sequence[SourcePageRef]) -> None:
        if source.page_bytes != self._memory.page_bytes:
            there, here = source.page_bytes, self._memory.page_bytes
            raise TransferError(f"the source's pages have {there} bytes, this pool's {here}", reason="PAGE_BYTES")
        for page in sources:
            if not 0 <= page.page_id < source.num_pages:
                raise TransferError(f"page {page.page_id} of {source.num_pages}", reason="ERR_STALE")
            if not page.checksum:
                raise TransferError(
                    f"page {page.page_id} has no checksum, without which {self._transport} is not safe: start both "
                    "workers with --kv-integrity host",
                    reason="NO_CHECKSUM",
                )

    # ---- in the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop()
        finally:
            if not self._ended.done():
                self._on_crash()

    def _on_crash(self) -> None:
        """The library failed in a way that is not known: requests are told, and no page of a begun pull is freed.

        What else it may write nobody knows: all pages count as quarantined, so that the worker takes nothing new.
        """
        with self._lock:
            self._closing = True
            queued = (*self._waiting, *self._inbox)
        _log.error(
            "%s failed: pulls over it fail with SINK_FAILED, and this worker takes nothing new until it is restarted",
            self._transport,
        )
        error = TransferError(f"{self._transport} failed; the log has it", reason="SINK_FAILED")
        self._num_quarantined = self._memory.num_pages
        for pull in queued:
            if pull not in self._active and not pull.future.done():  # it may have failed in the middle of its round
                pull.future.set_exception(error)
        for pull in self._active:
            self._tell_late(pull, error)
        if not self._active:
            self._ended.set_result(None)

    def _loop(self) -> None:
        while not self._closing or self._active or self._waiting or self._inbox:
            while self._inbox:
                self._waiting.append(self._inbox.popleft())
            changed = self._start_waiting() | self._advance()
            self._num_quarantined = sum(p.num_pages for p in self._active if p.error is not None)
            now = time.monotonic()
            if changed:
                self._changed_s = now
            elif (pause_s := self._pause_s(now - self._changed_s)) != 0:
                self._wake.wait(pause_s)
                self._wake.clear()
        self._verifier.shutdown()
        self._library.close()
        self._ended.set_result(None)

    def _pause_s(self, unchanged_s: float) -> float | None:
        """How long to let reads go on that have not changed for so long; None: until somebody wants something."""
        if any(p.error is None and p.reads for p in self._active):
            return 0.0 if unchanged_s < SPIN_S else min(max(POLL_S, unchanged_s / PAUSE_SHARE), MAX_POLL_S)
        return QUARANTINE_POLL_S if self._active or self._waiting else None  # who hashes wakes, too

    def _start_waiting(self) -> bool:
        """Begins what may begin, ends what may not; True when something changed."""
        if not self._waiting:
            return False
        reading = Counter(p.source for p in self._active)
        stalled = {p.source for p in self._active if p.overdue or p.stuck}
        still = list[_Pull]()
        for pull in self._waiting:
            if (refusal := self._refusal(pull, pull.source in stalled)) is not None:
                pull.future.set_exception(refusal)
            elif reading[pull.source] >= MAX_PER_PEER or pull.source in self._lost:
                still.append(pull)
            else:
                reading[pull.source] += 1
                self._begin(pull)
        changed, self._waiting = len(still) < len(self._waiting), still
        return changed

    def _refusal(self, pull: _Pull, stalled: bool) -> TransferError | None:
        """Why a pull must not begin, or go on."""
        if pull.cancelled:
            return TransferError("the pull was cancelled", reason="CANCELLED")
        if self._closing:
            return TransferError("the data plane was closed", reason="SINK_CLOSED")
        if stalled:
            why = "an earlier pull from this source does not end: it gets no other until it did"
            return TransferError(why, reason="PEER_STALLED")
        return None

    def _begin(self, pull: _Pull) -> None:
        self._make_room(pull.source)
        self._active.append(pull)
        pull.progress_s = time.monotonic()
        num_bytes = pull.num_pages * self._memory.page_bytes
        pull.deadline_s = pull.progress_s + self._base_s + num_bytes / self._min_bytes_per_s
        self._fill_window(pull)

    def _make_room(self, source: RemotePool) -> None:
        """Forgets the source that was used longest ago when there are too many."""
        self._peers[source] = None
        self._peers.move_to_end(source)
        if len(self._peers) > MAX_PEERS:
            busy = {p.source for p in self._active} | {source}
            if (oldest := next((p for p in self._peers if p not in busy), None)) is not None:
                del self._peers[oldest]
                self._library.forget(oldest)

    def _fill_window(self, pull: _Pull) -> None:
        """Gives the library the next parts."""
        while pull.error is None and len(pull.reads) < WINDOW and (part := next(pull.parts, None)) is not None:
            try:
                read = self._library.begin(pull.source, part.runs)
            except TransferError as e:
                pull.fail(e)
                self._lost.add(pull.source)
            else:
                pull.num_unread -= len(part.sources)
                pull.reads.append((read, part))

    def _advance(self) -> bool:
        """Looks at every read; True when something changed."""
        changed = False
        for pull in list(self._active):
            for entry in list(pull.reads):
                if (state := entry[0].poll()) is not ReadState.PENDING:
                    changed = True
                    pull.reads.remove(entry)
                    self._on_read_ended(pull, entry[0], state, entry[1])
            for check in [c for c in pull.checks if c.done()]:
                changed = True
                pull.checks.remove(check)
                self._on_checked(pull, check.result())
            self._check_limits(pull)
            self._fill_window(pull)
            if not (pull.reads or pull.checks or pull.stuck):
                changed = True
                self._active.remove(pull)
                self._resolve(pull)
        for source in self._lost - {p.source for p in self._active}:
            self._lost.discard(source)
            self._peers.pop(source, None)
            self._library.forget(source)
            changed = True
        return changed

    def _on_read_ended(self, pull: _Pull, read: Read, state: ReadState, part: _Part) -> None:
        pull.progress_s = time.monotonic()
        if state is ReadState.DONE:
            if pull.error is None:
                self._verify(pull, part)
            return
        self._lost.add(pull.source)
        pull.fail(TransferError(f"lost the source while {self._transport} read from it", reason="PEER_GONE"))
        if state is ReadState.UNKNOWN:
            pull.stuck.append(read)
            _log.error(
                "%s does not say whether a failed read has ended: %d pages stay unused while this process lives",
                self._transport,
                pull.num_pages,
            )

    def _verify(self, pull: _Pull, part: _Part) -> None:
        """Hashes a part: in the other thread when there is more to read meanwhile."""
        if pull.num_unread or pull.reads:
            with contextlib.suppress(TransferError):  # no thread for it
                pull.checks.append(submit(self._verifier, self._first_wrong, part))
                pull.checks[-1].add_done_callback(lambda _: self._wake.set())
                return
        self._on_checked(pull, self._first_wrong(part))

    def _first_wrong(self, part: _Part) -> int | None:
        """Id at the source of a page that is not what it was said to be."""
        for at, (destination, checksum) in enumerate(zip(part.destinations.tolist(), part.checksums, strict=True)):
            if xxhash.xxh3_64_intdigest(self._memory.page(destination)) != checksum:
                return int(part.sources[at])
        return None

    def _on_checked(self, pull: _Pull, wrong: int | None) -> None:
        if wrong is not None:
            pull.fail(TransferError(f"page {wrong} arrived stale or corrupt", reason="CORRUPT_PAGE"))

    def _check_limits(self, pull: _Pull) -> None:
        """Ends what nobody wants any more, and what takes too long."""
        if pull.error is None and (refusal := self._refusal(pull, False)) is not None:
            pull.fail(refusal)
        if not pull.reads or pull.overdue:
            return
        now = time.monotonic()
        if now > pull.progress_s + self._idle_s:
            self._on_late(pull, TransferError("the source is silent", reason="PULL_IDLE"))
        elif now > pull.deadline_s:
            self._on_late(pull, TransferError("the pull is slower than its limit", reason="PULL_TOO_SLOW"))

    def _on_late(self, pull: _Pull, error: TransferError) -> None:
        """It is late, also when it had failed before, and cannot end yet."""
        pull.overdue = True
        _log.warning("%d pages wait for %s to end a read: %s", pull.num_pages, self._transport, error.message)
        if pull.error is None:
            self._tell_late(pull, error)
        pull.fail(error)

    def _tell_late(self, pull: _Pull, error: TransferError) -> None:
        if self._on_overdue is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
                pull.loop.call_soon_threadsafe(self._on_overdue, pull.transfer_id, pull.address, error)

    def _resolve(self, pull: _Pull) -> None:
        if pull.error is not None:
            pull.future.set_exception(pull.error)
        else:
            pull.future.set_result(pull.num_pages * self._memory.page_bytes)
