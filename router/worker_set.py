"""The workers as the orchestrator uses them: the table, the clients of live ones, and who waits for a change."""

from __future__ import annotations

from collections.abc import Iterable

from pdserve.router.inbox import Inbox, WorkersChanged
from pdserve.router.worker_client import WorkerClient
from pdserve.router.worker_table import Listed, WorkerFacts, WorkerLoad, WorkerTable


class WorkerSet:
    """Table and clients, changed together. No I/O.

    Args:
        model: Served model name.
    """

    def __init__(self, model: str) -> None:
        self.table = WorkerTable(model)
        self._clients: dict[str, WorkerClient] = {}
        self._waiting: dict[int, Inbox] = {}

    def client(self, worker_id: str) -> WorkerClient:
        """The client of a live worker."""
        return self._clients[worker_id]

    def subscribe(self, inbox: Inbox) -> None:
        """`WorkersChanged` goes to the inbox whenever another route may be possible, until `unsubscribe`."""
        self._waiting[id(inbox)] = inbox

    def unsubscribe(self, inbox: Inbox) -> None:
        """Ends `subscribe`."""
        self._waiting.pop(id(inbox), None)

    def set_listed(self, records: Iterable[Listed]) -> None:
        """What the registry names now."""
        self.table.set_listed(records)
        self._changed()

    def session_open(self, client: WorkerClient, facts: WorkerFacts) -> None:
        """A worker can be sent to."""
        self._clients[facts.worker_id] = client
        self.table.connected(facts)
        self._changed()

    def session_closed(self, worker_id: str, why_not_open: str = "") -> None:
        """A worker is gone for now, or could not be connected to: then it is known why not."""
        self._clients.pop(worker_id, None)
        self.table.disconnected(worker_id, why_not_open)
        self._changed()

    def worker_loaded(self, worker_id: str, load: WorkerLoad) -> None:
        """A worker reported its load."""
        self.table.loaded(worker_id, load)

    def worker_draining(self, worker_id: str, draining: bool) -> None:
        """A worker said whether it drains."""
        if self.table.set_draining(worker_id, draining):
            self._changed()

    def _changed(self) -> None:
        for inbox in self._waiting.values():
            inbox.put(WorkersChanged())
