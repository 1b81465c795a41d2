"""EngineCore: one engine without a thread or a clock: commands in, one step, events out. A simulator can run it.

`begin_step(commands)` and `step(now)` alternate; the caller owns the gap between them and says what time it is. `step`
is `schedule(now)` and `compute()`; who answers commands early calls them apart. A failure in either ends all sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Protocol

from pdserve.core.errors import EngineError
from pdserve.engine.batching import Batching
from pdserve.engine.chunks import SchedulerLimits
from pdserve.engine.lines import Policy
from pdserve.engine.page_pool import PagePool
from pdserve.engine.prefix_cache import PrefixCache
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.step import (
    Abort,
    Activate,
    Add,
    Command,
    EngineLoad,
    Event,
    MarkReserved,
    PagesReady,
    ReleaseLease,
    Reserve,
    Runner,
    SchedulerOutput,
    StepEvents,
)
from pdserve.engine.swap import SwapSpace


class Staging(Protocol):
    """Pages that are computed in one memory and met by other workers in another; `engine.device.PageStaging` is one."""

    def before(self, command: Command) -> None:
        """Called before a command is handled."""
        ...

    def after(self, events: Iterable[Event]) -> None:
        """Called with events before they are told."""
        ...


class EngineCore:
    """Scheduler, page pool and runner of one engine.

    Args:
        limits: Batching limits.
        pool: Bookkeeping of the pages that `runner` computes in.
        runner: Computes steps.
        policy: Orders who starts; default: first come, first served.
        batching: Who may join the running ones, and how they leave; default: at every step.
        swap: What becomes of the KV of preempted sequences; None: all are computed anew.
        cache: Finds pages of `pool` for reuse; None: nothing is shared.
        staging: Moves pages to and from where other workers meet them; None: they meet them where they are computed.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: PagePool,
        runner: Runner,
        policy: Policy | None = None,
        batching: Batching | None = None,
        swap: SwapSpace | None = None,
        cache: PrefixCache | None = None,
        staging: Staging | None = None,
    ) -> None:
        self._scheduler = Scheduler(limits, pool, policy, batching, swap, cache)
        self._runner = runner
        self._staging = staging
        self._output: SchedulerOutput | None = None
        self._failure: EngineError | None = None

    @property
    def failure(self) -> EngineError | None:
        """Why the engine is dead, or None."""
        return self._failure

    @property
    def runner(self) -> Runner:
        """What computes the steps."""
        return self._runner

    def begin_step(self, commands: Iterable[Command]) -> None:
        """Takes commands in, in order; their events come with the next `schedule`."""
        for command in commands:
            if self._staging is not None:
                self._guarded(partial(self._staging.before, command))
            with self._whole():
                self._handle(command)

    def schedule(self, now: float) -> StepEvents:
        """First half of a step: picks the work.

        Args:
            now: Monotonic seconds.

        Returns:
            What the commands and reservations led to, known before anything is computed.
        """
        step = self._scheduler.step
        if self._failure is None:
            try:
                with self._whole():
                    self._output = self._scheduler.schedule(now)
            except Exception as e:  # noqa: BLE001  whatever it is, every stream must end with a reason
                self._die(e)
        return self._take_events(step, 0)

    def compute(self) -> StepEvents:
        """Second half of a step: executes the work and accounts for it.

        Returns:
            What was computed; `num_tokens` is 0 when there was nothing to compute: then there will be nothing before
            another command or `next_wakeup`.
        """
        output, self._output = self._output, None
        if output is None:
            return self._take_events(self._scheduler.step, 0)
        try:
            with self._whole() if output.copies else nullcontext():  # a step without any is computed again
                result = self._runner.execute(output)
            with self._whole():
                self._scheduler.update(output, result)
        except Exception as e:  # noqa: BLE001  whatever it is, every stream must end with a reason
            self._die(e)
        return self._take_events(output.step, output.num_tokens)

    def step(self, now: float) -> StepEvents:
        """Both halves of a step, with all their events in order."""
        early, late = self.schedule(now), self.compute()
        return replace(late, events=early.events + late.events)

    def next_wakeup(self) -> float | None:
        """When to call `step` although no command came; monotonic seconds, or None."""
        return self._scheduler.next_wakeup()

    def load(self) -> EngineLoad:
        """Load now."""
        return self._scheduler.load()

    def check(self) -> None:
        """Proves that no page is lost or shared by mistake."""
        self._scheduler.check()

    def _handle(self, command: Command) -> None:
        scheduler = self._scheduler
        match command:
            case Add(request, handoff, reserved, forks):
                scheduler.add(request, handoff, reserved, forks)
            case MarkReserved(key):
                scheduler.mark_reserved(key)
            case Reserve(request, expires_s):
                scheduler.reserve(request, expires_s)
            case Activate(key, token_id, forks):
                scheduler.activate(key, token_id, forks)
            case Abort(key):
                scheduler.abort(key)
            case ReleaseLease(key):
                scheduler.release_lease(key)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """What is done in part is known to nobody: an interrupt (Ctrl-C of a program that embeds it) is the end."""
        try:
            yield
        except Exception:
            raise
        except BaseException as e:
            self._die(e)
            raise

    def _die(self, cause: BaseException) -> None:
        self._output = None
        self._failure = EngineError(f"the engine failed and must be restarted: {type(cause).__name__}: {cause}")
        self._failure.__cause__ = cause

    def _take_events(self, step: int, num_tokens: int) -> StepEvents:
        events = self._scheduler.take_events()
        if self._staging is not None:
            self._guarded(partial(self._staging.after, events))
            if self._failure is not None:  # pages that may not have been copied are not told
                events = tuple(event for event in events if not isinstance(event, PagesReady))
        if self._failure is not None:
            self._scheduler.fail_all(self._failure.status, self._failure.reason, self._failure.message)
            events += self._scheduler.take_events()
        return StepEvents(step, events, self._scheduler.load(), num_tokens)

    def _guarded(self, call: Callable[[], None]) -> None:
        if self._failure is None:
            try:
                call()
            except Exception as e:  # noqa: BLE001  whatever it is, every stream must end with a reason
                self._die(e)
