"""The processes of one system: started on given cores, watched for what they use, and ended by process id in any case.

A process dies with its parent (PR_SET_PDEATHSIG), so nothing outlives a bench that was killed; what a system starts
itself is followed by process id, for some of it runs in sessions of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

SAMPLE_S = 1.0
END_GRACE_S = 15.0
LOG_TAIL_LINES = 12
# Replaced by the program once its death is tied to ours and its cores are set; done after exec, as code between fork
# and exec would run beside other threads' locks.
_SUPERVISED = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.sched_setaffinity(0, [int(core) for core in sys.argv[2].split(",")])
os.execvpe(sys.argv[3], sys.argv[3:], os.environ)
"""


class SystemFailed(Exception):
    """A system could not be started, or broke.

    Args:
        reason: For people; may end with lines of a log.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Command:
    """One process to start.

    Attributes:
        name: Names the log file.
        argv: Command line.
        cores: Cores that it and its children may use.
        env: Variables to set.
        unset: Variables to leave out.
    """

    name: str
    argv: tuple[str, ...]
    cores: tuple[int, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a tree of processes has used since its start.

    Attributes:
        cpu_s: CPU time of all of them, seconds.
        peak_bytes: Highest sum of their resident memory, sampled; pages that they share count in each.
        peak_process_bytes: Highest resident memory of any one of them.
    """

    cpu_s: float
    peak_bytes: int
    peak_process_bytes: int


class Processes:
    """Starts commands and owns them and all their descendants until `end`.

    Args:
        commands: What to start.
        log_dir: Existing directory for their output.

    Raises:
        SystemFailed: A program is not there.
    """

    def __init__(self, commands: Sequence[Command], log_dir: Path) -> None:
        self._log_dir = log_dir
        self._roots: list[tuple[Command, subprocess.Popen[bytes]]] = []
        self._seen: dict[psutil.Process, float] = {}
        self._peak_bytes = self._peak_process_bytes = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._sampler = threading.Thread(target=self._sample, name="peers-usage", daemon=True)
        self.started_s = time.monotonic()
        try:
            for command in commands:
                self._roots.append((command, self._start(command)))
        except OSError as e:
            self.end()
            raise SystemFailed(f"{command.argv[0]} cannot be started: {e.strerror}") from e
        self._sampler.start()

    def wait_ready(self, probe: Callable[[], bool], timeout_s: float) -> float:
        """Waits until `probe` says yes.

        Returns:
            Seconds since the start.

        Raises:
            SystemFailed: A process ended, or the time is over.
        """
        while not probe():
            self.check()
            if time.monotonic() - self.started_s > timeout_s:
                raise SystemFailed(f"not ready within {timeout_s:g} s\n{self.log_tail()}")
            time.sleep(0.05)
        return time.monotonic() - self.started_s

    def wait_all(self, timeout_s: float) -> int:
        """Waits for the end of all commands; returns the first exit status that is not 0, else 0.

        Raises:
            SystemFailed: The time is over.
        """
        deadline = time.monotonic() + timeout_s
        try:
            codes = [process.wait(max(0.0, deadline - time.monotonic())) for _, process in self._roots]
        except subprocess.TimeoutExpired:
            raise SystemFailed(f"not done within {timeout_s:g} s\n{self.log_tail()}") from None
        return next((code for code in codes if code), 0)

    def check(self) -> None:
        """Raises when a process has ended.

        Raises:
            SystemFailed: With its status and the end of its log.
        """
        for command, process in self._roots:
            if (status := process.poll()) is not None:
                raise SystemFailed(f"{command.name} ended with status {status}\n{self.log_tail()}")

    def usage(self) -> Usage:
        """What was used until now."""
        self._look()
        with self._lock:
            return Usage(
                cpu_s=sum(self._seen.values()),
                peak_bytes=self._peak_bytes,
                peak_process_bytes=self._peak_process_bytes,
            )

    def pids(self) -> list[int]:
        """Ids of all processes that were seen, ended or not."""
        self._look()
        with self._lock:
            return [process.pid for process in self._seen]

    def log(self, command: Command) -> str:
        """All output of a command until now."""
        return self._log(command).read_text(errors="replace")

    def log_tail(self) -> str:
        """The last lines of every command's output, indented."""
        lines = []
        for command, _ in self._roots:
            with suppress(OSError):
                lines += self._log(command).read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join("    " + line[:300] for line in lines)

    def end(self) -> None:
        """Asks all commands to end, then ends what is left of them and of their descendants. Can be called again."""
        self._ended.set()
        with _undisturbed():
            self._look(thorough=True)
            for _, process in self._roots:
                process.terminate()
            deadline = time.monotonic() + END_GRACE_S
            for _, process in self._roots:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
            self._look(thorough=True)
            with self._lock:
                left = list(self._seen)
            _, alive = psutil.wait_procs(left, timeout=0.5)
            for survivor in alive:
                with suppress(psutil.NoSuchProcess):
                    survivor.kill()
            for _, process in self._roots:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(5.0)
            psutil.wait_procs(alive, timeout=5.0)

    def _start(self, command: Command) -> subprocess.Popen[bytes]:
        env = {name: value for name, value in os.environ.items() if name not in command.unset}
        cores = ",".join(map(str, command.cores))
        with self._log(command).open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _SUPERVISED, str(os.getpid()), cores, *command.argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**env, **command.env},
                start_new_session=True,
            )

    def _log(self, command: Command) -> Path:
        return self._log_dir / f"{command.name}.log"

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self._look()

    def _look(self, thorough: bool = False) -> None:
        """Notes who is there, and what they use. A process that has ended keeps its last CPU time.

        Args:
            thorough: Also search for children of processes whose parents are gone.
        """
        used: dict[psutil.Process, float] = {}
        resident, largest = 0, 0
        for process in self._tree(thorough):
            try:
                with process.oneshot():
                    times, memory = process.cpu_times(), process.memory_info().rss
            except psutil.Error:
                continue  # it has just ended
            used[process] = times.user + times.system
            resident += memory
            largest = max(largest, memory)
        with self._lock:
            self._seen.update(used)
            self._peak_bytes = max(self._peak_bytes, resident)
            self._peak_process_bytes = max(self._peak_process_bytes, largest)

    def _tree(self, thorough: bool) -> set[psutil.Process]:
        with self._lock:
            known = set(self._seen)
        parents = set(known) if thorough else set()
        for _, process in self._roots:
            with suppress(psutil.Error):
                if process.returncode is None:
                    parents.add(psutil.Process(process.pid))
        found = known | parents
        for parent in parents:
            with suppress(psutil.Error):
                found.update(parent.children(recursive=True))
        return found


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """A block in which SIGTERM does what Ctrl-C does: everything that was started is ended."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """A block that Ctrl-C and SIGTERM do not interrupt; what they ask for is done anyway."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
