"""Settings of all tests."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# The same examples each time, so that a red run means a change; EXPLORE=1 draws others, to find what nobody thought of.
# A slow or busy machine fails no test: examples have no time limit of their own, tests have (pytest-timeout).
settings.register_profile(
    "pdserve",
    deadline=None,
    derandomize=not os.environ.get("EXPLORE"),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("pdserve")
