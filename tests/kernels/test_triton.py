"""The Triton kernels without a GPU: cases in the interpreter, and the offline compiler, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, timeout_s: float, **env: str) -> str:
    """Output of a Python process that must succeed."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    print(done.stdout)  # noqa: T201 - the errors and the table, for the report of a failure or of -s
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def test_representative_cases() -> None:
    run("-m", "tests.kernels.triton_cases", "decode_small", "prefill_small", "store_small", timeout_s=110)


@pytest.mark.slow
def test_all_cases() -> None:
    run("-m", "tests.kernels.triton_cases", timeout_s=800)


@pytest.mark.slow
def test_kernels_compile_for_every_architecture(tmp_path: Path) -> None:
    table = run("scripts/compile_kernels.py", timeout_s=850, TRITON_CACHE_DIR=str(tmp_path))
    assert "wgmma" in table and "tcgen05" in table and "mfma" in table


def test_the_cpu_path_imports_no_triton() -> None:
    run(
        "-c",
        "import sys, torch; sys.modules['triton'] = None; from pdserve.kernels.dispatch import fused_for, kernels_for;"
        "cpu = torch.device('cpu');"
        "where = kernels_for(cpu).paged_attention.__module__, fused_for(cpu).rms_norm.__module__;"
        "assert all(w.startswith(('pdserve.kernels.reference', 'pdserve.kernels.cpu')) for w in where), where",
        timeout_s=110,
    )
