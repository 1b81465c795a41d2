"""One generation request from the client's side, without any I/O: which router next, what an event or a failure means.

The sync and the async client are thin loops around this:

    begin() -> Attempt ... accept(event) -> Delta | None ... finish()
                   ^------ failed(...) returns: try the next router; raises: it is over

A request moves to the next router only on UNAVAILABLE and only before its first event, so no token is ever repeated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pdserve.client import convert
from pdserve.client.errors import (
    REASON_KEY,
    DeadlineExceeded,
    PdserveError,
    ServerError,
    Unavailable,
    error_from_status,
)
from pdserve.client.types import Choice, Delta, FinishReason, PositionLogprobs, Result
from pdserve.v1 import common_pb2, inference_pb2

Metadata = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One call to make.

    Attributes:
        address: Router to call.
        request: Message to send.
        timeout_s: gRPC deadline, seconds from now; None: none.
    """

    address: str
    request: inference_pb2.GenerateRequest
    timeout_s: float | None


@dataclass(slots=True)
class _Received:
    """Output of one choice so far."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str = ""

    def choice(self, echo: str, reason: FinishReason, stop_reason: str) -> Choice:
        """All of it, after the prompt's text; reasons are the request's, for a choice whose own end was not told."""
        if self.finish_reason is not None:
            reason, stop_reason = self.finish_reason, self.stop_reason
        return Choice(
            echo + "".join(self.text), tuple(self.token_ids), reason, stop_reason or None, tuple(self.logprobs)
        )


class Exchange:
    """State of one request.

    Args:
        request: The request.
        own_id: True when the SDK made the id (then every router gets a fresh one; a user's id is kept).
        addresses: Routers in the order to try.
        timeout_s: Deadline of the whole request, seconds from the first `begin`; None: none.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        *,
        own_id: bool,
        addresses: tuple[str, ...],
        timeout_s: float | None,
        clock: Callable[[], float],
    ) -> None:
        self.request_id = request.request_id
        self.address = addresses[0]
        self._request = request
        self._own_id = own_id
        self._addresses = addresses
        self._timeout_s = timeout_s
        self._clock = clock
        self._deadline: float | None = None
        self._tried = 0
        self._refusal: PdserveError | None = None
        self._accepted: inference_pb2.Accepted | None = None
        self._any_event = False
        self._prompt_logprobs: list[PositionLogprobs | None] = []
        sampling = request.sampling
        self._scored = sampling.HasField("prompt_logprobs") or (sampling.echo and sampling.HasField("logprobs"))
        self._echo = ""
        self._num_choices = max(1, request.sampling.n)
        self._choices: defaultdict[int, _Received] = defaultdict(_Received)
        self._result: Result | None = None

    @property
    def result(self) -> Result | None:
        """The result, once the stream has ended properly."""
        return self._result

    def begin(self) -> Attempt:
        """The next call to make.

        Raises:
            DeadlineExceeded: No time is left.
        """
        now = self._clock()
        if self._deadline is None and self._timeout_s is not None:
            self._deadline = now + self._timeout_s
        left = None if self._deadline is None else self._deadline - now
        if left is not None and left <= 0:
            raise DeadlineExceeded(f"no time left of timeout_s={self._timeout_s}", request_id=self.request_id)
        if self._tried and self._own_id:
            self._request.request_id = self.request_id = convert.new_request_id()
        self.address = self._addresses[self._tried]
        self._tried += 1
        return Attempt(self.address, self._request, left)

    def accept(self, event: inference_pb2.GenerateResponse) -> Delta | None:
        """Takes one event of the stream.

        Returns:
            New output, or the prompt's text before it when it was asked for; None for events without either.

        Raises:
            ServerError: The event breaks the protocol.
        """
        self._any_event = True
        kind = event.WhichOneof("event")
        if self._result is not None:
            raise self._broken(f"'{kind}' after the last event")
        if kind == "accepted":
            self._accepted = event.accepted
            self.request_id = event.accepted.request_id
            return None
        if self._accepted is None:
            raise self._broken(f"'{kind}' before 'accepted'")
        if kind == "prompt":
            return self._take_prompt(event.prompt)
        if kind == "delta":
            return self._extend(event.delta)
        if kind == "finished":
            self._result = self._build(event.finished, self._accepted)
        return None  # an event of a newer server

    def failed(self, status: str, message: str, metadata: Metadata) -> None:
        """Takes the failure of a call; returns when the next router is to be tried.

        Raises:
            PdserveError: It is over.
        """
        pairs = tuple(metadata)
        if status == "DEADLINE_EXCEEDED" and self._timeout_s is not None and not _has_reason(pairs):
            raise DeadlineExceeded(  # gRPC's own end of the call
                f"no whole answer within timeout_s={self._timeout_s:g}; allow more time, or ask for fewer tokens",
                request_id=self.request_id,
            )
        error = error_from_status(status, message, pairs, self.request_id)
        if status != "UNAVAILABLE" or self._any_event:
            raise error
        if _has_reason(pairs):
            self._refusal = error  # a router was reached: its word says more than a refused connection
        if self._tried < len(self._addresses):
            return
        raise self._refusal or unreachable(self._addresses, message, self.request_id)

    def finish(self) -> None:
        """The call ended with status OK.

        Raises:
            ServerError: Without a last event.
        """
        if self._result is None:
            raise self._broken("the stream ended without its last event")

    def _take_prompt(self, prompt: inference_pb2.Prompt) -> Delta | None:
        if prompt.HasField("logprobs"):
            told = self._prompt_logprobs or [None]  # nothing predicts the first token
            if prompt.logprobs.position != len(told):
                raise self._broken(f"prompt position {prompt.logprobs.position} after {len(told)}")
            self._prompt_logprobs = [*told, *convert.to_prompt_logprobs(prompt.logprobs)]
        self._echo += prompt.text
        return Delta(0, (), prompt.text) if prompt.text else None

    def _extend(self, message: common_pb2.Delta) -> Delta:
        delta = convert.to_delta(message)
        if delta.choice >= self._num_choices:
            raise self._broken(f"choice {delta.choice} of {self._num_choices}")
        received = self._choices[delta.choice]
        if delta.token_ids and delta.index != len(received.token_ids):
            raise self._broken(f"output index {delta.index} after {len(received.token_ids)} tokens")
        received.text.append(delta.text)
        received.token_ids += delta.token_ids
        received.logprobs += delta.logprobs
        received.finish_reason = convert.to_finish_reason(message.finish_reason)
        received.stop_reason = message.stop_reason
        return delta

    def _build(self, finished: inference_pb2.Finished, accepted: inference_pb2.Accepted) -> Result:
        reason = convert.to_finish_reason(finished.finish_reason)
        if reason is None:
            raise self._broken(f"unknown finish reason {finished.finish_reason}; update pdserve")
        end = (reason, finished.stop_reason)
        choices = tuple(self._choices[i].choice(self._echo, *end) for i in range(self._num_choices))
        return Result(
            text=choices[0].text,
            token_ids=choices[0].token_ids,
            finish_reason=reason,
            stop_reason=finished.stop_reason or None,
            usage=convert.to_usage(finished.usage),
            timings=convert.to_timings(finished.timings),
            request_id=accepted.request_id,
            model=accepted.model,
            seed=accepted.seed,
            logprobs=choices[0].logprobs,
            prompt_logprobs=tuple(self._prompt_logprobs or ([None] if self._scored else [])),
            choices=choices,
        )

    def _broken(self, what: str) -> ServerError:
        return ServerError(f"protocol error: {what}", reason="PROTOCOL_ERROR", request_id=self.request_id)


class ControlTries:
    """Which failure of a short call sends it to the next router, and what to report when none is left.

    Args:
        addresses: Routers that are tried.
        request_id: The request concerned, if any.
        everywhere: Also go on after NOT_FOUND: another router may know the request.
    """

    def __init__(self, addresses: tuple[str, ...], request_id: str | None, everywhere: bool) -> None:
        self._addresses = addresses
        self._request_id = request_id
        self._everywhere = everywhere
        self._missing: PdserveError | None = None
        self._refusal: PdserveError | None = None
        self._message: str | None = None

    def failed(self, status: str, message: str, metadata: Metadata) -> None:
        """Takes a failure; returns when the next router is to be tried.

        Raises:
            PdserveError: It is over.
        """
        metadata = tuple(metadata)
        if status == "DEADLINE_EXCEEDED" and not _has_reason(metadata):
            message = "the router did not answer in time: it hangs, or has too much to do"
        error = error_from_status(status, message, metadata, self._request_id)
        if status == "NOT_FOUND" and self._everywhere:
            self._missing = error
        elif status == "UNAVAILABLE" and error.reason != status:
            self._refusal = error
        elif status == "UNAVAILABLE":
            self._message = message
        else:
            raise error

    def exhausted(self) -> PdserveError:
        """The error to raise after the last router; "not found" only if no router was silent."""
        if self._refusal is not None:
            return self._refusal
        if self._message is not None or self._missing is None:
            return unreachable(self._addresses, self._message or "not tried", self._request_id)
        return self._missing


def _has_reason(pairs: Metadata) -> bool:
    """Whether the server said so itself."""
    return any(key == REASON_KEY for key, _ in pairs)


def unreachable(addresses: tuple[str, ...], message: str, request_id: str | None = None) -> Unavailable:
    """The error for routers that do not answer."""
    return Unavailable(
        f"no router answered at {', '.join(addresses)}: check the address, and that one runs there; 'pdserve up' "
        f"starts one ({message})",
        reason="UNREACHABLE",
        request_id=request_id,
    )
