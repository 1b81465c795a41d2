"""The repository holds together: packages have their links, files keep their size, options document themselves."""

from __future__ import annotations

import importlib
import pkgutil
import re
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path

import pytest

import pdserve
from pdserve.core.config import build_parser, check, flag_name

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "bench", "cli", "client", "core", "decode_service", "engine", "kernels", "kvtransfer", "prefill_service", "router",
)  # fmt: skip
MAX_LINES = 500
CONFIG_MODULES = (
    "pdserve.bench.engine",
    "pdserve.bench.engine_batching",
    "pdserve.bench.engine_interference",
    "pdserve.bench.engine_prefix",
    "pdserve.bench.engine_reservation",
    "pdserve.bench.engine_runs",
    "pdserve.bench.engine_scheduler",
    "pdserve.bench.engine_swap",
    "pdserve.bench.handoff_args",
    "pdserve.bench.kernels_args",
    "pdserve.bench.peers_args",
    "pdserve.bench.transfer_args",
    "pdserve.cli.up",
    "pdserve.core.config",
    "pdserve.core.tls",
    "pdserve.decode_service.__main__",
    "pdserve.engine.config",
    "pdserve.router.config",
)


@pytest.mark.parametrize("name", PACKAGES)
def test_package_is_linked(name: str) -> None:
    link = ROOT / "src" / "pdserve" / name
    assert link.is_symlink() and link.resolve() == ROOT / name
    assert not link.readlink().is_absolute()
    assert (ROOT / name / "__init__.py").is_file()


def test_every_top_level_package_is_known() -> None:
    found = {p.parent.name for p in ROOT.glob("*/__init__.py")}
    assert found == {*PACKAGES, "tests"}
    links = {p.name for p in (ROOT / "src" / "pdserve").iterdir() if p.is_symlink()}
    assert links == {*PACKAGES, "v1"}


def test_kernels_package_stays_empty() -> None:
    """transformers imports a `kernels` package that it finds in the current directory, to read a version."""
    lines = (ROOT / "kernels" / "__init__.py").read_text().splitlines()
    assert not [line for line in lines if line.startswith(("import ", "from "))]


@pytest.mark.parametrize(
    "name",
    ["LICENSE", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "constraints.txt", "Dockerfile", ".ci/run"],
)
def test_file_exists_and_says_something(name: str) -> None:
    assert (ROOT / name).stat().st_size > 0


def test_every_test_folder_is_a_package() -> None:
    folders = {p.parent for p in (ROOT / "tests").rglob("*.py")}
    assert [str(f.relative_to(ROOT)) for f in sorted(folders) if not (f / "__init__.py").is_file()] == []


def test_no_file_is_too_long() -> None:
    long = {}
    for name in (*PACKAGES, "scripts", "helm"):
        for path in (ROOT / name).rglob("*.py"):
            if (count := len(path.read_text().splitlines())) > MAX_LINES:
                long[str(path.relative_to(ROOT))] = count
    assert long == {}


def _config_classes() -> list[type]:
    found = []
    for module_name in CONFIG_MODULES:
        module = importlib.import_module(module_name)
        found += [
            cls
            for name, cls in vars(module).items()
            if name.endswith("Config") and is_dataclass(cls) and cls.__module__ == module_name
        ]
    return found


def test_config_classes_are_found_where_they_are() -> None:
    """A config class in a module that this test does not list would go unchecked."""
    declaring = set()
    for module in pkgutil.walk_packages(pdserve.__path__, "pdserve."):
        path = (ROOT / "src" / Path(*module.name.split("."))).with_suffix(".py")
        if path.is_file() and "= option(" in path.read_text():
            declaring.add(module.name)
    assert declaring <= set(CONFIG_MODULES)


@pytest.mark.parametrize("cls", _config_classes(), ids=lambda c: c.__name__)
def test_config_fields_document_themselves(cls: type) -> None:
    check(cls())
    help_text = build_parser("pdserve test", "", {"options": cls}).format_help()
    for f in fields(cls):
        where = f"{cls.__name__}.{f.name}"
        assert set(f.metadata) >= {"help", "unit", "choices"}, f"{where} is not declared with option()"
        assert f.default is not MISSING, f"{where} has no default"
        assert len(f.metadata["help"]) > 10, f"{where} has no help"
        for suffix, unit in (("_s", "s"), ("_ms", "ms"), ("_bytes", "bytes"), ("_tokens", "tokens")):
            if f.name.endswith(suffix):
                assert f.metadata["unit"] == unit, f"{where}: unit is {f.metadata['unit']!r}"
        assert flag_name(f.name) in help_text
        placeholder = re.search(rf"^  {flag_name(f.name)} (\S+)", help_text, re.MULTILINE)
        named = placeholder is None or placeholder[1].startswith("{") or "_" not in placeholder[1]  # {}: its choices
        assert named, f"{where} has no unit, or its name no last word"
