"""The Dockerfile names things that exist. No container runtime is at hand here: the image itself is not built."""

from __future__ import annotations

import json
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def _copied() -> list[str]:
    words = [rest.split() for name, rest in _instructions() if name == "COPY" and "--from=" not in rest]
    return [source for parts in words for source in parts[:-1]]


def _ignored(name: str) -> bool:
    ignored = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#") and fnmatch(name, line.removeprefix("!")):
            ignored = not line.startswith("!")
    return ignored


def test_copied_sources_exist_and_reach_the_build() -> None:
    assert _copied()
    for source in _copied():
        assert (ROOT / source).exists(), source
        assert not _ignored(source), f"{source} is in .dockerignore"
    assert _ignored(".git") and _ignored(".venv")


def test_every_package_is_copied() -> None:
    links = [p for p in (ROOT / "src" / "pdserve").iterdir() if p.is_symlink()]
    needed = {p.resolve().relative_to(ROOT).parts[0] for p in links} | {"src"}
    assert needed <= set(_copied())


def test_entrypoint_is_an_installed_command() -> None:
    entrypoints = [json.loads(rest) for name, rest in _instructions() if name == "ENTRYPOINT"]
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert len(entrypoints) == 1 and entrypoints[0][0] in scripts


def test_image_runs_without_root_and_is_multi_stage() -> None:
    instructions = _instructions()
    assert [rest for name, rest in instructions if name == "USER"] == ["10001:10001"]
    stages = [rest for name, rest in instructions if name == "FROM"]
    assert len(stages) == 2
    assert "://" not in (ROOT / "Dockerfile").read_text()
