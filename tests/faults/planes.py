"""Data planes that whole deployments meet faults on: the first with the fast tests, all others with the slow ones."""

from __future__ import annotations

import importlib.util
import json

import pytest

from pdserve.kvtransfer import nixl

INSTALLED = any(importlib.util.find_spec(name) for name in nixl.PACKAGES)
DEPLOYED = ("tcp", "shm", *(["nixl"] if INSTALLED else []))
PARAMS = [pytest.param(name, marks=[] if i == 0 else pytest.mark.slow) for i, name in enumerate(DEPLOYED)]


def plane_flags(name: str) -> list[str]:
    """Flags of workers that have this plane only."""
    return ["--kv-transfer-config", json.dumps({"transports": [name]})]
