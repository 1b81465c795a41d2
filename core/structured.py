"""Structured outputs: what form an output must have, and whether such a form can be had at all.

llguidance reads schemas, expressions and grammars; it needs no torch, so that the router refuses a bad one before a
worker hears of it. Every limit that keeps a hostile one from holding a process up is here.
"""

from __future__ import annotations

import json as json_text
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from decimal import Decimal
from typing import TYPE_CHECKING

from pdserve.core.errors import RequestError, UnimplementedError
from pdserve.core.sampling_types import is_text

if TYPE_CHECKING:
    from llguidance import LLParserLimits

    from pdserve.core.tokenizer import Tokenizer

MAX_STRUCTURE_CHARS = 65_536
"""Of a schema, a grammar, or all choices together."""
MAX_REGEX_CHARS = 8_192
MAX_CHOICES = 1_024
MAX_MULTIPLE = 10_000
"""Least common multiple of a schema's `multipleOf`s: the library builds so many states, whatever its own limits say."""
MAX_GRAMMAR_SYMBOLS = 50_000
MAX_REASON_CHARS = 600

_ASCII_CLASSES = "d"
"""A digit is one of 0 to 9; \\w and \\s are Unicode's."""
_POSITION = re.compile(r"^at \d+\(\d+\): ")
_NO_FORCING = '\n%llguidance {"no_forcing": true}'
"""Forced text may be written in any tokens: the own choice of them fails on text that looks like special ones.
"""
_JSON_OPTIONS = {"whitespace_pattern": r"\n? {0,16}"}
"""One line feed and an indentation: a model that is free to write white space may write nothing else."""


@dataclass(frozen=True, kw_only=True, slots=True, weakref_slot=True)
class StructuredOutputs:
    """The form that an output must have; exactly one field is set.

    Attributes:
        json: A JSON schema, as text or as a mapping (then kept as text); the output is a valid instance of it.
        regex: A regular expression, in the syntax of Rust's regex crate (no look-around), that the whole output
            matches; \\d is 0 to 9.
        choice: The output is one of these strings; at most `MAX_CHOICES`.
        grammar: A context-free grammar that gives the output, in Lark's syntax or GBNF (`root ::= ...`).
        json_object: True: the output is some JSON object.

    Raises:
        RequestError: None or several are set, or one is too large; the message names the field.
    """

    json: str | Mapping[str, object] | None = None
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.json, Mapping):
            object.__setattr__(self, "json", _dump(self.json))
        self._check_types()
        given = [f.name for f in fields(self) if getattr(self, f.name) not in (None, (), False)]
        if len(given) != 1:
            names = ", ".join(f.name for f in fields(self))
            raise _error("", f"set exactly one of {names}; set are: {', '.join(given) or 'none'}")
        if not all(self.choice):
            raise _error(".choice", "a choice is empty; leave it out")
        limit = MAX_REGEX_CHARS if self.regex is not None else MAX_STRUCTURE_CHARS
        if (size := len(self._text())) > limit:
            raise _error(f".{given[0]}", f"{size} characters; at most {limit}")

    def _check_types(self) -> None:
        for name in ("json", "regex", "grammar"):
            if (value := getattr(self, name)) is not None and not is_text(value):
                raise _error(f".{name}", f"it is {value!r:.80}; it must be text that UTF-8 can encode")
        if not isinstance(self.json_object, bool):
            raise _error(".json_object", f"it is {self.json_object!r:.80}; it must be True or False")
        given: object = self.choice
        choice = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (None,)
        check_num_choices(len(choice))
        if not all(map(is_text, choice)):
            raise _error(".choice", f"it is {given!r:.80}; it must be a sequence of strings that UTF-8 can encode")
        object.__setattr__(self, "choice", choice)

    @property
    def field(self) -> str:
        """Name of the field that is set."""
        return next(f.name for f in fields(self) if getattr(self, f.name) not in (None, (), False))

    def _text(self) -> str:
        return str(self.json or self.regex or self.grammar or "".join(self.choice))


def check_num_choices(size: int) -> None:
    """Checks how many strings `choice` has; before they are read.

    Raises:
        RequestError: They are too many.
    """
    if size > MAX_CHOICES:
        raise _error(".choice", f"{size} strings; at most {MAX_CHOICES}")


def check_structured(structured: StructuredOutputs | None, tokenizer: Tokenizer) -> None:
    """Refuses what cannot be honoured; None passes. Up to a second of CPU, without Python's lock: not for event loops.

    Raises:
        RequestError: The schema, expression or grammar is wrong or too complex, with the library's reason.
        UnimplementedError: The tokens of this model are not text.
    """
    if structured is None:
        return
    if not tokenizer.can_constrain:
        raise unsupported_here()
    from llguidance import LLMatcher

    grammar = grammar_of(structured)
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, None, limits=parser_limits())
    if failed:
        raise refusal(structured, messages[0])


def grammar_of(structured: StructuredOutputs) -> str:
    """The constraint in llguidance's dialect of Lark; not validated.

    Raises:
        RequestError: It is malformed, or one of the few things that its limits do not bound.
    """
    from llguidance import grammar_from, regex_to_lark

    try:
        if structured.regex is not None:
            lark = f"start: /{regex_to_lark(structured.regex, _ASCII_CLASSES)}/"
        elif structured.grammar is not None:
            if "%json" in structured.grammar:
                raise refusal(structured, "%json inside a grammar is not supported; send the schema as 'json'")
            lark = grammar_from("gbnf" if "::=" in structured.grammar else "lark", structured.grammar)
        elif structured.choice:
            lark = "start: " + " | ".join(json_text.dumps(c) for c in structured.choice)
        else:
            schema = {"type": "object"} if structured.json is None else _checked_schema(structured)
            lark = "start: %json " + json_text.dumps({"x-guidance": _JSON_OPTIONS} | schema, ensure_ascii=False)
    except (ValueError, RecursionError) as e:
        raise refusal(structured, str(e)) from e
    return lark + _NO_FORCING


def parser_limits() -> LLParserLimits:
    """The library's limits: they bound the time and memory of compiling and of each step."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=20_000,
        max_grammar_size=MAX_GRAMMAR_SYMBOLS,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


def refusal(structured: StructuredOutputs, why: str) -> RequestError:
    """The error for a constraint that cannot be honoured."""
    if structured.grammar is None:  # positions and lines are those of a grammar made of it
        why = _POSITION.sub("", why.partition("\n   1 | ")[0])
    return _error(f".{structured.field}", why.strip()[:MAX_REASON_CHARS])


def unsupported_here() -> UnimplementedError:
    """The error for an engine whose tokens are not text."""
    return UnimplementedError(
        "sampling parameter 'structured_outputs' needs a real model: the fake's tokens are not text; leave it out",
        reason="UNSUPPORTED_PARAMETER",
    )


def _error(field: str, why: str) -> RequestError:
    return RequestError(f"sampling parameter 'structured_outputs{field}': {why}", reason="BAD_STRUCTURED_OUTPUTS")


def _dump(schema: Mapping[str, object]) -> str:
    try:
        return json_text.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as e:
        raise _error(".json", f"it cannot be written as JSON: {e}") from e


def _checked_schema(structured: StructuredOutputs) -> dict[str, object]:
    """The schema; refuses text that is not one, and a `multipleOf` whose automaton would be too large to build."""
    schema = json_text.loads(str(structured.json))
    if not isinstance(schema, dict):
        raise refusal(structured, "the schema is not a JSON object")
    _check_divisors(structured, json_text.loads(str(structured.json), parse_float=Decimal))
    return schema


def _check_divisors(structured: StructuredOutputs, schema: object) -> None:
    numbers: list[Decimal] = []
    todo = [schema]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            divisor = part.get("multipleOf")
            if isinstance(divisor, int | Decimal) and not isinstance(divisor, bool):
                numbers.append(Decimal(divisor))
            todo.extend(part.values())
        elif isinstance(part, list):
            todo.extend(part)
    if not numbers:
        return
    exponents = [n.as_tuple().exponent for n in numbers]
    lowest = min((e for e in exponents if isinstance(e, int)), default=0)
    if not all(n.is_finite() and n > 0 and abs(n.adjusted()) <= 15 for n in numbers) or lowest < -15:
        raise refusal(structured, "a multipleOf is not in [1e-15, 1e15]")
    multiple = math.lcm(*(int(n.scaleb(-lowest)) for n in numbers))
    while multiple % 10 == 0:
        multiple //= 10
    if multiple > MAX_MULTIPLE:
        raise refusal(
            structured,
            f"the least common multiple of all multipleOf is {multiple} (less its zeros); at most {MAX_MULTIPLE}",
        )
