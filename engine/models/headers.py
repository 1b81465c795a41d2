"""Files of weights and their headers: which of a directory's files count, which tensors there are, and where.

No weight is read and no torch imported, so that `pdserve fetch-model` can check what it found.
"""

from __future__ import annotations

import io
import json
import math
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.core.errors import ConfigError
from pdserve.engine.models.spec import read_json

ITEM_BYTES: Mapping[str, int] = {"F32": 4, "F16": 2, "BF16": 2}
"""Types of weights that are read here, in the words of the format; transformers reads others, too."""

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_INDEX_SUFFIX = ".safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file.

    Attributes:
        file: Open for reading.
        dtype: In the words of the format.
        shape: Of the tensor.
        begin: Its first byte in the file.
        num_bytes: Its length.
    """

    file: io.BufferedReader
    dtype: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


def read_header(path: Path, file: io.BufferedReader, others: Collection[str] = ()) -> dict[str, Entry]:
    """Tensors of one file by name.

    Args:
        path: Of the file.
        file: Open, at its beginning.
        others: Names in the files before it.

    Raises:
        ConfigError: The file is not what it should be or not whole, or has a name of `others`.
    """
    try:
        (size,) = struct.unpack("<Q", file.read(8))
        if size > path.stat().st_size:
            raise ValueError("its header is longer than the file")
        header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        entries = {name: _entry(file, 8 + size, name, told) for name, told in header.items()}
        if known := sorted(name for name in entries if name in others):
            raise ValueError(f"{known[0]} is also in another file")
        _check_whole(entries, 8 + size, path.stat().st_size)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ConfigError(f"cannot load the model: {path}: {e}; copy it again", reason="CORRUPT_MODEL") from e
    return entries


def weight_files(directory: Path, config: Mapping[str, Any] | None = None) -> list[Path]:
    """The files that weights are read from, by the rule of transformers, which reads the same.

    They are what `transformers_weights` in the configuration names, else `model.safetensors`, else the shards that
    `model.safetensors.index.json` names. Whatever else lies there is not read, and not in the digest.

    Args:
        directory: A model directory.
        config: Contents of its `config.json`; None: they are read.

    Returns:
        Files that are there, in order of their names.

    Raises:
        ConfigError: One of them is missing, or is named elsewhere or of another kind.
    """
    source = _source(directory, config)
    if not source.name.endswith(_INDEX_SUFFIX):
        return [source]
    files = sorted(set(_weight_map(source).values()))
    if missing := [name for name in files if not (directory / name).is_file()]:
        raise ConfigError(
            f"{source} lacks {len(missing)} of the {len(files)} files of weights that it names, such as {missing[0]}; "
            "copy them again",
            reason="CORRUPT_MODEL",
        )
    return [directory / name for name in files]


def check_files(directory: Path) -> None:
    """Checks of a model directory what can be seen without reading its weights.

    Raises:
        ConfigError: The configuration is no JSON object, a file of weights is missing, damaged or not whole, or the
            index names a weight that no file has.
    """
    config = read_json(directory / "config.json")
    found: set[str] = set()
    for path in weight_files(directory, config):
        try:
            with path.open("rb") as file:
                found |= set(read_header(path, file, found))
        except OSError as e:
            raise ConfigError(f"{path} cannot be read: {e.strerror}", reason="CORRUPT_MODEL") from e
    source = _source(directory, config)
    named = _weight_map(source) if source.name.endswith(_INDEX_SUFFIX) else {}
    if missing := sorted(set(named) - found):
        where = f"{missing[0]}, which should be in {named[missing[0]]}"
        raise ConfigError(f"{directory} lacks {len(missing)} weights, such as {where}", reason="CORRUPT_MODEL")


def _source(directory: Path, config: Mapping[str, Any] | None) -> Path:
    """The file of all weights, or the index of several."""
    config = read_json(directory / "config.json") if config is None else config
    if (named := config.get("transformers_weights")) is not None:
        _check_name(directory, named, (".safetensors", _INDEX_SUFFIX))
        if not (directory / named).is_file():
            raise ConfigError(f"{directory} lacks {named}, which its config.json names", reason="CORRUPT_MODEL")
        return directory / str(named)
    for name in (_WHOLE, _INDEX):
        if (directory / name).is_file():
            return directory / name
    raise ConfigError(
        f"{directory} has neither {_WHOLE} nor {_INDEX}, which says what files the weights are; copy it again",
        reason="CORRUPT_MODEL",
    )


def _weight_map(index: Path) -> dict[str, str]:
    """File of every weight, by its name."""
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ConfigError(f"{index} has no weight_map; copy it again", reason="CORRUPT_MODEL")
    for file in files.values():
        _check_name(index.parent, file, (".safetensors",))
    return files


def _check_name(directory: Path, file: object, endings: tuple[str, ...]) -> None:
    if not (isinstance(file, str) and "/" not in file and file.endswith(endings)):
        raise ConfigError(
            f"{directory} names {file!r:.200} as a file of weights; it must be a *.safetensors there",
            reason="CORRUPT_MODEL",
        )


def _entry(file: io.BufferedReader, data_at: int, name: str, told: dict[str, Any]) -> Entry:
    dtype, shape, (begin, end) = told["dtype"], tuple(told["shape"]), told["data_offsets"]
    if not isinstance(dtype, str):
        raise ValueError(f"{name} is of type {dtype!r}")
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)) or begin > end:
        raise ValueError(f"{name} of shape {list(shape)} lies from {begin} to {end}")
    if (item_bytes := ITEM_BYTES.get(dtype)) and math.prod(shape) * item_bytes != end - begin:
        raise ValueError(f"{name} has {end - begin} bytes")
    return Entry(file, dtype, shape, data_at + begin, end - begin)


def _check_whole(entries: Mapping[str, Entry], begin: int, end: int) -> None:
    """A file's tensors lie one after the other and are all of its bytes: none is read where another one is."""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].num_bytes)):
        if entry.begin != begin:
            raise ValueError(f"{name} does not begin where the tensor before it ends")
        begin += entry.num_bytes
    if begin != end:
        raise ValueError(f"its tensors end at byte {begin} of {end}")
