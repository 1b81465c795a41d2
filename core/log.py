"""Log set-up: stderr, one line per record, no request contents. Libraries that repeat themselves are held down."""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO

REPEAT_S = 60.0
_NOISY = ("opentelemetry", "grpc", "redis", "asyncio")


class _OneLine(logging.Formatter):
    converter = staticmethod(time.gmtime)
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s", "%Y-%m-%dT%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """As usual, with line breaks (also of tracebacks) written as backslash n."""
        return super().format(record).replace("\r", "\\r").replace("\n", "\\n")


class _HoldRepeats(logging.Filter):
    """Lets one record per noisy library and source line through per `REPEAT_S`."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[tuple[str, int], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """False for a repetition."""
        if record.name.partition(".")[0] not in _NOISY:
            return True
        place = (record.pathname, record.lineno)
        last = self._last.get(place)
        if last is not None and record.created - last < REPEAT_S:
            return False
        self._last[place] = record.created
        return True


def setup_logging(level: str, stream: TextIO | None = None) -> None:
    """Sends the process's log to stderr; call once, in `__main__`.

    Args:
        level: "debug", "info", "warning" or "error".
        stream: Instead of stderr.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_OneLine())
    handler.addFilter(_HoldRepeats())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _NOISY:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
