"""AsyncEngine: an EngineCore in a thread of its own. Two crossing points: commands in, step events out.

    any thread ──send──▶ deque + condition ──▶ step thread ──call_soon_threadsafe──▶ queue ──outputs()──▶ event loop

The step thread sleeps on the condition when there is nothing to compute, and is woken by a command, by `stop` or when a
pending reservation expires. What it tells is never dropped; a slow consumer makes the queue longer.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Protocol

from pdserve.core.errors import EngineError, PdserveError
from pdserve.engine.engine_core import EngineCore
from pdserve.engine.preparation import PREPARE_WAIT_S, PreparationGate, Prepare, nothing_to_prepare
from pdserve.engine.step import Command, EngineLoad, SequenceFailed, StepEvents


class Engine(Protocol):
    """A running engine as a service sees it: commands in, step events out. `AsyncEngine` is one."""

    def send(self, command: Command) -> None:
        """Hands a command over.

        Raises:
            EngineError: The engine is dead or stopped.
        """
        ...

    def outputs(self) -> AsyncIterator[StepEvents]:
        """Yields what happened, in order; see `AsyncEngine.outputs`."""
        ...

    def load(self) -> EngineLoad:
        """Load after the last step."""
        ...


class AsyncEngine:
    """Runs a core in one thread.

    Args:
        core: The engine; touched by the step thread only once started.
        clock_now: Monotonic seconds.
        prepare: Begins what a request needs before it may start; until that is ready, it is held back.
        prepare_wait_s: Longest time that a request is held back, seconds; then it fails.
    """

    def __init__(
        self,
        core: EngineCore,
        clock_now: Callable[[], float],
        prepare: Prepare = nothing_to_prepare,
        prepare_wait_s: float = PREPARE_WAIT_S,
    ) -> None:
        self._core = core
        self._now = clock_now
        self._gate = PreparationGate(prepare, self._accept, self._fail, clock_now, self._call_later, prepare_wait_s)
        self._commands: deque[Command] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._failure: EngineError | None = None
        self._load = core.load()
        self._num_steps = 0
        self._step_started_s: float | None = None
        self._outputs: asyncio.Queue[StepEvents | None] = asyncio.Queue()
        self._ended = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine-step", daemon=True)

    def start(self) -> None:
        """Starts the step thread; outputs go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def send(self, command: Command) -> None:
        """Hands a command to the step thread and wakes it; callable from any thread.

        A request that is not prepared yet goes there later, with the commands that follow it.

        Raises:
            EngineError: The engine is dead or stopped.
            RequestError: The engine cannot do what a request asks for.
            CapacityError: Too many requests are being prepared.
        """
        self._check_alive()
        self._gate.send(command)

    async def outputs(self) -> AsyncIterator[StepEvents]:
        """Yields what happened, in order; for one consumer. Ends when the engine has stopped.

        There is one item per computed step, preceded by one with `num_tokens` 0 when commands were answered before it.

        Raises:
            EngineError: The engine died; everything that it still had to tell has been yielded.
        """
        while (item := await self._outputs.get()) is not None:
            yield item
        if self._failure is not None:
            raise self._failure

    async def stop(self, timeout_s: float = 30.0) -> None:
        """Ends the step thread after the step in flight; sequences that still live are dropped. Idempotent.

        Raises:
            EngineError: The step in flight did not end within `timeout_s` seconds.
        """
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._loop is not None:
            try:
                await asyncio.wait_for(self._ended.wait(), timeout_s)
            except TimeoutError:
                raise EngineError(f"the engine's step did not end within {timeout_s:g} s", reason="STALLED") from None
            self._thread.join()  # it has nothing left to do

    def healthy(self, stall_s: float) -> bool:
        """False when the engine is dead or a step has been computing for longer than `stall_s` seconds."""
        started = self._step_started_s
        return self._failure is None and (started is None or self._now() - started <= stall_s)

    def load(self) -> EngineLoad:
        """Load after the last step, and what is held back now."""
        return self._with_held(self._load)

    def _with_held(self, load: EngineLoad) -> EngineLoad:
        num_held = self._gate.num_held
        return replace(load, num_waiting=load.num_waiting + num_held) if num_held else load

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._stopping:
            raise EngineError("the engine has been stopped", reason="ENGINE_STOPPED", status="UNAVAILABLE")

    def _accept(self, commands: Sequence[Command]) -> None:
        with self._wake:
            self._check_alive()
            self._commands.extend(commands)
            self._wake.notify()

    def _fail(self, key: str, error: PdserveError) -> None:
        """Tells of a request that the engine never saw."""
        if self._failure is None and not self._stopping:
            event = SequenceFailed(key, error.status, error.reason, error.message)
            self._to_loop(lambda: self._outputs.put_nowait(StepEvents(self._num_steps, (event,), self.load())))

    def _call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        def begin() -> None:
            assert self._loop is not None
            self._loop.call_later(delay_s, call)

        self._to_loop(begin)

    # ---- the step thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        idle = True
        try:
            while (commands := self._next_commands(idle)) is not None:
                idle = self._step(commands) == 0
                if self._core.failure is not None:
                    self._failure = self._core.failure
                    return
        except BaseException as e:  # noqa: BLE001  a library's panic is no Exception; the consumer must hear of it
            self._failure = EngineError(f"the engine failed and must be restarted: {type(e).__name__}: {e}")
            self._failure.__cause__ = e
        finally:
            self._to_loop(self._finish)

    def _next_commands(self, idle: bool) -> list[Command] | None:
        """Waits for something to do; None: stop."""
        with self._wake:
            if idle:
                wakeup = self._core.next_wakeup()
                timeout = None if wakeup is None else max(0.0, wakeup - self._now())
                self._wake.wait_for(lambda: self._commands or self._stopping, timeout)
            if self._stopping:
                return None
            commands = list(self._commands)
            self._commands.clear()
            return commands

    def _step(self, commands: list[Command]) -> int:
        started = self._step_started_s = self._now()
        self._core.begin_step(commands)
        answers = self._core.schedule(started)
        if answers.events:
            self._deliver(answers)
        computed = replace(self._core.compute(), duration_s=self._now() - started)
        self._step_started_s = None
        if computed.num_tokens or computed.events or not answers.events:
            self._deliver(computed)
        return computed.num_tokens

    def _deliver(self, item: StepEvents) -> None:
        self._load, self._num_steps = item.load, item.step
        item = replace(item, load=self._with_held(item.load)) if self._gate.num_held else item
        self._to_loop(lambda: self._outputs.put_nowait(item))

    def _to_loop(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(callback)

    def _finish(self) -> None:
        self._outputs.put_nowait(None)
        self._ended.set()
