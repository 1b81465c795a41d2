"""One trace per request over all processes."""

from __future__ import annotations


class Tracing:
    """The tracer of a process."""
