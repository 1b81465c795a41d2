"""Which workers a request goes to. A policy is filters, scorers and a picker: functions over the table's pool. Pure.

A filter says which workers may take the request; scorers order them, the first that differs decides, lower is better;
the picker takes one of the ordered workers, and is given its randomness. Equal workers are drawn by lot: between two
load reports several routers know the same of the workers, and must not all choose the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdserve.router.worker_table import LiveWorker, Pool, WorkerFacts, can_pair


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """What the policy may know of a request.

    Attributes:
        prompt_tokens: Tokens to compute.
        avoid: Workers that refused it lately; taken only when nobody else can.
    """

    prompt_tokens: int
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request is computed.

    Attributes:
        prefill: Computes the prompt; None when `decode` computes it too (a MIXED route).
        decode: Generates.
    """

    prefill: WorkerFacts | None
    decode: WorkerFacts

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """The workers of the route, prefill first."""
        return tuple(f.worker_id for f in (self.prefill, self.decode) if f is not None)


Filter = Callable[[Ask, LiveWorker], bool]
Scorer = Callable[[Ask, LiveWorker], float]
Ranked = Sequence[tuple[tuple[float, ...], LiveWorker]]
"""Scores and workers, best first; at least one."""
Draw = Callable[[int], int]
"""Draws an integer in [0, n)."""
Picker = Callable[[Ranked, Draw], LiveWorker]


def fits(ask: Ask, worker: LiveWorker) -> bool:
    """Filter: the prompt and one token fit into the worker's whole pool."""
    return worker.facts.layout.num_pages(ask.prompt_tokens + 1) <= worker.facts.num_pages


def avoided(ask: Ask, worker: LiveWorker) -> float:
    """Scorer: workers that refused lately come last."""
    return float(worker.facts.worker_id in ask.avoid)


def pending_prefill_tokens(ask: Ask, worker: LiveWorker) -> float:
    """Scorer: prompt tokens ahead of this request."""
    return float(worker.pending_prefill_tokens)


def num_sequences(ask: Ask, worker: LiveWorker) -> float:
    """Scorer: sequences running, waiting or reserved."""
    return float(worker.num_sequences)


def used_pages(ask: Ask, worker: LiveWorker) -> float:
    """Scorer: share of the pages that is taken."""
    return 1.0 - worker.load.num_free_pages / worker.facts.num_pages


def best(ranked: Ranked, draw: Draw) -> LiveWorker:
    """Picker: the best one, by lot among those that score the same."""
    equal = [worker for score, worker in ranked if score == ranked[0][0]]
    return equal[draw(len(equal))] if len(equal) > 1 else equal[0]


@dataclass(frozen=True, slots=True)
class Stage:
    """How one worker is chosen out of several.

    Attributes:
        filters: All must agree.
        scorers: In order of weight.
        picker: Takes one of the ordered workers.
    """

    filters: tuple[Filter, ...]
    scorers: tuple[Scorer, ...]
    picker: Picker = best

    def choose(self, ask: Ask, workers: Sequence[LiveWorker], draw: Draw) -> LiveWorker | None:
        """The chosen worker, or None when no worker passes the filters."""
        able = [w for w in workers if all(f(ask, w) for f in self.filters)]
        if not able:
            return None
        scored = [(self.score(ask, w), w) for w in able]
        return self.picker(sorted(scored, key=lambda s: (s[0], s[1].facts.worker_id)), draw)

    def score(self, ask: Ask, worker: LiveWorker) -> tuple[float, ...]:
        """The worker's scores, lower is better."""
        return tuple(s(ask, worker) for s in self.scorers)


@dataclass(frozen=True, slots=True)
class Policy:
    """A routing policy.

    Attributes:
        prefill: Chooses where prompts are computed.
        decode: Chooses where tokens are generated.
        decode_prefills: With no prefill worker, decode workers compute prompts themselves.
    """

    prefill: Stage
    decode: Stage
    decode_prefills: bool = False

    def can_route(self, ask: Ask, pool: Pool) -> bool:
        """True when the pool has a route for this request."""
        return self.choose(ask, pool, lambda n: 0) is not None

    def choose(self, ask: Ask, pool: Pool, draw: Draw) -> Route | None:
        """Chooses a (prefill, decode) pair or one worker for both, whichever has less prefill work ahead.

        Args:
            ask: The request.
            pool: The workers.
            draw: Randomness; used where several workers are equally good.

        Returns:
            The route, or None when the pool has none for this request.
        """
        alone = pool.mixed + (pool.decode if self.decode_prefills and not pool.prefill else ())
        mixed = self.prefill.choose(ask, alone, draw)
        pair = self._pair(ask, pool, draw)
        if pair is not None and mixed is not None:
            cost = (self.prefill.score(ask, pair[0]), self.decode.score(ask, pair[1]))
            if cost > (self.prefill.score(ask, mixed), self.decode.score(ask, mixed)):
                pair = None
        if pair is not None:
            return Route(pair[0].facts, pair[1].facts)
        return Route(None, mixed.facts) if mixed is not None else None

    def _pair(self, ask: Ask, pool: Pool, draw: Draw) -> tuple[LiveWorker, LiveWorker] | None:
        decodes = [w for w in pool.decode if all(f(ask, w) for f in self.decode.filters)]
        able = [p for p in pool.prefill if any(can_pair(p.facts, d.facts) for d in decodes)]
        prefill = self.prefill.choose(ask, able, draw)
        if prefill is None:
            return None
        decode = self.decode.choose(ask, [d for d in decodes if can_pair(prefill.facts, d.facts)], draw)
        return (prefill, decode) if decode is not None else None


def least_loaded(*, decode_prefills: bool = False) -> Policy:
    """The policy `least-loaded`: prefill by pending prompt tokens, decode by sequences and then by used pages."""
    return Policy(
        prefill=Stage((fits,), (avoided, pending_prefill_tokens, num_sequences)),
        decode=Stage((fits,), (avoided, num_sequences, used_pages)),
        decode_prefills=decode_prefills,
    )
