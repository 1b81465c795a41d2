"""From finished requests to the numbers of `pdserve bench handoff`. Pure.

prefill's step ends -> token 1 --------------------- hand-off gap ---------------------> token 2
prefill:  hashes -> watermark, manifest
decode:             manifest -> last range pulled, verified -> VALID -> first decode step
                    '---------------- exposed -----------------'
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pdserve.bench.metrics import percentile
from pdserve.bench.report import Row
from pdserve.client import Result

ALLOWED_FACTOR = 1.3
ALLOWED_EXTRA_S = 0.005
PAGE_UNIT_BYTES = 512
"""Pages are multiples of it in every layout of a real model; what a plane adds to a page is less."""


class NotHandedOff(Exception):
    """A request was not the one that is measured: the message says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request that was handed off. Times in seconds.

    Attributes:
        num_prompt_tokens: Of the prompt.
        exposed_s: Manifest received to the begin of the first decode step: then its pages are VALID.
        gap_s: Between tokens 1 and 2, at the router.
        itl_s: Mean gap between further tokens, at the router.
        e2e_s: Arrival at the router to the end.
        pull_s: In which pages moved.
        pull_hidden_s: Part of `pull_s` before the manifest was received.
        num_bytes: Moved in all.
        last_pages: Pages of the last range.
        last_bytes: Their bytes, headers included.
    """

    num_prompt_tokens: int
    exposed_s: float
    gap_s: float
    itl_s: float
    e2e_s: float
    pull_s: float
    pull_hidden_s: float
    num_bytes: int
    last_pages: int
    last_bytes: int

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, without what the plane adds."""
        return max(PAGE_UNIT_BYTES, self.last_bytes // self.last_pages // PAGE_UNIT_BYTES * PAGE_UNIT_BYTES)


def sample_of(result: Result, num_prompt_tokens: int, num_output_tokens: int) -> Sample:
    """What one finished request says of its hand-off.

    Args:
        result: Of the client.
        num_prompt_tokens: That were sent.
        num_output_tokens: That were asked for; 3 at least.

    Raises:
        NotHandedOff: A prefix cache helped, the answer is shorter, or no pages moved from prefill to decode.
    """
    usage, t = result.usage, result.timings
    if (usage.prompt_tokens, usage.cached_tokens) != (num_prompt_tokens, 0):
        raise NotHandedOff(f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens came from a prefix cache")
    if usage.completion_tokens != num_output_tokens:
        raise NotHandedOff(f"it has {usage.completion_tokens} output tokens; {num_output_tokens} were asked for")
    if t.transfer_exposed_s is None or t.handoff_gap_s is None or t.tpot_s is None or not t.transfer_last_pages:
        raise NotHandedOff("its pages were not handed from a prefill to a decode worker")
    assert t.e2e_s is not None
    return Sample(
        num_prompt_tokens=num_prompt_tokens,
        exposed_s=t.transfer_exposed_s,
        gap_s=t.handoff_gap_s,
        itl_s=(t.tpot_s * (num_output_tokens - 1) - t.handoff_gap_s) / (num_output_tokens - 2),
        e2e_s=t.e2e_s,
        pull_s=t.transfer_pull_s or 0.0,
        pull_hidden_s=t.transfer_pull_hidden_s or 0.0,
        num_bytes=t.transfer_bytes,
        last_pages=t.transfer_last_pages,
        last_bytes=t.transfer_last_bytes,
    )


@dataclass(frozen=True, slots=True)
class Group:
    """All requests of one length over one plane.

    Attributes:
        plane: The data plane.
        samples: One at least.
        backend_s: Pages of a last range -> what the bare plane takes for so many, seconds.
    """

    plane: str
    samples: Sequence[Sample]
    backend_s: Mapping[int, float]

    @property
    def num_prompt_tokens(self) -> int:
        """Of each prompt."""
        return self.samples[0].num_prompt_tokens

    def median(self, value: Callable[[Sample], float]) -> float:
        """Of all requests."""
        return statistics.median(map(value, self.samples))

    def p99(self, value: Callable[[Sample], float]) -> float:
        """Of all requests."""
        return percentile([value(s) for s in self.samples], 99)

    def rate(self, sample: Sample) -> float:
        """What the bare plane makes of the last range, bytes per second."""
        return sample.last_pages * sample.page_bytes / self.backend_s[sample.last_pages]

    def allowed_s(self, sample: Sample) -> float:
        """What manifest to VALID may take, seconds."""
        return ALLOWED_FACTOR * self.backend_s[sample.last_pages] + ALLOWED_EXTRA_S

    def of_allowed(self, sample: Sample) -> float:
        """Manifest to VALID ÷ what it may take."""
        return sample.exposed_s / self.allowed_s(sample)

    @property
    def num_met(self) -> int:
        """Requests within the goal."""
        return sum(self.of_allowed(s) <= 1 for s in self.samples)


def second_token(sample: Sample) -> float:
    """How much later the second token comes than a further one, as a share of a further one."""
    return sample.gap_s / sample.itl_s - 1


def exposed_share(sample: Sample) -> float:
    """Part of a request's time in which it waited for its pages alone."""
    return sample.exposed_s / sample.e2e_s


def pull_share(sample: Sample) -> float:
    """Part of a request's time in which pages moved, hidden or not."""
    return sample.pull_s / sample.e2e_s


def hidden_share(sample: Sample) -> float:
    """Part of the pulling that ran before prefill had ended."""
    return sample.pull_hidden_s / sample.pull_s if sample.pull_s else 0.0


def rows(groups: Iterable[Group]) -> list[Row]:
    """All values, the goal beside what it is for."""
    found = []
    for group in groups:
        name = f"{group.plane}, {group.num_prompt_tokens} tokens"
        allowed = f"<= {group.median(group.allowed_s) * 1000:.1f}"
        count = len(group.samples)
        found += [
            Row(f"{name}: manifest to VALID, median", group.median(lambda s: s.exposed_s) * 1000, "ms", allowed),
            Row(f"{name}: manifest to VALID, P99", group.p99(lambda s: s.exposed_s) * 1000, "ms"),
            Row(f"{name}: of what is allowed, median", group.median(group.of_allowed), "x", "<= 1"),
            Row(f"{name}: requests within it", group.num_met, f"of {count}", f">= {count}"),
            Row(f"{name}: the bare plane", group.median(group.rate) / 1e9, "GB/s"),
            Row(f"{name}: hand-off gap, median", group.median(lambda s: s.gap_s) * 1000, "ms"),
            Row(f"{name}: hand-off gap, P99", group.p99(lambda s: s.gap_s) * 1000, "ms"),
            Row(f"{name}: mean ITL, median", group.median(lambda s: s.itl_s) * 1000, "ms"),
            Row(f"{name}: second token later by", group.median(second_token) * 100, "%"),
            Row(f"{name}: exposed transfer ÷ E2E", group.median(exposed_share) * 100, "%"),
            Row(f"{name}: all pulls ÷ E2E", group.median(pull_share) * 100, "%"),
            Row(f"{name}: pulling hidden behind prefill", group.median(hidden_share) * 100, "%"),
        ]
    return found
