"""Weights read from safetensors files one at a time, so that no more than one of them is held twice.

Nothing is mapped: pages of a mapped file would count as this process's memory until it is unmapped.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from pdserve.core.errors import ConfigError
from pdserve.engine.models.headers import Entry, read_header, weight_files

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCK_BYTES = 1 << 20


class WeightFiles:
    """Tensors of a model directory by name; a context manager that closes its files.

    Args:
        directory: A model directory; see `headers.weight_files`.

    Raises:
        ConfigError: A file is missing or not what it should be, or two hold the same name.
    """

    def __init__(self, directory: Path) -> None:
        self._files: list[io.BufferedReader] = []
        self._entries: dict[str, Entry] = {}
        try:
            for path in weight_files(directory):
                file = path.open("rb")
                self._files.append(file)
                self._entries |= read_header(path, file, self._entries)
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
    def _read_into(entry: Entry, target: Tensor) -> None:
        view = target.view(torch.uint8).flatten().numpy().data
        entry.file.seek(entry.begin)
        if entry.file.readinto(view) != entry.num_bytes:
            raise ConfigError(
                f"cannot load the model: {entry.file.name} ends early; copy it again", reason="CORRUPT_MODEL"
            )


def _block(entry: Entry, at: int) -> bytes:
    entry.file.seek(entry.begin + at)
    return entry.file.read(min(_BLOCK_BYTES, entry.num_bytes - at))
