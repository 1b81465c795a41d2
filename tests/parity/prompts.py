"""Prompts of the parity tests: every entrance (text, chat, ids), page borders, long, code, languages, emoji."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pdserve.core.tokenizer import Tokenizer

PAGE_SIZE = 16
_SHORT, _LONG = 8, 24
_STORY = (
    "Once upon a time a small engine computed tokens in the dark. It counted pages, it counted slots, and it never "
    "lost one. One day a letter came from a far worker: send me what you know, and I will go on from there. "
)
_TEXTS = (
    "Hello",
    "The capital of France is",
    "Water boils at",
    "Two plus two equals",
    "The opposite of hot is",
    "My name is Anna and I live in",
    "List three colours:\n1.",
    "In 1969, humans first",
    "The quick brown fox jumps over the lazy",
    "1, 2, 3, 4, 5, 6,",
    "Q: Who wrote Hamlet?\nA:",
    "To be, or not to be, that is the",
    "   leading spaces and\ttabs\n\n\nand blank lines",
    "ALL CAPITALS ARE LOUD, SO PLEASE",
    "a",
    "e = m c ^ 2 means that",
)
_CODE = (
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "for i in range(10):\n    print(",
    "SELECT name, age FROM users WHERE",
    '{"name": "pdserve", "version": 12, "tags": [',
    "#include <stdio.h>\n\nint main(void) {\n    printf(",
    "$ git commit -m '",
    "x = 12\n    12 + 345",
)
_LANGUAGES = (
    "Die Hauptstadt von Österreich ist",
    "La capitale de l'Italie est",
    "El perro corre por el",
    "東京は日本の",
    "Столица России —",
    "한국어로 인사하면",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
)
_EMOJI = ("🎉🎉🎉", "I ❤️ you 👩‍👩‍👧‍👦 and", "😀 means happy, 😢 means")
_CHATS = (
    [("user", "What is the capital of France?")],
    [("user", "Say hello in Spanish.")],
    [("system", "You answer in one word."), ("user", "Is the sky blue?")],
    [("user", "Hi"), ("assistant", "Hello! How can I help?"), ("user", "Tell me a joke 🤡")],
    [("user", "Write a Python function that adds two numbers.")],
    [("user", "Wie heißt du?")],
)
_ID_LENGTHS = (1, 2, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 2 * PAGE_SIZE - 1, 2 * PAGE_SIZE, 2 * PAGE_SIZE + 1, 100)


@dataclass(frozen=True)
class ParityPrompt:
    """One prompt.

    Attributes:
        name: For messages.
        prompt: Text, chat messages or token ids, as a client sends it.
        token_ids: What it becomes.
        max_tokens: Greedy tokens to compare.
    """

    name: str
    prompt: str | list[dict[str, str]] | list[int]
    token_ids: tuple[int, ...]
    max_tokens: int


def parity_prompts(model_dir: Path) -> list[ParityPrompt]:
    """All prompts for a model: 50, of which one has more than 1,000 tokens."""
    tokenizer = Tokenizer.from_dir(model_dir)
    story = tokenizer.encode(_STORY * 25)
    prompts = []
    for i, text in enumerate((*_TEXTS, *_CODE, *_LANGUAGES, *_EMOJI)):
        max_tokens = _LONG if i % 10 == 0 else _SHORT
        prompts.append(ParityPrompt(repr(text[:30]), text, tuple(tokenizer.encode(text)), max_tokens))
    for turns in _CHATS:
        messages = [{"role": role, "content": content} for role, content in turns]
        ids = tuple(tokenizer.encode_chat(messages))
        prompts.append(ParityPrompt(f"chat {turns[-1][1][:30]!r}", messages, ids, _SHORT))
    prompts += [
        ParityPrompt(f"{length} token ids", story[:length], tuple(story[:length]), _SHORT)
        for length in (*_ID_LENGTHS, 1030)
    ]
    assert len(story) >= 1030
    return prompts
