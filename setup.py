"""The optional extension of CPU kernels; everything else is in pyproject.toml.

Plain C, loaded with ctypes: it needs a compiler, no headers of Python or torch. Where it cannot be built, torch serves.
"""

from __future__ import annotations

import platform
from pathlib import Path

from setuptools import Extension, setup

SOURCES = Path("kernels/cpu/csrc")

setup(
    ext_modules=[
        Extension(
            "pdserve.kernels.cpu._cpu",
            sources=sorted(map(str, SOURCES.glob("*.c"))),
            depends=sorted(map(str, SOURCES.glob("*.h"))),
            extra_compile_args=["-O3", "-std=c11", "-pthread", "-fvisibility=hidden", "-fno-math-errno"],
            extra_link_args=["-pthread", "-lm"],
            optional=True,
        )
    ]
    if platform.machine() == "x86_64" and platform.system() == "Linux"
    else []
)
