"""`pdserve up` as a person starts it: an answer, where its time went, endpoints; Ctrl-C leaves no process behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from pdserve.cli.processes import service_command
from pdserve.client import Client
from pdserve.client.errors import Unavailable
from tests.support.deployment import wait_until
from tests.support.redis_server import free_port


class Up:
    """A running `pdserve up` with its output so far."""

    def __init__(self, directory: Path, *flags: str, environ: Mapping[str, str] | None = None) -> None:
        argv = service_command("up", "--port", "0", "--data-dir", str(directory), *flags)
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "COLUMNS": "200", **(environ or {})},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.output or self.process.poll() is not None, 90, f"{text!r} in {self.output}")
        assert text in self.output, self.output

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


# Python runs it as it starts: the prefill worker stands still before it has loaded anything.
STANDS_STILL = """
import os, signal, sys
if "prefill-0" in sys.orig_argv:
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_answers_and_drains(tmp_path: Path, number: signal.Signals) -> None:
    # Options of the environment are the launcher's: were this port each worker's too, the second could not start.
    up = Up(tmp_path, "--runner", "fake", environ={"PDSERVE_PORT": str(free_port())})
    try:
        up.wait_for("Ctrl-C drains")
        for word in ("SERVING", "queue", "prefill", "transfer", "hand-off gap", "decode", "TTFT", "TPOT", "hidden"):
            assert word in up.output, up.output
        family = up.family()
        assert len(family) == 4, [p.cmdline() for p in family]
        up.process.send_signal(number)
        assert up.process.wait(40) == 0, up.output
        assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    finally:
        up.end()


def test_killed_launcher_leaves_nothing_behind(tmp_path: Path) -> None:
    up = Up(tmp_path, "--runner", "fake", "--no-sample")
    try:
        up.wait_for("Ctrl-C drains")
        family = up.family()
        up.process.kill()
        gone, alive = psutil.wait_procs(family, timeout=40)
        assert not alive and len(gone) == 4
    finally:
        up.end()


def test_scales_and_restarts_a_dead_worker(tmp_path: Path) -> None:
    up = Up(tmp_path, "--runner", "fake", "--no-sample", "--prefill", "2", "--decode", "2")
    try:
        up.wait_for("Ctrl-C drains")
        address = next(line.split("--router ")[1].strip() for line in up.lines if "pdserve status --router" in line)
        with Client(address) as client:

            def incarnations() -> dict[str, str]:
                return {w.worker_id: w.incarnation for m in client.models() for w in m.workers if w.state == "ready"}

            wait_until(lambda: len(incarnations()) == 4, 20, "four ready workers")
            before = incarnations()
            victim = next(p for p in up.family() if "decode-1" in p.cmdline())
            victim.kill()
            up.wait_for("decode-1 started again")
            wait_until(lambda: incarnations() != before and len(incarnations()) == 4, 20, "four ready workers again")
            changed = {name for name, value in incarnations().items() if before[name] != value}
            assert changed == {"decode-1"}
            assert len(client.generate(prompt_token_ids=[1, 2, 3], max_tokens=5).token_ids) == 5
    finally:
        up.end()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--prefill", "1", "--decode", "0"], ["at least one of each"]),
        (["--model", "/no/such/directory"], ["/no/such/directory"]),
        (["--decodes", "2"], ["--decodes"]),
        (["--page-size", "0"], ["--page-size", "at least 1"]),
        (["--runner", "fake", "--redis-url", "redis://127.0.0.1:1/0"], ["127.0.0.1:1"]),
    ],
)
def test_says_what_is_wrong(tmp_path: Path, flags: list[str], words: list[str]) -> None:
    up = Up(tmp_path, *flags)
    try:
        assert up.process.wait(60) in (1, 2)
        up.end()
        for word in words:
            assert word in up.output, up.output
        assert "Traceback" not in up.output
    finally:
        up.end()


def test_interrupted_while_a_worker_loads(tmp_path: Path) -> None:
    """The router is ready long before a model is loaded; Ctrl-C ends the start all the same."""
    port = free_port()
    (tmp_path / "sitecustomize.py").write_text(STANDS_STILL)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = ["--runner", "fake", "--drain-grace-s", "0", "--port", str(port)]
    up = Up(tmp_path, *words, environ={"PYTHONPATH": path})
    try:
        wait_until(lambda: listens(port), 60, "the router to listen")
        with Client(f"127.0.0.1:{port}") as client:
            wait_until(lambda: any(w.state == "ready" for m in client.models() for w in m.workers), 60, "a worker")
        family = up.family()
        up.process.send_signal(signal.SIGINT)
        up.wait_for("stopping before the start was complete")
        assert up.process.wait(40) == 130, up.output
        assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    finally:
        up.end()


def listens(port: int) -> bool:
    with socket.socket() as s:
        s.settimeout(1)
        return s.connect_ex(("127.0.0.1", port)) == 0


def test_a_dead_store_is_started_again(tmp_path: Path) -> None:
    up = Up(tmp_path, "--runner", "fake", "--no-sample")
    try:
        up.wait_for("Ctrl-C drains")
        address = next(line.split("--router ")[1].strip() for line in up.lines if "pdserve status --router" in line)
        next(p for p in up.family() if "valkey-server" in p.name() or "redis-server" in p.name()).kill()
        up.wait_for("store ended")

        def serves() -> bool:
            try:
                return len(client.generate(prompt_token_ids=[1, 2, 3], max_tokens=5).token_ids) == 5
            except Unavailable as e:
                assert e.reason == "STORE_UNAVAILABLE"
                return False

        with Client(address) as client:
            wait_until(serves, 20, "the store to answer again")
    finally:
        up.end()


def test_says_why_the_store_does_not_start(tmp_path: Path) -> None:
    broken = tmp_path / "store" / "appendonlydir"
    broken.mkdir(parents=True)
    (broken / "appendonly.aof.manifest").write_text("garbage")
    up = Up(tmp_path, "--runner", "fake")
    try:
        assert up.process.wait(60) == 1
        up.end()
        assert "manifest" in up.output and "Traceback" not in up.output, up.output
    finally:
        up.end()


def test_says_that_the_data_directory_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("no directory")
    up = Up(tmp_path, "--runner", "fake")
    try:
        assert up.process.wait(60) == 2
        up.end()
        assert "--data-dir" in up.output and "Traceback" not in up.output, up.output
    finally:
        up.end()
