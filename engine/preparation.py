"""PreparationGate: a request enters the engine when what it needs (a compiled grammar) is ready, never before.

    send(Add | Reserve) ──▶ prepare ──ready──▶ engine
                               └──not yet──▶ held, with all later commands of its key ──ready──▶ engine
                                               ├── failed, or not ready in time ──▶ SequenceFailed
                                               └── Abort ──▶ given up; the engine answers it

So the step thread waits for nothing, and one whose request is held can be aborted meanwhile. What is held counts as
waiting in the engine's load, and a reservation's time to wait for pages begins when it goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from pdserve.core.errors import CapacityError, PdserveError
from pdserve.core.sampling import SamplingParams
from pdserve.engine.step import Abort, Add, Command, Reserve

PREPARE_WAIT_S = 15.0


class Preparation(Protocol):
    """Something that one request needs before it may start."""

    def result(self, timeout_s: float) -> None:
        """Waits until it is ready.

        Raises:
            PdserveError: It cannot be had.
            TimeoutError: It is still not ready.
        """
        ...

    def done(self) -> bool:
        """Ready or failed: `result` waits no more."""
        ...

    def on_done(self, call: Callable[[], None]) -> None:
        """Calls once it is done, maybe at once, in whatever thread."""
        ...

    def give_up(self) -> None:
        """The request needs it no more. Idempotent."""
        ...


Prepare = Callable[[SamplingParams], Preparation | None]
"""Begins what a request needs, at once and in the caller's thread; None: nothing. Raises what the engine cannot do."""


def nothing_to_prepare(params: SamplingParams) -> None:
    """The `Prepare` of an engine whose requests may all start at once."""


def finish(preparation: Preparation, wait_s: float) -> None:
    """Waits for a preparation.

    Raises:
        PdserveError: It cannot be had.
        CapacityError: It is not ready after `wait_s` seconds.
    """
    try:
        preparation.result(wait_s)
    except TimeoutError:
        preparation.give_up()
        raise not_ready(wait_s) from None


def not_ready(wait_s: float) -> CapacityError:
    """The error for a grammar that was not compiled in time."""
    return CapacityError(
        f"structured_outputs: the grammar is not compiled after {wait_s:g} s; retry later",
        reason="GRAMMAR_NOT_READY",
        retry_after_s=max(wait_s, 1.0),
    )


@dataclass(slots=True)
class _Held:
    preparation: Preparation
    commands: list[Command]
    since_s: float


class PreparationGate:
    """Holds commands back; safe to use from several threads.

    Args:
        prepare: See `Prepare`.
        pass_on: Hands commands to the engine, all at once; may raise a PdserveError.
        fail: Tells that a held request, named by its key, fails.
        now: Monotonic seconds.
        call_later: Calls something after so many seconds, in whatever thread.
        wait_s: Longest time that a request is held, seconds.
    """

    def __init__(
        self,
        prepare: Prepare,
        pass_on: Callable[[Sequence[Command]], None],
        fail: Callable[[str, PdserveError], None],
        now: Callable[[], float],
        call_later: Callable[[float, Callable[[], None]], None],
        wait_s: float = PREPARE_WAIT_S,
    ) -> None:
        self._prepare, self._pass_on, self._fail = prepare, pass_on, fail
        self._now, self._call_later = now, call_later
        self._wait_s = wait_s
        self._lock = threading.RLock()  # what is done already calls back at once
        self._held: dict[str, _Held] = {}

    @property
    def num_held(self) -> int:
        """Sequences of requests that are not in the engine yet."""
        with self._lock:
            first = [held.commands[0] for held in self._held.values()]
        return len(first) + sum(len(command.forks) for command in first if isinstance(command, Add))

    def send(self, command: Command) -> None:
        """Takes a command; it goes on at once unless its request has to wait.

        Raises:
            PdserveError: The request cannot be served, or the engine takes no commands.
        """
        if isinstance(command, Add | Reserve):
            preparation = self._prepare(command.request.sampling)
            if preparation is not None and not preparation.done():
                self._hold(command.request.key, _Held(preparation, [command], self._now()))
                return
            if preparation is not None:
                preparation.result(0)
            self._pass_on([command])
            return
        with self._lock:
            commands = self._held[command.key].commands if command.key in self._held else []
            commands.append(command)
            if command.key in self._held:
                if not isinstance(command, Abort):
                    return
                self._held.pop(command.key).preparation.give_up()
            self._pass_on(commands)  # in one piece: it is added and aborted before anything is computed

    def _hold(self, key: str, held: _Held) -> None:
        with self._lock:
            self._held[key] = held
        held.preparation.on_done(lambda: self._end(key, held, None))
        self._call_later(self._wait_s, lambda: self._end(key, held, not_ready(self._wait_s)))

    def _end(self, key: str, held: _Held, error: PdserveError | None) -> None:
        """Lets a held request go on, or fails it. Nothing if it is held no more."""
        with self._lock:
            if self._held.get(key) is not held:
                return
            del self._held[key]
            try:
                if error is not None:
                    held.preparation.give_up()
                    raise error
                held.preparation.result(0)
                self._pass_on([self._postponed(command, held) for command in held.commands])
            except PdserveError as e:
                self._fail(key, e)

    def _postponed(self, command: Command, held: _Held) -> Command:
        """A reservation begins to wait for pages only now."""
        if not isinstance(command, Reserve):
            return command
        return replace(command, expires_s=command.expires_s + self._now() - held.since_s)
