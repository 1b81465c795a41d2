"""A whole deployment as real processes on loopback, for end-to-end and fault tests."""

from __future__ import annotations

import re
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from pdserve.cli.processes import Child, service_command, stop_all
from pdserve.client import Client
from tests.support.redis_server import redis_server

READY_TIMEOUT_S = 120.0
_METRIC = re.compile(r"^([a-zA-Z_:][\w:]*)(\{.*\})?\s+(\S+)$")


class Deployment:
    """Store, workers and one router; started by `deploy`.

    Args:
        directory: For logs.
        redis_url: The store.
        model: Model directory, or "fake".
        flags: Engine flags of every worker.
        router_flags: Flags of the router.
        env: Extra environment of every process.
        common_flags: Flags of every process.
    """

    def __init__(
        self,
        directory: Path,
        redis_url: str,
        model: str,
        flags: Sequence[str] = (),
        router_flags: Sequence[str] = (),
        env: dict[str, str] | None = None,
        common_flags: Sequence[str] = (),
    ) -> None:
        self._directory = directory
        self._common = ["--redis-url", redis_url, "--metrics-port", "0", "--log-level", "debug", "--model", model]
        self._common += ["--served-model-name", "test-model", *common_flags]
        self._flags = [*flags, *(["--runner", "fake"] if model == "fake" else [])]
        self._router_flags = list(router_flags)
        self._env = env or {}
        self.children: dict[str, Child] = {}

    @property
    def address(self) -> str:
        """host:port of the router."""
        return self.children["router"].endpoints["grpc"]

    def client(self) -> Client:
        """A client of the router."""
        return Client(self.address)

    def start_worker(self, name: str, *more: str) -> Child:
        """Starts, or starts again, the worker `prefill-…`, `decode-…` or `mixed-…`."""
        role = name.split("-")[0]
        command = "prefill" if role == "prefill" else "decode"
        role_flags = [] if command == "prefill" else ["--role", role]
        argv = service_command(command, *self._common, "--worker-id", name, *role_flags, *self._flags, *more)
        return self._start(name, argv)

    def start_router(self, name: str = "router") -> Child:
        """Starts a router."""
        argv = service_command("router", *self._common, "--port", "0", "--router-id", name, *self._router_flags)
        return self._start(name, argv)

    def wait_ready(self) -> None:
        """Waits for every ready line and until the router routes."""
        for child in self.children.values():
            child.wait_ready(READY_TIMEOUT_S)
        with self.client() as client:
            wait_until(lambda: any(m.ready for m in client.models()), 30.0, "the router to have a route")

    def metric(self, child: str, name: str, **labels: str) -> float:
        """Sum of a metric's samples whose labels include `labels`; 0.0 when there is none."""
        with urllib.request.urlopen(f"http://{self.children[child].endpoints['metrics']}/metrics", timeout=10) as page:
            text = page.read().decode()
        total = 0.0
        for line in text.splitlines():
            match = _METRIC.match(line)
            if match and match[1] == name and all(f'{k}="{v}"' in (match[2] or "") for k, v in labels.items()):
                total += float(match[3])
        return total

    def all_pages_free(self, worker: str) -> bool:
        """True when the worker holds no page: all are free or cached."""
        free = self.metric(worker, "pdserve_engine_kv_free_pages")
        return free > 0 and free == self.metric(worker, "pdserve_engine_kv_pages")

    def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """Ends a process by a signal that leaves it no time, and waits for the end."""
        self.children[name].send_signal(how)
        assert self.children[name].wait(10.0)

    def logs(self) -> str:
        """The end of every log, for failure messages."""
        return "\n".join(f"--- {c.name}\n{c.log_tail()}" for c in self.children.values())

    def _start(self, name: str, argv: list[str]) -> Child:
        child = Child(name, argv, self._directory / f"{name}.log", env=self._env)
        self.children[name] = child
        return child

    def stop(self) -> None:
        """Drains everything."""
        routers = [c for n, c in self.children.items() if n.startswith("router")]
        workers = [c for n, c in self.children.items() if not n.startswith("router")]
        stop_all([routers, workers], 20.0)


@contextmanager
def deploy(
    directory: Path,
    model: str,
    workers: Sequence[str] = ("prefill-0", "decode-0"),
    flags: Sequence[str] = (),
    router_flags: Sequence[str] = (),
    env: dict[str, str] | None = None,
    common_flags: Sequence[str] = (),
    worker_flags: Mapping[str, Sequence[str]] | None = None,
) -> Iterator[Deployment]:
    """Starts a deployment, yields it ready, and drains it; `worker_flags` are flags of single workers, by name."""
    with redis_server() as redis_url:
        deployment = Deployment(directory, redis_url, model, flags, router_flags, env, common_flags)
        try:
            for name in workers:
                deployment.start_worker(name, *(worker_flags or {}).get(name, ()))
            deployment.start_router()
            deployment.wait_ready()
            yield deployment
        finally:
            deployment.stop()


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Polls a condition of another process until it holds.

    Raises:
        AssertionError: It did not hold within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.02)
