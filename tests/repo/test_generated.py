"""What is generated and committed is what the generator says now."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from tests.support.tools import missing

ROOT = Path(__file__).resolve().parents[2]


def test_generated_protos_are_current(tmp_path: Path) -> None:
    if importlib.util.find_spec("grpc_tools") is None:  # not imported: it clashes with libraries that other tests load
        missing("grpcio-tools is not installed (make test installs it)")
    sources = sorted((ROOT / "protos").rglob("*.proto"))
    assert sources
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"-I{ROOT / 'protos'}",
            f"--python_out={tmp_path}",
            f"--pyi_out={tmp_path}",
            f"--grpc_python_out={tmp_path}",
            *map(str, sources),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    fresh = {p.relative_to(tmp_path): p.read_text() for p in tmp_path.rglob("*.py*")}
    committed = {
        p.relative_to(ROOT / "protos"): p.read_text()
        for p in (ROOT / "protos").rglob("*_pb2*.py*")
        if "__pycache__" not in p.parts
    }
    assert set(fresh) == set(committed)
    stale = [str(path) for path in fresh if fresh[path] != committed[path]]
    assert stale == [], "run make protos and commit the result"


def test_our_kernels_folder_does_not_pass_for_a_package() -> None:
    """transformers looks for a package `kernels` before it imports from it; our folder of that name is none."""
    code = "from transformers.utils.import_utils import is_kernels_available; print(is_kernels_available())"
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(_installed("kernels"))


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def test_sdk_needs_grpc_and_protobuf_only() -> None:
    """`pip install pdserve` is the client: importing it pulls in nothing of the server extra."""
    code = (
        "import sys, pdserve.client; "
        "heavy = {'torch', 'transformers', 'redis', 'numpy', 'opentelemetry', 'prometheus_client'} & set(sys.modules); "
        "sys.exit(f'imports {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
