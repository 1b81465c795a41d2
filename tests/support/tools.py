"""Tools from outside Python that some tests need."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest


def missing(reason: str) -> NoReturn:
    """Skips the test; fails it where REQUIRE_TOOLS is set, as CI does."""
    if os.environ.get("REQUIRE_TOOLS"):
        pytest.fail(reason)
    pytest.skip(reason)


def program(name: str, package: str) -> str:
    """Path of a program, or `missing`."""
    return shutil.which(name) or missing(f"{name} is not installed (Debian package {package}; make test installs it)")
