"""What `check.sh` runs on a GPU, where it can run without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_check_is_a_shell_script() -> None:
    subprocess.run(["bash", "-n", ROOT / "tests/gpu/check.sh"], check=True, timeout=20)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["steps", "pair"])
def test_the_engine_parts_on_the_cpu(part: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.engine", part, "--cpu"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "BAD" not in done.stdout and ("equal tokens 3/3" in done.stdout or "prompt of  417  ok" in done.stdout)
