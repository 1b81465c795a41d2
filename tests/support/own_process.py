"""Test cases that need a process of their own, because what they load does not bear other libraries beside it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_cases(path: str, *words: str, timeout_s: float = 100.0) -> None:
    """Runs a file of tests, which pytest does not find by itself, in another process; fails with its output.

    Args:
        path: Of the file, below the repository.
        words: More words for pytest.
        timeout_s: Limit, seconds.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", path, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
