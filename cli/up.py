"""`pdserve up`: the whole system on this machine, from an empty cache to a streamed answer.

Model -> store -> workers and router (together) -> ready -> one sample request -> stays up until Ctrl-C, which drains
router, workers and store in this order. A worker or store that dies is started again.
"""

from __future__ import annotations

import fcntl
import queue
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.markup import escape

from pdserve.cli.processes import Child, service_command, stop_all, store_command, usable_cores, warnings_of
from pdserve.cli.progress import RichProgress
from pdserve.cli.sample import run_sample
from pdserve.client import PdserveError
from pdserve.core.config import ENV_PREFIX, WorkerConfig, build_parser, check, flag_name, from_namespace, heeds, option
from pdserve.core.errors import ConfigError, UnavailableError
from pdserve.core.kv_transfer_config import KvTransferConfig
from pdserve.core.net import check_port_free
from pdserve.core.tls import Tls, TlsConfig, load_tls
from pdserve.engine.config import EngineConfig

DESCRIPTION = """\
Start pdserve on this machine: a store (embedded Valkey, unless --redis-url), prefill and decode workers, and a router;
then answer one sample prompt, show where its time went, and stay up until Ctrl-C.

  pdserve up                          one prefill worker, one decode worker
  pdserve up --prefill 2 --decode 2   two of each
  pdserve up --prefill 0 --decode 0 --mixed 1    one worker that does both
"""

READY_TIMEOUT_S = 300.0
SERVING_TIMEOUT_S = 30.0
MAX_RESTARTS = 5


@dataclass(frozen=True, kw_only=True)
class UpConfig:
    """What `pdserve up` starts, and where."""

    prefill: int = option(1, "workers that compute prompts", unit="workers", minimum=0, maximum=64)
    decode: int = option(1, "workers that generate", unit="workers", minimum=0, maximum=64)
    mixed: int = option(0, "workers that do both themselves", unit="workers", minimum=0, maximum=64)
    host: str = option("127.0.0.1", "address that the router listens on; workers and store stay on loopback")
    port: int = option(50051, "router's gRPC port; 0 picks a free one", minimum=0, maximum=65535)
    redis_url: str | None = option(None, "use this Redis or Valkey instead of an embedded one")
    data_dir: str | None = option(
        None, "directory of the embedded store and the logs; default: up-PORT in the cache directory"
    )
    kv_transfer_config: str | None = option(
        None, "of every worker: how KV pages travel, as JSON or a file with it; see pdserve prefill --help"
    )
    otlp_traces_endpoint: str | None = option(None, "OTLP gRPC endpoint for traces, e.g. http://127.0.0.1:4317")
    log_level: str = option("info", "least severe log lines kept", choices=("debug", "info", "warning", "error"))
    sample: bool = option(True, "answer a sample prompt once everything is ready")
    sample_prompt: str = option("What is the capital of France? Answer in one sentence.", "the sample prompt")
    exit_after_sample: bool = option(False, "drain and end after the sample prompt instead of staying up")
    drain_grace_s: float = option(30.0, "time that running requests get after Ctrl-C", unit="s", minimum=0)

    def __post_init__(self) -> None:
        check(self)
        KvTransferConfig.parse(self.kv_transfer_config)
        if self.mixed == 0 and (self.prefill == 0 or self.decode == 0):
            raise ConfigError(
                f"--prefill {self.prefill} --decode {self.decode} cannot serve: "
                "start at least one of each, or --mixed 1"
            )
        if self.mixed > 0 and (self.prefill == 0) != (self.decode == 0):
            raise ConfigError("--prefill and --decode go together: give both at least one worker, or set both to 0")

    @property
    def num_workers(self) -> int:
        """Workers in all."""
        return self.prefill + self.decode + self.mixed


SECTIONS = {"Launcher": UpConfig, "TLS": TlsConfig, "Engine of every worker": EngineConfig}
_OURS = frozenset(ENV_PREFIX + f.name.upper() for cls in SECTIONS.values() for f in fields(cls))
"""Variables that our options are read from. Children hear of them by flags: the router's port is no worker's."""


def main(argv: Sequence[str]) -> int:
    """Runs `pdserve up`; returns the exit status."""
    parser = build_parser("pdserve up", DESCRIPTION, SECTIONS)
    _refuse_flags_of_workers(argv)
    up, tls, engine = from_namespace(SECTIONS, parser.parse_args(argv))
    if up.prefill or up.decode:
        engine.check_hand_offs("--prefill 0 --decode 0 --mixed 1")
    _check_planes(up, load_tls(tls))
    return Launcher(up, tls, engine, Console(highlight=False)).run()


def _refuse_flags_of_workers(argv: Sequence[str]) -> None:
    """Says how a worker's option that we have no flag for can be set all the same."""
    flags = {flag_name(f.name): f.name for f in fields(WorkerConfig)}
    flags = {flag: name for flag, name in flags.items() if ENV_PREFIX + name.upper() not in _OURS}
    for word in argv:
        if (name := flags.get(word.partition("=")[0])) is not None:
            raise ConfigError(
                f"{flag_name(name)} is an option of workers: set {ENV_PREFIX}{name.upper()} in the environment, or "
                "start store, workers and router by hand (docs/operations.md)"
            )


def _check_planes(up: UpConfig, tls: Tls | None) -> None:
    """Says what each worker would say, before anything starts."""
    if up.kv_transfer_config is not None:
        from pdserve.kvtransfer.planes import check_planes

        check_planes(KvTransferConfig.parse(up.kv_transfer_config).transports, tls)


class Launcher:
    """Owns the processes of one deployment.

    Args:
        up: What to start.
        tls: TLS options, handed to all but the store.
        engine: Engine options, handed to every worker; those of swapping not to prefill.
        console: Where people read.
    """

    def __init__(self, up: UpConfig, tls: TlsConfig, engine: EngineConfig, console: Console) -> None:
        self._up = up
        self._tls = tls
        self._engine = engine
        self._console = console
        self._ended: queue.SimpleQueue[Child | None] = queue.SimpleQueue()
        self._router: Child | None = None
        self._workers: list[Child] = []
        self._store: Child | None = None
        self._lock: IO[str] | None = None
        self._restarts = 0
        self._stopping = False
        self._interruptible = False

    def run(self) -> int:
        """Starts everything, shows the sample, stays up, drains. Returns the exit status."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        try:
            self._start()
            if self._up.sample:
                with self._interrupted_by_signals():
                    run_sample(self._console, self._router_address(), self._up.sample_prompt)
            if not self._up.exit_after_sample and not self._stopping:
                self._print_endpoints()
                self._stay_up()
        except UnavailableError as e:
            self._console.print(f"[bold red]pdserve up:[/] {escape(e.message)}", soft_wrap=True)
            return 1
        except PdserveError as e:
            told = escape(f"the sample failed: {e.message} ({e.reason}); logs: {self._logs}")
            self._console.print(f"\n[bold red]pdserve up:[/] {told}", soft_wrap=True)
            return 1
        except KeyboardInterrupt:
            self._console.print("stopping before the start was complete")
            return 130
        finally:
            self._stop()
        return 0

    # ---- start ------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        data_dir = self._claim_data_dir()
        began = time.monotonic()
        check_port_free(self._up.host, self._up.port)
        with RichProgress(self._console) as progress:
            with self._interrupted_by_signals():
                model_dir = _resolve_model(self._engine, progress)
            redis_url = self._up.redis_url or self._start_store(data_dir)
            self._model_flags = ["--model", model_dir, "--served-model-name", _served_name(self._engine)]
            self._common = ["--redis-url", redis_url, "--log-level", self._up.log_level]
            self._common += ["--drain-grace-s", str(self._up.drain_grace_s), "--metrics-port", "0"]
            if self._up.otlp_traces_endpoint:
                self._common += ["--otlp-traces-endpoint", self._up.otlp_traces_endpoint]
            self._common += _flags(self._tls)
            self._logs = data_dir / "logs"
            for role, count in (("prefill", self._up.prefill), ("decode", self._up.decode), ("mixed", self._up.mixed)):
                for i in range(count):
                    self._workers.append(self._start_worker(role, f"{role}-{i}"))
            self._router = self._start_router()
            starting = ", ".join(child.name for child in (*self._workers, self._router))
            with progress.task(f"starting {starting}"), self._interrupted_by_signals():
                for child in (*self._workers, self._router):
                    if not child.wait_ready(READY_TIMEOUT_S, self._is_stopping):
                        raise KeyboardInterrupt
            with progress.task("waiting until the router's health says SERVING"), self._interrupted_by_signals():
                _wait_serving(self._router_address(), SERVING_TIMEOUT_S)
        self._console.print(f"[bold green]SERVING[/] after {time.monotonic() - began:.1f} s")
        for text in warnings_of([*self._workers, self._router]):
            self._console.print(f"[yellow]warning[/] {escape(text)}", soft_wrap=True)

    def _claim_data_dir(self) -> Path:
        from pdserve.engine.model_store import cache_dir

        data_dir = Path(self._up.data_dir) if self._up.data_dir else cache_dir() / f"up-{self._up.port}"
        try:
            for directory in (data_dir / "store", data_dir / "logs"):
                directory.mkdir(parents=True, exist_ok=True)
            self._lock = (data_dir / "lock").open("w")
        except OSError as e:
            raise ConfigError(f"cannot write to {data_dir}: {e.strerror}; give another --data-dir") from e
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another pdserve up uses {data_dir}; stop it, or give this one another --port or --data-dir"
            ) from None
        return data_dir

    def _start_store(self, data_dir: Path) -> str:
        port = _free_port()
        log_path = (data_dir / "logs" / "store.log").absolute()
        command = store_command(port, data_dir / "store", log_path)
        self._store = self._child("store", command, log_path)
        _wait_listening(self._store, port, 10.0)
        return f"redis://127.0.0.1:{port}/0"

    def _start_worker(self, role: str, name: str) -> Child:
        command = "prefill" if role == "prefill" else "decode"
        flags = [*self._common, *self._model_flags, "--worker-id", name]
        flags += ["--role", role] if command == "decode" else []
        if self._up.kv_transfer_config is not None:
            flags += ["--kv-transfer-config", self._up.kv_transfer_config]
        engine = self._engine.for_prefill() if role == "prefill" else self._engine
        threads = engine.threads or threads_of(role, self._up, usable_cores())
        others = [f.name for f in fields(EngineConfig) if not heeds(role, f)]
        flags += _flags(replace(engine, threads=threads), but=("model", "served_model_name", *others))
        return self._child(name, service_command(command, *flags), self._logs / f"{name}.log")

    def _start_router(self) -> Child:
        flags = [*self._common, *self._model_flags, "--host", self._up.host, "--port", str(self._up.port)]
        flags += ["--router-id", "router-0"]
        return self._child("router", service_command("router", *flags), self._logs / "router.log")

    def _child(self, name: str, argv: Sequence[str], log_path: Path) -> Child:
        return Child(name, argv, log_path, on_exit=self._ended.put, without=_OURS)

    # ---- stay up ----------------------------------------------------------------------------------------------------

    def _stay_up(self) -> None:
        while not self._stopping:
            child = self._ended.get()
            if child is None or self._stopping:
                return
            self._console.print(f"[bold red]{child.name}[/] ended with status {child.returncode}:")
            self._console.print(child.log_tail(), markup=False)
            if child is self._router or self._restarts >= MAX_RESTARTS:
                raise UnavailableError(f"{child.name} ended; see {child.log_path}", reason="CHILD_ENDED")
            self._restarts += 1
            self._console.print(f"starting {child.name} again ...")
            fresh = self._child(child.name, child.argv, child.log_path)
            if child is self._store:
                self._store = fresh
                continue
            self._workers[self._workers.index(child)] = fresh
            if not fresh.wait_ready(READY_TIMEOUT_S, self._is_stopping):
                return
            self._console.print(f"{child.name} started again")

    def _is_stopping(self) -> bool:
        return self._stopping

    @contextmanager
    def _interrupted_by_signals(self) -> Iterator[None]:
        """A block that waits and that a signal ends. Outside of one no child can be lost between fork and assignment.

        Long waits ask `_is_stopping` too: Python drops an exception that is raised within a destructor.
        """
        if self._stopping:
            raise KeyboardInterrupt
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False

    def _on_signal(self, number: int, frame: object) -> None:
        if self._stopping:
            for child in self._children():
                child.kill()
            return
        self._stopping = True
        self._ended.put(None)
        if self._interruptible:
            raise KeyboardInterrupt

    def _stop(self) -> None:
        self._stopping = True
        if children := self._children():
            self._console.print("draining (Ctrl-C again ends at once) ...")
            for child in children:
                if child is not self._store and not child.endpoints:
                    child.kill()  # never ready: there is nothing to drain
            stop_all(self._groups(), self._up.drain_grace_s + 10.0)
            self._console.print("all processes ended")
        if self._lock is not None:
            self._lock.close()

    def _children(self) -> list[Child]:
        return [child for group in self._groups() for child in group]

    def _groups(self) -> tuple[list[Child], ...]:
        """The processes in the order in which they are drained."""
        return [self._router] if self._router else [], self._workers, [self._store] if self._store else []

    # ---- what people see --------------------------------------------------------------------------------------------

    def _router_address(self) -> str:
        assert self._router is not None
        return self._router.endpoints["grpc"]

    def _print_endpoints(self) -> None:
        self._console.print("\n[bold]Endpoints[/]")
        for child in self._children():
            if child.endpoints:
                shown = "  ".join(f"{k} {v}" for k, v in child.endpoints.items() if v != "-")
                self._console.print(f"  {child.name:<12} {shown}", soft_wrap=True)
        address = self._router_address()
        self._console.print(f"\nLogs: {self._logs}", soft_wrap=True)
        question = 'generate --chat "Tell me a joke." --temperature 0'
        self._console.print(f"Try:  {_command()} {question} --router {address}", soft_wrap=True)
        self._console.print(f"      {_command()} status --router {address}", soft_wrap=True)
        self._console.print("Ctrl-C drains and stops everything.")
        sys.stdout.flush()


def threads_of(role: str, up: UpConfig, num_cores: int) -> int:
    """Threads of one worker: the cores, divided among the workers of its role.

    Prefill and decode workers each get all cores: while one role waits for the other, nothing is idle. Workers of one
    role are busy at the same times, and more threads than cores would stall each other.
    """
    return max(1, num_cores // int(getattr(up, role)))


def _command() -> str:
    """How this program is called from where the person stands."""
    called = sys.argv[0]
    return "pdserve" if Path(called).name != "pdserve" or shutil.which("pdserve") == called else called


def _resolve_model(engine: EngineConfig, progress: RichProgress) -> str:
    if engine.runner == "fake":
        return "fake"
    from pdserve.engine.model_store import resolve_model

    return str(resolve_model(engine.model, progress))


def _served_name(engine: EngineConfig) -> str:
    if engine.served_model_name:
        return engine.served_model_name
    return "fake" if engine.runner == "fake" else Path(engine.model).name


def _flags(config: EngineConfig | TlsConfig, but: Sequence[str] = ()) -> list[str]:
    """Flags that make another process's section equal to ours."""
    flags: list[str] = []
    for f in fields(config):
        value, name = getattr(config, f.name), flag_name(f.name)
        if f.name in but or value is None or value == f.default:
            continue
        if isinstance(value, bool):
            flags.append(name if value else name.replace("--", "--no-", 1))
        else:
            flags += [name, str(value)]
    return flags


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _wait_listening(store: Child, port: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        if _answers(port):
            return
        if store.wait(0.05) or time.monotonic() > deadline:
            raise UnavailableError(f"the store did not start:\n{store.log_tail()}", reason="CHILD_ENDED")


def _answers(port: int) -> bool:
    """Whether a store answers: it listens before it has read its files, on which it may end."""
    try:
        with socket.create_connection(("127.0.0.1", port), 0.5) as s:
            s.sendall(b"PING\r\n")
            return bool(s.recv(1))
    except OSError:
        return False


def _wait_serving(address: str, timeout_s: float) -> None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="pdserve.v1.Inference")
        try:
            for answer in stub.Watch(request, timeout=timeout_s, wait_for_ready=True):
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
        except grpc.RpcError as e:
            raise UnavailableError(
                f"the router did not become SERVING within {timeout_s:g} s ({e.code().name}); see its log",
                reason="NOT_SERVING",
            ) from e
