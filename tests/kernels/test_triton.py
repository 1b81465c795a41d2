"""The Triton kernels without a GPU: cases in the interpreter, and the offline compiler, in processes of their own.

A process of the tests of `make test` may take so many seconds of CPU time, which other work on the machine does not
stretch; the limit on real time is for one that hangs.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HANG_S = 540
PATIENT = pytest.mark.timeout(HANG_S + 60)


def run(*command: str, timeout_s: float = HANG_S, cpu_s: int | None = None, **env: str) -> str:
    """Output of a Python process that must succeed, within `cpu_s` seconds of CPU time."""

    def limit() -> None:
        if cpu_s is not None:
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))

    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        preexec_fn=limit,
    )
    print(done.stdout)  # noqa: T201 - the errors and the table, for the report of a failure or of -s
    status = f"exit status {done.returncode} (-9: more than {cpu_s} s of CPU time)"
    assert done.returncode == 0, f"{status}\n{done.stdout[-4000:]}"
    return done.stdout


@PATIENT
def test_representative_cases() -> None:
    run("-m", "tests.kernels.triton_cases", "decode_small", "prefill_small", "store_small", "fp8_bits", cpu_s=90)


@pytest.mark.slow
def test_all_cases() -> None:
    run("-m", "tests.kernels.triton_cases", timeout_s=800)


@pytest.mark.slow
def test_kernels_compile_for_every_architecture(tmp_path: Path) -> None:
    table = run("scripts/compile_kernels.py", timeout_s=850, TRITON_CACHE_DIR=str(tmp_path))
    assert "wgmma" in table and "tcgen05" in table and "mfma" in table


@PATIENT
def test_the_cpu_path_imports_no_triton() -> None:
    run(
        "-c",
        "import sys, torch; sys.modules['triton'] = None; from pdserve.kernels.dispatch import fused_for, kernels_for;"
        "cpu = torch.device('cpu');"
        "where = kernels_for(cpu).paged_attention.__module__, fused_for(cpu).rms_norm.__module__;"
        "assert all(w.startswith(('pdserve.kernels.reference', 'pdserve.kernels.cpu')) for w in where), where",
        cpu_s=60,
    )
