"""Pure modules decide; they reach no clock, thread, socket, network, randomness or tensor library."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN = {"torch", "grpc", "asyncio", "threading", "time", "random", "os", "socket"}
PURE = [
    "core/request.py",
    "core/hashing.py",
    "core/layout.py",
    "core/errors.py",
    "core/data_planes.py",
    "engine/scheduler.py",
    "engine/sequence.py",
    "engine/holdings.py",
    "engine/chunks.py",
    "engine/fair.py",
    "engine/lines.py",
    "engine/policies.py",
    "engine/waiting.py",
    "engine/free_runs.py",
    "engine/page_pool.py",
    "engine/prefix_cache.py",
    "engine/step.py",
    "kvtransfer/convert.py",
    "kvtransfer/gather.py",
    "kvtransfer/handoff.py",
    "kvtransfer/timeline.py",
    "router/policy.py",
    "router/worker_table.py",
    "router/admission.py",
]


def imported(source: str) -> set[str]:
    """First parts of all module names that a source imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("path", [p for p in PURE if (ROOT / p).exists()])
def test_a_pure_module_imports_no_effects(path: str) -> None:
    assert not imported((ROOT / path).read_text()) & FORBIDDEN


def test_the_walk_sees_every_form_of_import() -> None:
    source = "import os.path\nfrom time import monotonic\ndef f():\n    import random as r\n"
    assert imported(source) & FORBIDDEN == {"os", "time", "random"}
