"""Scheduling policies: each is a sort key over requests, never a loop. Lower runs first."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pdserve.core.request import Request

WaitingOrder = Callable[[Request], tuple[float, ...]]
"""Sort key of a waiting request; ties are broken by the order of arrival at the scheduler."""


def fcfs(request: Request) -> tuple[float, ...]:
    """First come, first served within a priority."""
    return (request.priority, request.arrival_s)


POLICIES: Mapping[str, WaitingOrder] = {"fcfs": fcfs}
"""By the name that `--scheduling-policy` takes."""
