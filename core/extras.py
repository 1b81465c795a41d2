"""How an extra of pdserve is installed beside what `make run` installed, in the pinned versions."""

from __future__ import annotations


def install_command(extras: str) -> str:
    """The command, for messages.

    Args:
        extras: Of pyproject.toml, separated by commas, "server" among them.
    """
    return f".venv/bin/pip install -c constraints.txt -e '.[{extras}]'"
