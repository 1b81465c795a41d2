"""Which data plane two workers can use: asked by a router before it pairs them, and by the two as they meet."""

from __future__ import annotations

from collections.abc import Collection, Sequence

SAME_HOST_ONLY = frozenset({"shm"})
"""Planes that do not leave a host, a network namespace and a user."""
_MAX_NAMES_TOLD, _MAX_NAME_CHARS = 8, 32


def common_plane(wanted: Sequence[str], offered: Collection[str], *, same_host: bool) -> str | None:
    """Picks the plane of a pair.

    Args:
        wanted: Decode's planes, most wanted first.
        offered: Prefill's planes.
        same_host: Both workers are of one user, on one host and in one network namespace.

    Returns:
        The first wanted one that is offered and can work; None: there is none.
    """
    for name in wanted:
        if name in offered and (same_host or name not in SAME_HOST_ONLY):
            return name
    return None


def no_common_plane(us: str, ours: Sequence[str], them: str, theirs: Sequence[str]) -> str:
    """Says what each of two workers has, where `common_plane` finds nothing.

    Args:
        us: What the one is called.
        ours: Its planes.
        them: What the other is called.
        theirs: Its planes.
    """
    far = SAME_HOST_ONLY.intersection(ours, theirs)
    why = f" ({', '.join(sorted(far))} only within one host, network namespace and user)" if far else ""
    return f"no common data plane: {us} has {_told(ours)}, {them} has {_told(theirs)}{why}"


def same_host(ours: str, theirs: str) -> bool:
    """Compares two host ids (see `kvtransfer.negotiation.host_id`); an unknown one equals none."""
    return bool(ours) and ours == theirs


def _told(names: Sequence[str]) -> str:
    """Names for a person; a peer's list is cut."""
    cut = ", ..." if len(names) > _MAX_NAMES_TOLD else ""
    return ", ".join(name[:_MAX_NAME_CHARS] for name in names[:_MAX_NAMES_TOLD]) + cut
