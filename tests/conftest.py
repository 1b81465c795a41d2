"""Settings of all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A slow or busy machine fails no test: examples have no time limit of their own, tests have (pytest-timeout).
settings.register_profile("pdserve", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pdserve")
