"""Weights read from safetensors files one at a time, so that no more than one of them is held twice.

Nothing is mapped: pages of a mapped file would count as this process's memory until it is unmapped.
"""

from __future__ import annotations

import io
import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from pdserve.core.errors import ConfigError

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Entry:
    file: io.BufferedReader
    dtype: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


class WeightFiles:
    """Tensors of a model directory by name; a context manager that closes its files.

    Args:
        directory: Holds `*.safetensors`, whole or sharded.

    Raises:
        ConfigError: A file is not what it should be, or two hold the same name.
    """

    def __init__(self, directory: Path) -> None:
        self._files: list[io.BufferedReader] = []
        self._entries: dict[str, _Entry] = {}
        try:
            for path in sorted(directory.glob("*.safetensors")):
                file = path.open("rb")
                self._files.append(file)
                self._read_header(path, file)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files."""
        for file in self._files:
            file.close()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return {name: entry.shape for name, entry in self._entries.items()}

    def types(self) -> dict[str, str]:
        """Type of every tensor, in the words of the format."""
        return {name: entry.dtype for name, entry in self._entries.items()}

    def rows(self, names: Iterable[str], dtype: torch.dtype) -> Tensor:
        """Tensors, read one below the other.

        Args:
            names: Of tensors that have all axes but the first in common.
            dtype: Of the result.
        """
        entries = [self._entries[name] for name in names]
        target = torch.empty((sum(e.shape[0] for e in entries), *entries[0].shape[1:]), dtype=dtype)
        at = 0
        for entry in entries:
            part = target[at : at + entry.shape[0]]
            at += entry.shape[0]
            if _DTYPES[entry.dtype] == dtype:
                self._read_into(entry, part)
            else:
                raw = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
                self._read_into(entry, raw)
                part.copy_(raw)
        return target

    def are_equal(self, one: str, other: str) -> bool:
        """Says whether two tensors are the same, byte by byte."""
        a, b = self._entries[one], self._entries[other]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        return all(_block(a, at) == _block(b, at) for at in range(0, a.num_bytes, _BLOCK_BYTES))

    @staticmethod
    def _read_into(entry: _Entry, target: Tensor) -> None:
        view = target.view(torch.uint8).flatten().numpy().data
        entry.file.seek(entry.begin)
        if entry.file.readinto(view) != entry.num_bytes:
            raise ConfigError(
                f"cannot load the model: {entry.file.name} ends early; copy it again", reason="CORRUPT_MODEL"
            )

    def _read_header(self, path: Path, file: io.BufferedReader) -> None:
        try:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > path.stat().st_size:
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(size))
            header.pop("__metadata__", None)
            entries = {name: _entry(file, 8 + size, name, told) for name, told in header.items()}
            if known := entries.keys() & self._entries.keys():
                raise ValueError(f"{min(known)} is also in another file")
            _check_whole(entries, 8 + size, path.stat().st_size)
        except (struct.error, ValueError, KeyError, TypeError, AttributeError) as e:
            raise ConfigError(f"cannot load the model: {path}: {e}; copy it again", reason="CORRUPT_MODEL") from e
        self._entries |= entries


def _entry(file: io.BufferedReader, data_at: int, name: str, told: dict[str, Any]) -> _Entry:
    dtype, shape, (begin, end) = told["dtype"], tuple(told["shape"]), told["data_offsets"]
    if not isinstance(dtype, str):
        raise ValueError(f"{name} is of type {dtype!r}")
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)) or begin > end:
        raise ValueError(f"{name} of shape {list(shape)} lies from {begin} to {end}")
    if (kind := _DTYPES.get(dtype)) and math.prod(shape) * kind.itemsize != end - begin:
        raise ValueError(f"{name} has {end - begin} bytes")
    return _Entry(file, dtype, shape, data_at + begin, end - begin)


def _check_whole(entries: Mapping[str, _Entry], begin: int, end: int) -> None:
    """A file's tensors lie one after the other and are all of its bytes: none is read where another one is."""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].num_bytes)):
        if entry.begin != begin:
            raise ValueError(f"{name} does not begin where the tensor before it ends")
        begin += entry.num_bytes
    if begin != end:
        raise ValueError(f"its tensors end at byte {begin} of {end}")


def _block(entry: _Entry, at: int) -> bytes:
    entry.file.seek(entry.begin + at)
    return entry.file.read(min(_BLOCK_BYTES, entry.num_bytes - at))
