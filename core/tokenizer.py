"""Text to token ids and back, without torch or transformers: the router tokenises too.

A tokenizer is read once from a model directory (`tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`) and
never changes. `encode` gives the ids that transformers' AutoTokenizer gives for the same directory.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import jinja2
import jinja2.ext
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pdserve.core.errors import ConfigError, RequestError
from pdserve.core.sampling_types import is_text

ChatMessages = Sequence[Mapping[str, str]]
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class _Backend(Protocol):
    """What `Tokenizer` needs of a vocabulary."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def token_text(self, token_id: int) -> str | None: ...

    @property
    def vocab_size(self) -> int: ...


class Tokenizer:
    """Tokenizer of one model.

    Args:
        backend: The vocabulary.
        special_token_ids: Ids left out of text when special tokens are skipped.
        chat_template: Jinja source; None: the model has no chat template.
        template_values: Names that the template may use beside the messages, e.g. bos_token.
        can_constrain: Tokens are pieces of text, of which structured outputs can be made.

    Attributes:
        can_constrain: As given.

    Raises:
        ConfigError: The chat template is not valid Jinja.
    """

    def __init__(
        self,
        backend: _Backend,
        *,
        special_token_ids: frozenset[int] = frozenset(),
        chat_template: str | None = None,
        template_values: Mapping[str, object] | None = None,
        can_constrain: bool = True,
    ) -> None:
        self.can_constrain = can_constrain
        self._backend = backend
        self._special = special_token_ids
        self._values = dict(template_values or {})
        self._template = _compile(chat_template) if chat_template else None

    @classmethod
    def from_dir(cls, path: Path | str) -> Tokenizer:
        """Reads a model directory.

        Raises:
            ConfigError: A file is missing or broken; the message names it.
        """
        directory = Path(path)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"{directory} has no tokenizer.json; name a model directory that has one", reason="NO_TOKENIZER"
            )
        try:
            inner = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except Exception as e:  # the library raises bare Exception for a broken file
            raise ConfigError(f"{file} cannot be read: {e}; fetch the model again", reason="BAD_TOKENIZER") from e
        inner.no_truncation()
        inner.no_padding()
        special = frozenset(i for i, t in inner.get_added_tokens_decoder().items() if t.special)
        config = _read_config(directory / "tokenizer_config.json")
        return cls(
            _FileBackend(inner),
            special_token_ids=special,
            chat_template=_chat_template(directory, config),
            template_values=_special_tokens(config),
        )

    @classmethod
    def fake(cls, vocab_size: int) -> Tokenizer:
        """A tokenizer for the fake runner: token i is the text ` t<i>`; other words become some id.

        Args:
            vocab_size: Number of tokens, >= 1.
        """
        template = "{% for m in messages %} {{ m.role }} {{ m.content }}{% endfor %} assistant"
        return cls(_FakeBackend(vocab_size), chat_template=template, can_constrain=False)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self._backend.vocab_size

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with the special tokens that the model's files add."""
        return self._backend.encode(text, True)

    def encode_part(self, text: str) -> list[int]:
        """Ids of a text that is not a whole prompt: no special tokens are added."""
        return self._backend.encode(text, False)

    def encode_chat(self, messages: ChatMessages) -> list[int]:
        """Ids of a conversation, rendered by the model's template and open for the assistant's answer.

        Args:
            messages: Mappings with "role" and "content", in order; at least one.

        Raises:
            RequestError: No messages, no template, or the template refuses the messages.
        """
        return self._backend.encode(self.render_chat(messages), False)

    def render_chat(self, messages: ChatMessages) -> str:
        """The text that `encode_chat` encodes.

        Raises:
            RequestError: See `encode_chat`.
        """
        if not messages:
            raise RequestError("the chat has no messages; send at least one", reason="EMPTY_PROMPT")
        if self._template is None:
            raise RequestError(
                "this model has no chat template; send the prompt as text or token ids", reason="NO_CHAT_TEMPLATE"
            )
        plain = [dict(m) for m in messages]
        for at, message in enumerate(plain):
            for name in ("role", "content"):
                if not is_text(message.get(name)):
                    raise RequestError(
                        f"chat message {at}: {name} is {message.get(name)!r:.80}; it must be text that UTF-8 encodes",
                        reason="BAD_CHAT_MESSAGES",
                    )
        try:
            return self._template.render(
                messages=plain, add_generation_prompt=True, tools=None, documents=None, **self._values
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as e:
            raise RequestError(
                f"the model's chat template refuses these messages: {e}", reason="BAD_CHAT_MESSAGES"
            ) from e

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids outside the vocabulary have no text."""
        skipped = self._special if skip_special_tokens else frozenset()
        return self._backend.decode([t for t in token_ids if t not in skipped])

    def has_text(self, token_id: int, skip_special_tokens: bool) -> bool:
        """False when `decode` leaves this token out."""
        if skip_special_tokens and token_id in self._special:
            return False
        return self._backend.token_text(token_id) is not None

    def token_text(self, token_id: int) -> str:
        """The vocabulary's entry of one token; empty for an id outside the vocabulary."""
        return self._backend.token_text(token_id) or ""


class _FileBackend:
    """A vocabulary read by the `tokenizers` library."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner
        # The highest id, not the count: a vocabulary may have holes.
        self._size = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def vocab_size(self) -> int:
        return self._size

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._inner.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._inner.decode(list(token_ids), skip_special_tokens=False))

    def token_text(self, token_id: int) -> str | None:
        text = self._inner.id_to_token(token_id)
        return None if text is None else str(text)


class _FakeBackend:
    """Token i <-> ` t<i>`."""

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise ConfigError(f"fake tokenizer: vocab_size is {vocab_size}; it must be at least 1")
        self._size = vocab_size

    @property
    def vocab_size(self) -> int:
        return self._size

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [self._word(w) for w in text.split()]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(f" t{i}" for i in token_ids if i < self._size)

    def token_text(self, token_id: int) -> str | None:
        return f" t{token_id}" if token_id < self._size else None

    def _word(self, word: str) -> int:
        digits = word[1:]
        if word[0] == "t" and digits.isascii() and digits.isdigit() and int(digits) < self._size:
            return int(digits)
        return zlib.crc32(word.encode()) % self._size


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: marks assistant text for training; here just its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's interface

    def parse(self, parser: Any) -> Any:  # jinja2 leaves these untyped
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str) -> jinja2.Template:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    try:
        return env.from_string(source)
    except (jinja2.TemplateError, RecursionError) as e:
        raise ConfigError(f"the model's chat template is broken: {e}", reason="BAD_CHAT_TEMPLATE") from e


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _read_config(file: Path) -> dict[str, object]:
    try:
        raw = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, ValueError, RecursionError) as e:
        raise ConfigError(f"{file} cannot be read: {e}; fetch the model again", reason="BAD_TOKENIZER") from e
    if not isinstance(raw, dict):
        raise ConfigError(f"{file} is not a JSON object; fetch the model again", reason="BAD_TOKENIZER")
    return raw


def _chat_template(directory: Path, config: Mapping[str, object]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"{file} cannot be read: {e}", reason="BAD_CHAT_TEMPLATE") from e
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(config: Mapping[str, object]) -> dict[str, object]:
    values: dict[str, object] = {}
    for name in _SPECIAL_NAMES:
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            values[name] = token
    return values
