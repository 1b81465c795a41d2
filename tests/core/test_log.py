"""One line per record, and libraries that repeat themselves are held down."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from pdserve.core.log import setup_logging


@pytest.fixture
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    before = (list(root.handlers), root.level)
    noisy = {name: logging.getLogger(name).level for name in ("opentelemetry", "grpc", "redis", "asyncio")}
    yield
    root.handlers[:], level = before
    root.setLevel(level)
    for name, value in noisy.items():
        logging.getLogger(name).setLevel(value)


def test_log_lines(restored_logging):
    stream = io.StringIO()
    setup_logging("info", stream)
    log = logging.getLogger("pdserve.x")
    log.debug("hidden")
    log.info("two\nlines")
    try:
        raise KeyError("why")
    except KeyError:
        log.exception("broken")
    for _ in range(100):
        logging.getLogger("opentelemetry.exporter").warning("collector is gone")
        log.warning("ours")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2 + 1 + 100
    assert lines[0].endswith("INFO pdserve.x two\\nlines")
    assert "ERROR pdserve.x broken\\nTraceback" in lines[1]
    assert "KeyError: 'why'" in lines[1]
