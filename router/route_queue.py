"""Where requests wait for workers: for the first one at all, and for a route. Woken by changes of the worker table.

no route exists                       given up after `no_worker_timeout_s`
every route's decode worker refused   chosen again when the first of them may have room, or another one comes
either                                given up `queue_timeout_s` after the request's arrival
"""

from __future__ import annotations

from collections.abc import Mapping

from pdserve.core.clock import Clock
from pdserve.core.errors import CapacityError, PdserveError, RequestError, UnavailableError
from pdserve.router.config import RouterConfig
from pdserve.router.inbox import Inbox
from pdserve.router.open_request import OpenRequest
from pdserve.router.policy import Ask, Draw, Policy, Route
from pdserve.router.worker_set import WorkerSet
from pdserve.router.worker_table import Limits


class RouteQueue:
    """Requests of one router that wait for workers.

    Args:
        config: Time-outs.
        clock: Time.
        workers: Who is there.
        policy: Chooses among them.
        draw: Draws among equal workers.

    Attributes:
        num_waiting: Those that wait for a route, or for the first worker.
    """

    def __init__(self, config: RouterConfig, clock: Clock, workers: WorkerSet, policy: Policy, draw: Draw) -> None:
        self._config = config
        self._clock = clock
        self._workers = workers
        self._policy = policy
        self._draw = draw
        self.num_waiting = 0

    def can_route(self) -> bool:
        """True when a request of one token would get a route now."""
        return self._policy.can_route(Ask(prompt_tokens=1), self._workers.table.pool())

    async def limits(self) -> Limits:
        """What the workers accept; waits for the first one.

        Raises:
            UnavailableError: None came in time.
        """
        if (found := self._workers.table.limits()) is not None:
            return found
        inbox = Inbox()
        end_s = self._clock.now() + self._config.no_worker_timeout_s
        self.num_waiting += 1
        self._workers.subscribe(inbox)
        try:
            while (limits := self._workers.table.limits()) is None:
                await self._clock.wait_for(inbox.get(), max(0.0, end_s - self._clock.now()))
            return limits
        except TimeoutError:
            raise self._no_worker() from None
        finally:
            self._workers.unsubscribe(inbox)
            self.num_waiting -= 1

    async def route(self, request: OpenRequest, attempt: int, refused: Mapping[str, float]) -> Route | None:
        """Waits for a route.

        Args:
            request: Who waits; its cancellation wakes it.
            attempt: Retry number. The first one has waited since the request's arrival.
            refused: Decode worker -> when it may have room again.

        Returns:
            The route; None when the request was cancelled.

        Raises:
            PdserveError: There was none in time, or never will be.
        """
        entered_s = self._clock.now()
        queued_s = request.arrival_s if attempt == 1 else entered_s
        self.num_waiting += 1
        self._workers.subscribe(request.inbox)
        try:
            while request.cancel_asked is None:
                now = self._clock.now()
                avoid = frozenset(w for w, until_s in refused.items() if until_s > now)
                ask = Ask(prompt_tokens=len(request.admitted.prompt_token_ids), avoid=avoid)
                route = self._policy.choose(ask, self._workers.table.pool(), self._draw)
                if route is not None and route.decode.worker_id not in avoid:
                    request.progress.queue_s += now - queued_s
                    request.trace.placed(route, attempt, now - queued_s)
                    return route
                wake_s = self._give_up_s(request, entered_s, route)
                if now >= wake_s:
                    raise self._no_route(request, route)
                if route is not None:
                    wake_s = min(wake_s, *(refused[w] for w in avoid))
                try:
                    await self._clock.wait_for(request.inbox.get(), wake_s - now)
                except TimeoutError:
                    continue
            return None
        finally:
            self.num_waiting -= 1
            self._workers.unsubscribe(request.inbox)

    def _give_up_s(self, request: OpenRequest, entered_s: float, route: Route | None) -> float:
        give_up_s = request.arrival_s + self._config.queue_timeout_s
        return give_up_s if route is not None else min(give_up_s, entered_s + self._config.no_worker_timeout_s)

    def _no_route(self, request: OpenRequest, route: Route | None) -> PdserveError:
        if route is not None:
            return CapacityError(
                f"no decode worker had room within {self._config.queue_timeout_s:g} s; retry later or add workers",
                reason="NO_CAPACITY",
                retry_after_s=1.0,
            )
        if self.can_route():
            return RequestError(
                f"the prompt of {len(request.admitted.prompt_token_ids)} tokens needs more KV pages than any worker "
                "has; shorten it or start workers with more pages",
                reason="PROMPT_TOO_LONG",
            )
        return self._no_worker()

    def _no_worker(self) -> UnavailableError:
        return UnavailableError(
            f"no worker can take the request: {self._workers.table.missing()}; start the missing workers "
            "('pdserve status' lists them) and retry",
            reason="NO_WORKER",
            retry_after_s=1.0,
        )
