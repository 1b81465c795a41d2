"""EngineCore: one engine without a thread or a clock: commands in, one step, events out. A simulator can run it.

`begin_step(commands)` and `step(now)` alternate; the caller owns the gap between them and says what time it is.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdserve.core.errors import EngineError
from pdserve.engine.page_pool import PagePool
from pdserve.engine.policies import WaitingOrder, fcfs
from pdserve.engine.scheduler import Scheduler, SchedulerLimits
from pdserve.engine.step import (
    Abort,
    Activate,
    Add,
    Command,
    MarkReserved,
    ReleaseLease,
    Reserve,
    Runner,
    StepEvents,
)


class EngineCore:
    """Scheduler, page pool and runner of one engine.

    Args:
        limits: Batching limits.
        pool: Bookkeeping of the pages that `runner` computes in.
        runner: Computes steps.
        order: Order of waiting sequences.
    """

    def __init__(self, limits: SchedulerLimits, pool: PagePool, runner: Runner, order: WaitingOrder = fcfs) -> None:
        self._scheduler = Scheduler(limits, pool, order)
        self._runner = runner
        self._failure: EngineError | None = None

    @property
    def failure(self) -> EngineError | None:
        """Why the engine is dead, or None."""
        return self._failure

    def begin_step(self, commands: Iterable[Command]) -> None:
        """Takes commands in, in order; their events come with the next `step`."""
        for command in commands:
            self._handle(command)

    def step(self, now: float) -> StepEvents:
        """Schedules, executes and accounts for one step, if there is anything to compute.

        Args:
            now: Monotonic seconds.

        Returns:
            All events since the last call; `num_tokens` is 0 when nothing could be computed: then nothing will be
            before another command or `next_wakeup`.
        """
        scheduler, num_tokens = self._scheduler, 0
        if self._failure is None:
            try:
                if (output := scheduler.schedule(now)) is not None:
                    scheduler.update(output, self._runner.execute(output))
                    num_tokens = output.num_tokens
            except Exception as e:  # noqa: BLE001  whatever it is, every stream must end with a reason
                self.die(e)
        if self._failure is not None:
            scheduler.fail_all("INTERNAL", "ENGINE_FAILED", self._failure.message)
        return StepEvents(scheduler.step, scheduler.take_events(), scheduler.load(), num_tokens)

    def next_wakeup(self) -> float | None:
        """When to call `step` although no command came; monotonic seconds, or None."""
        return self._scheduler.next_expiry()

    def die(self, cause: Exception) -> None:
        """Marks the engine dead; the next `step` fails every sequence."""
        error = EngineError(f"the engine failed and must be restarted: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        self._failure = self._failure or error

    def check(self) -> None:
        """Proves that no page is lost or shared by mistake."""
        self._scheduler.check()

    def _handle(self, command: Command) -> None:
        scheduler = self._scheduler
        match command:
            case Add(request, handoff, reserved):
                scheduler.add(request, handoff, reserved)
            case MarkReserved(key):
                scheduler.mark_reserved(key)
            case Reserve(request, expires_s):
                scheduler.reserve(request, expires_s)
            case Activate(key, token_id):
                scheduler.activate(key, token_id)
            case Abort(key):
                scheduler.abort(key)
            case ReleaseLease(key):
                scheduler.release_lease(key)
