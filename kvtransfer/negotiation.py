"""What the two workers of a pair speak: a version, and a data plane. Decode says what it has; prefill decides."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from pdserve.core.data_planes import common_plane, no_common_plane
from pdserve.core.errors import TransferError

PROTOCOL_VERSION = 1
"""Counts changes of meaning; additions do not count."""
OLDEST_VERSION = 1
"""The version before, or the first."""
BEFORE_NEGOTIATION = "tcp"
"""What a peer means that names no plane: it is of a version that had this one only."""


def version(theirs: int) -> int:
    """The version of a stream whose decode side speaks `theirs` at most.

    Raises:
        TransferError: PROTOCOL_VERSION: it is older than any that is spoken here.
    """
    if theirs < OLDEST_VERSION:
        raise TransferError(
            f"versions {OLDEST_VERSION} to {PROTOCOL_VERSION} are spoken here, {theirs} at most there",
            reason="PROTOCOL_VERSION",
            status="FAILED_PRECONDITION",
        )
    return min(theirs, PROTOCOL_VERSION)


def choose(wanted: Sequence[str], offered: Iterable[str], *, same_host: bool) -> str:
    """Picks the plane of a pair.

    Args:
        wanted: Decode's planes, most wanted first; empty from a peer that does not negotiate.
        offered: Prefill's planes.
        same_host: Both workers are of one user, on one host and in one network namespace.

    Returns:
        The first wanted one that is offered and can work.

    Raises:
        TransferError: TRANSPORT: there is none.
    """
    wanted, offered = wanted or [BEFORE_NEGOTIATION], list(offered)
    if (name := common_plane(wanted, offered, same_host=same_host)) is not None:
        return name
    missing = no_common_plane("the decode worker", wanted, "the prefill worker", offered)
    raise TransferError(
        f"{missing}; name a common one in --kv-transfer-config", reason="TRANSPORT", status="FAILED_PRECONDITION"
    )


def host_id() -> str:
    """Names this boot of this machine, and this process's network namespace and user; empty where it is not told.

    Pages are shown to processes of the same user only: two users on one host are as far apart as two hosts.
    """
    namespaces = Path("/proc/self/ns")
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = (namespaces / "net").stat().st_ino
        users = (namespaces / "user").stat().st_ino if (namespaces / "user").exists() else 0  # else all are of one
    except OSError:
        return ""
    return f"{boot}:{network}:{users}:{os.geteuid()}"
