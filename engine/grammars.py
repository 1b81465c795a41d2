"""Grammars: compiles the grammars of structured outputs in a thread of its own, and keeps them.

prepare(params) ──▶ bounded queue ──▶ compile thread ──▶ kept for the life of the request's `StructuredOutputs`,
                                                         and in an LRU for the next request of the same form
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.core.errors import CapacityError, ConfigError, EngineError, PdserveError
from pdserve.core.sampling import SamplingParams
from pdserve.core.structured import StructuredOutputs, grammar_of, parser_limits, refusal
from pdserve.engine.preparation import not_ready

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_GRAMMARS = 64
"""Compiled grammars that are kept; the worst takes tens of MB (`core.structured.parser_limits`)."""
MAX_QUEUED = 64
"""Grammars that wait for the compile thread; the worst takes about a second."""
STEP_WAIT_S = 0.05
"""Longest wait for a grammar on the step thread."""
_REST = 19
"""Times as long as a wait on the step thread no further one may begin: waits take at most a twentieth of its time."""


@contextmanager
def library_errors() -> Iterator[None]:
    """Whatever the library raises, its panics too (no `Exception`s), becomes an EngineError of this one request."""
    try:
        yield
    except (PdserveError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:
        raise EngineError(
            f"structured_outputs: the library failed: {type(e).__name__}: {e!s:.300}", reason="GRAMMAR_FAILED"
        ) from e


def dead_end(what: str, why: str) -> str:
    """What to say when a matcher allows no token, nor the end: the library's reason, unless that is just this.

    Args:
        what: What it means where no token fits.
        why: The matcher's error.
    """
    return what if "NoExtension" in why else f"it became too complex: {why.split('<')[0].strip()}"


@dataclass(eq=False, slots=True)
class _Entry:
    """A grammar that is being compiled, or was.

    Attributes:
        future: The compiled grammar, or what is wrong with it.
        num_waiting: Requests that asked for it and have not given it up.
        dropped: True: nobody else may get this one.
    """

    future: Future[LLMatcher | PdserveError]
    num_waiting: int = 0
    dropped: bool = False

    def result(self, timeout_s: float) -> LLMatcher:
        """Waits for the grammar.

        Raises:
            PdserveError: There is none.
            TimeoutError, CancelledError: See `Future`.
        """
        compiled = self.future.result(timeout_s)
        if isinstance(compiled, PdserveError):
            raise _fresh(compiled)
        return compiled


def _fresh(error: PdserveError) -> PdserveError:
    """The same without a traceback, whose frames know the request: an error that is kept would keep that."""
    return type(error)(error.message, reason=error.reason, status=error.status, retry_after_s=error.retry_after_s)


class _Compiling:
    """`Preparation` of one request."""

    def __init__(self, entry: _Entry, give_up: Callable[[_Entry], None]) -> None:
        self._entry = entry
        self._give_up = give_up
        self._given_up = False

    def result(self, timeout_s: float) -> None:
        """See `Preparation`."""
        try:
            self._entry.result(timeout_s)
        except CancelledError:
            raise EngineError("structured_outputs: the grammar was given up", reason="GRAMMAR_FAILED") from None

    def done(self) -> bool:
        """See `Preparation`."""
        return self._entry.future.done()

    def on_done(self, call: Callable[[], None]) -> None:
        """See `Preparation`."""
        self._entry.future.add_done_callback(lambda _: call())

    def give_up(self) -> None:
        """See `Preparation`."""
        if not self._given_up:
            self._given_up = True
            self._give_up(self._entry)


class Grammars:
    """Compiled grammars of one model's tokens; safe to use from several threads.

    Args:
        tokenizer_file: The model's `tokenizer.json`, read when the first grammar is compiled.
        vocab_size: Rows of the model's head.
        eos_token_ids: End-of-sequence tokens.
        max_grammars: Grammars to keep when no request has them any more.
        max_queued: Grammars that may wait to be compiled.
        step_wait_s: Longest wait of `matcher`, seconds.

    Attributes:
        eos_token_ids: As given, sorted.
    """

    def __init__(
        self,
        tokenizer_file: Path,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        *,
        max_grammars: int = MAX_GRAMMARS,
        max_queued: int = MAX_QUEUED,
        step_wait_s: float = STEP_WAIT_S,
    ) -> None:
        self._file = tokenizer_file
        self._vocab_size = vocab_size
        self.eos_token_ids = sorted(eos_token_ids)
        self._max_grammars, self._max_queued, self._step_wait_s = max_grammars, max_queued, step_wait_s
        self._lock = threading.RLock()  # what is done already calls back at once
        self._compiled: OrderedDict[StructuredOutputs, _Entry] = OrderedDict()
        self._held: dict[int, tuple[weakref.ref[StructuredOutputs], _Entry]] = {}
        self._num_queued = 0
        self._next_wait_s = 0.0  # monotonic; step thread only
        self._compiler = ThreadPoolExecutor(1, "grammar-compiler")
        self._tokenizer: LLTokenizer | None = None  # compile thread only

    def prepare(self, params: SamplingParams) -> _Compiling | None:
        """Begins to compile what a request needs; returns at once. It stays until `params.structured_outputs` dies.

        Raises:
            CapacityError: Too many grammars wait to be compiled.
        """
        if params.structured_outputs is None:
            return None
        return _Compiling(self._get(params.structured_outputs), self._give_up)

    def matcher(self, structured: StructuredOutputs) -> LLMatcher:
        """A fresh matcher, at the beginning of an output. For the step thread: hardly waits, whatever is asked for.

        Raises:
            RequestError: The grammar is wrong or too complex.
            CapacityError: It is not compiled.
            ConfigError: The library cannot read the model's tokenizer.
            EngineError: The library failed.
        """
        entry, begun = self._get(structured), time.monotonic()
        wait_s = self._step_wait_s if begun >= self._next_wait_s else 0.0
        try:
            compiled = entry.result(wait_s)
        except (TimeoutError, CancelledError):
            raise not_ready(wait_s) from None
        finally:
            if wait_s:
                waited = time.monotonic() - begun
                self._next_wait_s = begun + waited * (1 + _REST)
        with library_errors():
            return compiled.deep_copy()

    def renew(self, structured: StructuredOutputs) -> None:
        """Lets the grammar be compiled anew: matchers of one grammar share tables, which may have become full."""
        with self._lock:
            held = self._held.pop(id(structured), None)
            if held is not None and self._compiled.get(structured) is held[1]:
                del self._compiled[structured]

    def _get(self, structured: StructuredOutputs) -> _Entry:
        with self._lock:
            held = self._held.get(id(structured))
            entry = held[1] if held is not None and held[0]() is structured else self._compiled.get(structured)
            if entry is None or entry.dropped:
                entry = self._submit(structured)
            if self._compiled.setdefault(structured, entry) is not entry and entry.future.done():
                self._compiled[structured] = entry
            self._compiled.move_to_end(structured)
            if len(self._compiled) > self._max_grammars:
                self._compiled.popitem(last=False)
            self._hold(structured, entry)
            entry.num_waiting += 1
            return entry

    def _hold(self, structured: StructuredOutputs, entry: _Entry) -> None:
        name, held = id(structured), self._held

        def release(ref: weakref.ref[StructuredOutputs]) -> None:  # in whatever thread, and without the lock
            if (now := held.get(name)) is not None and now[0] is ref:
                held.pop(name, None)

        held[name] = (weakref.ref(structured, release), entry)

    def _submit(self, structured: StructuredOutputs) -> _Entry:
        if self._num_queued >= self._max_queued:
            raise CapacityError(
                f"structured_outputs: {self._num_queued} grammars wait to be compiled; retry later",
                reason="GRAMMAR_QUEUE_FULL",
                retry_after_s=1.0,
            )
        self._num_queued += 1
        entry = _Entry(self._compiler.submit(self._compile, structured))
        entry.future.add_done_callback(lambda _: self._left_queue())
        return entry

    def _left_queue(self) -> None:
        with self._lock:
            self._num_queued -= 1

    def _give_up(self, entry: _Entry) -> None:
        with self._lock:
            entry.num_waiting -= 1
            if entry.num_waiting or entry.future.done():
                return
            entry.dropped = not entry.future.running()
        if entry.dropped:
            entry.future.cancel()  # not under the lock: it calls back

    def _compile(self, structured: StructuredOutputs) -> LLMatcher | PdserveError:
        try:
            return self._compiled_now(structured)
        except PdserveError as e:
            return _fresh(e)

    def _compiled_now(self, structured: StructuredOutputs) -> LLMatcher:
        with library_errors():
            from llguidance import LLMatcher

            if self._tokenizer is None:
                self._tokenizer = self._read_tokenizer()
            matcher = LLMatcher(self._tokenizer, grammar_of(structured), log_level=0, limits=parser_limits())
            if matcher.is_error():
                raise refusal(structured, matcher.get_error())
            first = matcher.deep_copy()
            first.compute_bitmask()
            if first.is_error():
                raise refusal(structured, dead_end("no text satisfies it", first.get_error()))
            return matcher

    def _read_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        if not self.eos_token_ids:
            raise ConfigError("structured_outputs: this model has no end-of-sequence token", reason="NO_EOS_TOKEN")
        try:
            text = self._file.read_text(encoding="utf-8")
            return LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self.eos_token_ids)
        except (OSError, ValueError) as e:
            raise ConfigError(
                f"structured_outputs: the library cannot use this model's tokenizer: {e!s:.300}", reason="BAD_TOKENIZER"
            ) from e
