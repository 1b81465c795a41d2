"""Data planes that whole deployments meet faults on: the first with the fast tests, all others with the slow ones."""

from __future__ import annotations

import importlib.util
import json

import pytest

from pdserve.kvtransfer import nixl

PACKAGES = {"nixl": nixl.PACKAGES, "mooncake": ("mooncake",)}
INSTALLED = [name for name, packages in PACKAGES.items() if any(importlib.util.find_spec(p) for p in packages)]
DEPLOYED = ("tcp", "shm", *INSTALLED)
PARAMS = [pytest.param(name, marks=[] if i == 0 else pytest.mark.slow) for i, name in enumerate(DEPLOYED)]


def plane_flags(name: str) -> list[str]:
    """Flags of workers that have this plane only."""
    return ["--kv-transfer-config", json.dumps({"transports": [name]})]
