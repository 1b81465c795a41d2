"""The documents are true where a machine can see it: links lead somewhere, flags and metrics exist."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

from pdserve.bench.kernels_args import KernelsConfig
from pdserve.bench.peers_args import PeersConfig
from pdserve.cli.up import UpConfig
from pdserve.core.config import ServiceConfig, WorkerConfig, flag_name
from pdserve.core.errors import TransferError
from pdserve.core.tls import TlsConfig
from pdserve.engine.config import EngineConfig
from pdserve.kvtransfer import stream_places
from pdserve.kvtransfer.wire import ErrCode
from pdserve.router.config import RouterConfig

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
OTHER_FLAGS = {
    *("--role", "--config", "--help", "--router", "--chat", "--temperature", "--json", "--tokenizer"),
    *("--num-prompts", "--max-concurrency", "--dataset-name", "--random-input-len", "--random-output-len"),
}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", [p for p in PAGES if "decisions" not in p.parts], ids=lambda p: p.name)
def test_flags_exist(page: Path) -> None:
    benches = (PeersConfig, KernelsConfig)
    configs = (ServiceConfig, WorkerConfig, EngineConfig, RouterConfig, UpConfig, TlsConfig, *benches)
    known = {flag_name(f.name) for c in configs for f in fields(c)} | OTHER_FLAGS
    for word in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", page.read_text()):
        assert word.replace("--no-", "--") in known or page.name == "CONTRIBUTING.md", f"{page.name} names {word}"


def test_metrics_exist() -> None:
    names = (ROOT / "core" / "telemetry.py").read_text()
    for name in re.findall(r"`(pdserve_[a-z_]+)", (ROOT / "docs" / "operations.md").read_text()):
        assert f'"{name}"' in names, name


def test_places_for_control_streams_are_told_as_they_are() -> None:
    operations, protocol = ((ROOT / "docs" / name).read_text() for name in ("operations.md", "protocol.md"))
    assert (
        f"{stream_places.MAX_STREAMS} control streams, or {stream_places.MAX_PER_WORKER} of this decode process, or "
        f"{stream_places.MAX_MUTE} that have not said whose they are"
    ) in operations
    assert (
        f"{stream_places.MAX_STREAMS} control streams, {stream_places.MAX_PER_WORKER} of one process of a D, and "
        f"{stream_places.MAX_MUTE} that have not said hello"
    ) in protocol


NO_FAILURES = {
    *("COMPLETE", "FINISHED"),  # how transfers end well
    *("FAILED_PRECONDITION", "ALREADY_EXISTS", "INVALID_ARGUMENT"),  # codes of gRPC
    *("DONE", "PROC", "READ", "DRAM"),  # words of NIXL
}


def test_every_reason_of_a_failed_transfer_is_in_operations() -> None:
    told = set(re.findall(r"\b[A-Z][A-Z_]{3,}\b", (ROOT / "docs" / "operations.md").read_text()))
    raised = {code.name for code in ErrCode} | {TransferError.reason}
    for path in (ROOT / "kvtransfer").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and re.fullmatch(r"[A-Z][A-Z_]{3,}(: .*)?", str(node.value)):
                raised.add(str(node.value).partition(":")[0])  # alone, or before what a stream ends with
    for path in (*(ROOT / "decode_service").glob("*.py"), *(ROOT / "prefill_service").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "TransferError":
                reasons = (k.value for k in node.keywords if k.arg == "reason")
                raised |= {str(reason.value) for reason in reasons if isinstance(reason, ast.Constant)}
    assert {"LAYOUT", "PEER_LOST", "BAD_OPEN", "ERR_STALE", "INDEX_MISMATCH", "NO_HELLO"} <= raised
    assert sorted(raised - NO_FAILURES - told) == []
