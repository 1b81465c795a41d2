"""LLM: the engine inside the caller's process, without network or threads.

    llm = LLM(model="SmolLM2-135M-Instruct")
    print(llm.generate(["Hello"], SamplingParams(max_tokens=16))[0].text)

The caller's thread computes the steps: `generate` until all its prompts are done, `stream` until its next news.
"""

from __future__ import annotations

import difflib
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import fields, replace
from numbers import Integral
from pathlib import Path
from typing import cast

from pdserve.core.config import as_keywords
from pdserve.core.errors import (
    CapacityError,
    ConfigError,
    EngineError,
    PdserveError,
    RequestError,
    UnimplementedError,
)
from pdserve.core.request import Request, check_cache_salt, check_priority
from pdserve.core.sampling import SamplingParams, check_token_ids
from pdserve.core.sampling_types import is_text
from pdserve.core.structured import check_structured
from pdserve.core.text_stream import echo_text
from pdserve.core.tokenizer import ChatMessages
from pdserve.engine.bars import batch_bar
from pdserve.engine.build import build_core
from pdserve.engine.config import EngineConfig
from pdserve.engine.kv_cache import PlainPool
from pdserve.engine.outputs import ChoiceOutput, Completion, OutputDelta, RequestOutput
from pdserve.engine.preparation import PREPARE_WAIT_S, finish
from pdserve.engine.progress import Progress
from pdserve.engine.step import Abort, Add, Command, Event, PromptLogprobs, SequenceFailed, TokensSampled

Prompt = str | Sequence[int] | ChatMessages
"""Text, token ids, or chat messages with "role" and "content"."""


class LLM:
    """A model and its engine.

    Not for several threads at once. Several streams may be read in turns: they run in one batch. The model computes on
    one CPU thread unless `threads` says more; it is torch's number of threads, for the whole process.

    Args:
        model: A local directory, a hub id, a GGUF file, or the built-in SmolLM2-135M-Instruct.
        progress: Told about long steps of the start.
        **options: Other fields of `EngineConfig`.

    Raises:
        ConfigError: An option or the model is wrong.
    """

    def __init__(self, model: str | Path | None = None, *, progress: Progress | None = None, **options: object) -> None:
        if model is not None:
            options["model"] = str(model)
        if not isinstance(progress, Progress | None):
            raise ConfigError(f"progress is {progress!r:.80}; it must have begin, update and end, or be left out")
        if unknown := options.keys() - (known := {f.name for f in fields(EngineConfig)}):
            close = difflib.get_close_matches(min(unknown), known, n=1)
            hint = f"did you mean {close[0]}?" if close else "the options are the fields of EngineConfig"
            raise ConfigError(f"LLM takes no {min(unknown)}; {hint}")
        try:
            self._built = build_core(EngineConfig(**options), PlainPool, progress)  # type: ignore[arg-type]
        except ConfigError as e:
            raise ConfigError(as_keywords(e.message, EngineConfig), reason=e.reason, status=e.status) from e
        self.tokenizer = self._built.tokenizer
        self._commands: list[Command] = []
        self._open: dict[str, ChoiceOutput] = {}
        self._num_requests = 0

    @property
    def max_model_len(self) -> int:
        """Prompt and output tokens together, at most."""
        return self._built.max_model_len

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
        priority: int = 0,
        progress: bool = False,
    ) -> list[Completion]:
        """Computes all prompts in one batch.

        Args:
            prompts: One prompt of any kind, or several.
            sampling_params: For all, or one per prompt; default: `SamplingParams()`.
            cache_salt: Computed prompts are reused only among requests of the same salt; empty: shared.
            priority: Lower starts first; only `scheduling_policy="priority"` takes another than 0.
            progress: Show a bar on standard error: prompts done, output tokens per second, time left.

        Returns:
            One completion per prompt, in order.

        Raises:
            RequestError: A prompt or parameter is wrong; nothing was computed.
            EngineError: The engine failed.
        """
        several = _several(prompts)
        each = _each(sampling_params, len(several))
        requests = [self._request(p, s, cache_salt, priority) for p, s in zip(several, each, strict=True)]
        outputs: list[RequestOutput] = []
        try:
            outputs.extend(self._submit(r, p) for r, p in zip(requests, several, strict=True))
            with batch_bar(outputs) if progress else nullcontext() as bar:
                while not all(o.ended for o in outputs):
                    self._step()
                    if bar is not None:
                        bar.update(time.monotonic())
        finally:
            for output in outputs:
                self._close(output)
        for output in outputs:
            if output.error is not None:
                raise output.error
        return [o.completion() for o in outputs]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        priority: int = 0,
    ) -> Iterator[OutputDelta]:
        """Computes one prompt and gives its output as it comes. Leaving the loop early cancels the rest.

        With n > 1 the deltas of all choices come mixed, each in order.

        Raises:
            RequestError: The prompt or a parameter is wrong; raised at once, not at the first item.
        """
        [sampling] = _each(sampling_params, 1)
        request = self._request(prompt, sampling, cache_salt, priority)
        deltas = self._stream(self._submit(request, prompt))
        next(deltas)  # it is inside its `try` now: who drops it unread cancels it too
        return cast(Iterator[OutputDelta], deltas)

    def _stream(self, output: RequestOutput) -> Iterator[OutputDelta | None]:
        try:
            yield None
            while output.error is None:
                if (choice := output.news) is not None:
                    yield choice.take()
                elif output.ended:
                    return
                else:
                    self._step()
            raise output.error
        finally:
            self._close(output)

    def _request(self, prompt: Prompt, sampling: SamplingParams, cache_salt: str, priority: int) -> Request:
        check_cache_salt(cache_salt)
        check_priority(priority)
        tokens = self._encode(prompt)
        if not tokens:
            raise RequestError("the prompt is empty; give at least one token", reason="EMPTY_PROMPT")
        check_token_ids("prompt", tokens, self._built.vocab_size)
        sampling.check_request(len(tokens), self._built.vocab_size)
        if len(tokens) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens; the model takes {self.max_model_len} with the output",
                reason="PROMPT_TOO_LONG",
            )
        max_tokens = sampling.tokens_to_generate(len(tokens), self.max_model_len)
        check_structured(sampling.structured_outputs, self.tokenizer)
        if (preparation := self._built.prepare(sampling)) is not None:
            finish(preparation, PREPARE_WAIT_S)
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        self._num_requests += 1
        return Request(
            key=str(self._num_requests),
            prompt_token_ids=tuple(tokens),
            sampling=replace(sampling, seed=seed, max_tokens=max_tokens),
            eos_token_ids=self._built.eos_token_ids,
            arrival_s=time.monotonic(),
            cache_salt=cache_salt,
            priority=priority,
        )

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, str):
            if is_text(prompt):
                return self.tokenizer.encode(prompt)
        else:
            parts = _parts(prompt)
            if all(isinstance(part, Integral) and not isinstance(part, bool) for part in parts):
                return [int(token) for token in cast(list[int], parts)]
            if all(isinstance(part, Mapping) for part in parts):
                return self.tokenizer.encode_chat(cast(ChatMessages, parts))
        raise _bad_prompt(prompt)

    def _submit(self, request: Request, prompt: Prompt) -> RequestOutput:
        first, *forks = choices = request.choices()
        echo = echo_text(self.tokenizer, prompt, request.prompt_token_ids, request.sampling)
        output = RequestOutput(request, choices, self.tokenizer, echo)
        self._open.update((choice.key, choice) for choice in output.choices)
        self._commands.append(Add(first, forks=tuple(forks)))
        return output

    def _close(self, output: RequestOutput) -> None:
        for choice in output.choices:
            self._end(choice)

    def _end(self, choice: ChoiceOutput) -> None:
        if self._open.pop(choice.key, None) is not None:
            self._commands.append(Abort(choice.key))

    def _step(self) -> None:
        commands, self._commands = self._commands, []
        core = self._built.core
        core.begin_step(commands)
        self._hear(core.schedule(time.monotonic()).events)  # before an interrupt can lose them
        step = core.compute()
        self._hear(step.events)
        if not step.num_tokens and (wakeup := core.next_wakeup()) is not None:
            time.sleep(max(0.0, wakeup - time.monotonic()))  # a batch is being collected, and nobody can add to it

    def _hear(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, TokensSampled) and (output := self._open.get(event.key)) is not None:
                if output.push(event):
                    self._end(output)
                elif event.finish_reason is not None:
                    del self._open[event.key]
            elif isinstance(event, SequenceFailed) and (output := self._open.pop(event.key, None)) is not None:
                output.error = _error(event)
            elif isinstance(event, PromptLogprobs) and (output := self._open.get(event.key)) is not None:
                output.prompt_logprobs += event.logprobs


def _several(prompts: object) -> list[Prompt]:
    """The prompts; one alone, text or a sequence that begins with a token id or a chat message, needs no list."""
    if isinstance(prompts, str):
        return [prompts]
    parts = _parts(prompts)
    return [cast(Prompt, parts)] if parts and isinstance(parts[0], Integral | Mapping) else parts


def _parts(prompt: object) -> list[Prompt]:
    if not isinstance(prompt, bytes | Mapping):
        with suppress(TypeError):  # not iterable, or only seemingly
            return list(cast(Iterable[Prompt], prompt))
    raise _bad_prompt(prompt)


def _each(sampling_params: object, num_prompts: int) -> list[SamplingParams]:
    """Sampling parameters of each prompt."""
    if sampling_params is None:
        sampling_params = SamplingParams()
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    several = isinstance(sampling_params, Sequence) and not isinstance(sampling_params, str)
    given = list(cast(Sequence[SamplingParams], sampling_params if several else [sampling_params]))
    for one in given:
        if not isinstance(one, SamplingParams):
            raise RequestError(
                f"sampling_params is {one!r:.80}; it must be a SamplingParams, e.g. SamplingParams(max_tokens=16), "
                "or a sequence of them",
                reason="BAD_PARAMETER",
            )
    if len(given) != num_prompts:
        raise RequestError(
            f"sampling_params has {len(given)} entries for {num_prompts} prompts; give one each, or one for all",
            reason="BAD_PARAMETER",
        )
    return given


def _bad_prompt(prompt: object) -> RequestError:
    return RequestError(
        f"a prompt is {prompt!r:.80}; it must be text that UTF-8 can encode, a sequence of token ids, or "
        'a sequence of chat messages such as {"role": "user", "content": "Hello"}',
        reason="BAD_PROMPT",
    )


def _error(event: SequenceFailed) -> PdserveError:
    kinds: dict[str, type[PdserveError]] = {
        "INVALID_ARGUMENT": RequestError,
        "RESOURCE_EXHAUSTED": CapacityError,
        "UNIMPLEMENTED": UnimplementedError,
    }
    return kinds.get(event.status, EngineError)(
        as_keywords(event.message, EngineConfig), reason=event.reason, status=event.status
    )
