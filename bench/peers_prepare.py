"""What must be there before anything is compared: environments, the weights as GGUF, and what the machine can do."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from safetensors import safe_open

from pdserve.bench.peers_args import PeersConfig, Suite
from pdserve.bench.peers_env import build, recipes
from pdserve.bench.peers_limits import Limits
from pdserve.bench.peers_process import Command, Processes, SystemFailed
from pdserve.bench.peers_systems import Place
from pdserve.engine.model_store import cache_dir, weights_digest
from pdserve.engine.models.headers import weight_files

MAX_MODEL_LEN = 1024
MIN_NUM_SEQS = 16  # the same for all loads up to it: what vLLM compiles depends on it
GGUF_TIMEOUT_S = 600.0
LIMITS_TIMEOUT_S = 120.0


def prepare(
    config: PeersConfig, model: Path, suites: Sequence[Suite], scratch: Path, say: Callable[[str], None]
) -> tuple[Place, dict[str, str]]:
    """Builds environments and GGUF files.

    Returns:
        Where systems start, and system -> why it cannot be built.
    """
    root, cores = cache_dir() / "peers", config.usable_cores()
    pythons: dict[str, Path] = {}
    gguf: dict[str, Path] = {}
    failed: dict[str, str] = {}
    unbuilt: dict[str, str] = {}
    known = recipes(config.build_jobs)
    for system in {s.name: s for suite in suites for s in suite.systems}.values():
        try:
            if (name := system.environment) is not None and name not in pythons:
                if name in failed:
                    raise SystemFailed(failed[name])
                pythons[name] = build(known[name], root, cores, say)
            if (kind := system.gguf) is not None and kind not in gguf:
                gguf[kind] = _gguf(model, kind, root, cores)
        except SystemFailed as e:
            unbuilt[system.name] = e.reason
            if system.environment not in pythons:
                failed[str(system.environment)] = e.reason
            say(f"{system.name} could not be built: {e.reason}")
    place = Place(
        model=model,
        gguf=gguf,
        pythons=pythons,
        cores=cores,
        scratch=scratch,
        cache=root / "cache",
        max_num_seqs=max(MIN_NUM_SEQS, *(level.concurrency for suite in suites for level in suite.levels)),
        max_model_len=MAX_MODEL_LEN,
    )
    return place, unbuilt


def num_params(model: Path) -> int:
    """Weights in a model's files; tied ones count once. The embedding counts: it is the last product of a step."""
    total = 0
    for file in weight_files(model):
        with safe_open(file, framework="numpy") as weights:
            total += sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    return total


def _gguf(model: Path, kind: str, root: Path, cores: tuple[int, ...]) -> Path:
    """Writes the model as GGUF, or finds it."""
    path = root / "gguf" / f"{weights_digest(model)}-{kind}.gguf"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        try:
            _run_tool(
                f"gguf-{kind}", ("pdserve.bench.peers_gguf", str(model), str(partial), kind), cores, GGUF_TIMEOUT_S
            )
            partial.rename(path)
        finally:
            partial.unlink(missing_ok=True)
    return path


def measure_limits(place: Place) -> Limits:
    """Measures the machine, on the cores of the comparison.

    Raises:
        SystemFailed: It cannot be measured.
    """
    threads = str(len(place.cores))
    output = _run_tool("limits", ("pdserve.bench.peers_limits", threads), place.cores, LIMITS_TIMEOUT_S)
    return Limits(**json.loads(output.splitlines()[-1]))


def _run_tool(name: str, words: tuple[str, ...], cores: tuple[int, ...], timeout_s: float) -> str:
    """Runs one of our modules in a process of its own and returns what it printed.

    Raises:
        SystemFailed: It failed, or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="pdserve-tool-") as logs:
        command = Command(name=name, argv=(sys.executable, "-m", *words), cores=cores)
        processes = Processes([command], Path(logs))
        try:
            if status := processes.wait_all(timeout_s):
                raise SystemFailed(f"{name} ended with status {status}\n{processes.log_tail()}")
        finally:
            processes.end()
        return (Path(logs) / f"{name}.log").read_text()
