"""Settings of all tests."""

from __future__ import annotations

import os
import platform

import pytest
from hypothesis import HealthCheck, settings

from tests.support.tools import missing

# The same examples each time, so that a red run means a change; EXPLORE=1 draws others, to find what nobody thought of.
# A slow or busy machine fails no test: examples have no time limit of their own, tests have (pytest-timeout).
settings.register_profile(
    "pdserve",
    deadline=None,
    derandomize=not os.environ.get("EXPLORE"),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("pdserve")


@pytest.fixture(scope="session")
def compiled_kernels() -> None:
    """For tests of the compiled CPU kernels, which exist where pdserve was installed with a C compiler."""
    from pdserve.kernels.cpu import library

    if (reason := library.why_not()) is not None:
        if platform.machine() != "x86_64":
            pytest.skip(f"the CPU kernels are written for x86-64: {reason}")
        missing(f"no compiled CPU kernels: {reason}")
