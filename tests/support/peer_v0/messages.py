"""The frozen messages, in a pool of their own: today's messages of the same names do not meet them."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

METHOD = "/pdserve.v1.KvTransfer/Control"


@functools.cache
def _pool() -> descriptor_pool.DescriptorPool:
    here = Path(__file__).parent
    with tempfile.NamedTemporaryFile(suffix=".desc") as out:
        # in a process of its own: the compiler clashes with the C++ libraries of other tests
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{here}", f"--descriptor_set_out={out.name}"]
        subprocess.run([*command, str(here / "kvtransfer.proto")], check=True)
        files = descriptor_pb2.FileDescriptorSet.FromString(Path(out.name).read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    return pool


def message(name: str, **fields: Any) -> Any:
    """A frozen message, e.g. `message("OpenTransfer", transfer_id="t")`."""
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"pdserve.v1.{name}"))(**fields)


def read(name: str, raw: bytes) -> Any:
    """Parses bytes as a frozen message."""
    parsed = message(name)
    parsed.ParseFromString(raw)
    return parsed
