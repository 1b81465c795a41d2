"""Runs real helm on the chart, and finds things in what it renders."""

from __future__ import annotations

import functools
import importlib.util
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from tests.support.tools import missing

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm"
HELM_VERSIONS = ("4.3.1", "3.17.2")
VALUES = {"default": None, **{p.name.removesuffix("-values.yaml"): p for p in sorted(CHART.glob("ci/*-values.yaml"))}}
SERVICES = ("router", "prefill", "decode")
TIMEOUT_S = 60
Document = dict[str, Any]


@functools.cache
def helm(version: str) -> str:
    """Path of helm, fetched and cached; skips where it cannot be had."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        missing("the helm binary that is fetched runs on Linux x86-64 only")
    try:
        return str(_fetch_script().fetch(version))
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as e:
        missing(f"helm {version} cannot be fetched: {e}")


def run(version: str, command: str, *words: str, values: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`helm <command> CHART -f values words...`."""
    head = [helm(version), command, *(["release"] if command == "template" else []), str(CHART)]
    files = ["--values", str(values)] if values else []
    return subprocess.run([*head, *files, *words], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


@functools.cache
def render_text(values: Path | None = None, *words: str, version: str = HELM_VERSIONS[0]) -> str:
    """What the chart renders to, as text."""
    done = run(version, "template", *words, values=values)
    assert done.returncode == 0, done.stderr
    return done.stdout


@functools.cache
def render(values: Path | None = None, *words: str, version: str = HELM_VERSIONS[0]) -> tuple[Document, ...]:
    """The documents that the chart renders to; read only."""
    return tuple(d for d in yaml.load_all(render_text(values, *words, version=version), yaml.CSafeLoader) if d)


def find(documents: Sequence[Document], kind: str, component: str) -> Document:
    """The one document of a kind and component."""
    found = [
        d
        for d in documents
        if d["kind"] == kind and d["metadata"]["labels"].get("app.kubernetes.io/component") == component
    ]
    assert len(found) == 1, f"{len(found)} {kind} of {component}"
    return found[0]


def workloads(documents: Sequence[Document]) -> Iterator[tuple[str, Document]]:
    """(component, document) of every Deployment and StatefulSet."""
    for document in documents:
        if document["kind"] in ("Deployment", "StatefulSet"):
            yield document["metadata"]["labels"]["app.kubernetes.io/component"], document


def pod_specs(documents: Sequence[Document]) -> Iterator[tuple[str, Document]]:
    """(component, pod spec) of every workload and test pod."""
    for component, document in workloads(documents):
        yield component, document["spec"]["template"]["spec"]
    for document in documents:
        if document["kind"] == "Pod":
            yield document["metadata"]["labels"]["app.kubernetes.io/component"], document["spec"]


def environment(container: Document, fields: dict[str, str]) -> dict[str, str]:
    """A container's variables, as Kubernetes would expand them with these field values; secrets become empty."""
    expanded: dict[str, str] = {}
    for variable in container.get("env", []):
        value = variable.get("value", "")
        if reference := variable.get("valueFrom", {}).get("fieldRef"):
            value = fields[reference["fieldPath"]]
        for name, earlier in expanded.items():
            value = value.replace(f"$({name})", earlier)
        expanded[variable["name"]] = value
    return expanded


def _fetch_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fetch_helm", ROOT / "scripts" / "fetch_helm.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
