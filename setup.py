"""The optional extensions: CPU kernels, and the copying of KV pages; everything else is in pyproject.toml.

Plain C, loaded with ctypes: it needs a compiler, no headers of Python or torch. Where it cannot be built, torch and
memmove serve.
"""

from __future__ import annotations

import platform
from pathlib import Path

from setuptools import Extension, setup


def extension(name: str, sources: Path) -> Extension:
    """What is in one folder."""
    return Extension(
        name,
        sources=sorted(map(str, sources.glob("*.c"))),
        depends=sorted(map(str, sources.glob("*.h"))),
        extra_compile_args=["-O3", "-std=c11", "-pthread", "-fvisibility=hidden", "-fno-math-errno"],
        extra_link_args=["-pthread", "-lm"],
        optional=True,
    )


setup(
    ext_modules=[
        extension("pdserve.kernels.cpu._cpu", Path("kernels/cpu/csrc")),
        extension("pdserve.kvtransfer._copy", Path("kvtransfer/csrc")),
    ]
    if platform.machine() == "x86_64" and platform.system() == "Linux"
    else []
)
