"""Our tokenizer gives what transformers gives, and says what is wrong with a broken directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.core.errors import ConfigError, RequestError
from pdserve.core.tokenizer import Tokenizer
from tests.core import tokenizers_made as made

TEXTS = [
    "",
    "Hello world",
    "  two  spaces\n\n    12345 + 678\t",
    "emoji 👩‍👩‍👧‍👦 and 你好, привет, naïve",
    "a </s> special token and <think> inside",
    "x" * 500,
]
CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "Be brief. 'quotes' \"and\" <b>html</b>"},
        {"role": "user", "content": "Hi 🎉\n  there "},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye"},
    ],
]


def test_equals_transformers_for_a_byte_level_model(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    made.write(tmp_path, made.byte_level())
    _assert_equal(Tokenizer.from_dir(tmp_path), AutoTokenizer.from_pretrained(tmp_path))


def test_equals_transformers_for_a_byte_fallback_model(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    made.write(tmp_path, made.byte_fallback())
    _assert_equal(Tokenizer.from_dir(tmp_path), AutoTokenizer.from_pretrained(tmp_path))


def _assert_equal(ours: Tokenizer, theirs: object) -> None:
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids, text  # type: ignore[operator]
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)  # type: ignore[attr-defined]
    for chat in CHATS:
        expected = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)  # type: ignore[attr-defined]
        assert ours.encode_chat(chat) == expected
    assert ours.vocab_size == len(theirs)  # type: ignore[arg-type]


def test_chat_template_file_wins_over_the_configuration(tmp_path: Path) -> None:
    made.write(tmp_path, made.byte_level())
    (tmp_path / "chat_template.jinja").write_text("{% generation %}{{ messages[0].content }}{% endgeneration %}!")
    assert Tokenizer.from_dir(tmp_path).render_chat([{"role": "user", "content": "x"}]) == "x!"


def test_template_that_refuses_is_the_requests_fault(tmp_path: Path) -> None:
    tok = made.load(tmp_path, made.byte_level())
    with pytest.raises(RequestError, match="no tools here"):
        tok.encode_chat([{"role": "tool", "content": "x"}])
    with pytest.raises(RequestError, match="no messages"):
        tok.encode_chat([])


def test_model_without_template_refuses_chats(tmp_path: Path) -> None:
    made.write(tmp_path, made.byte_level(), chat_template=None)
    with pytest.raises(RequestError, match="no chat template") as e:
        Tokenizer.from_dir(tmp_path).encode_chat(CHATS[0])
    assert e.value.reason == "NO_CHAT_TEMPLATE"


def test_a_template_that_never_ends_refuses_the_messages(tmp_path: Path) -> None:
    made.write(tmp_path, made.byte_level(), chat_template="{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")
    with pytest.raises(RequestError, match="refuses these messages"):
        Tokenizer.from_dir(tmp_path).encode_chat(CHATS[0])


def test_template_cannot_leave_its_sandbox(tmp_path: Path) -> None:
    made.write(tmp_path, made.byte_level(), chat_template="{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(RequestError):
        Tokenizer.from_dir(tmp_path).encode_chat(CHATS[0])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", "{", "tokenizer.json"),
        ("tokenizer.json", '{"model": 1}', "tokenizer.json"),
        ("tokenizer_config.json", "{", "tokenizer_config.json"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json"),
        ("chat_template.jinja", "{% if %}", "chat template"),
        ("tokenizer_config.json", "[" * 100_000, "tokenizer_config.json"),
        ("chat_template.jinja", "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", "chat template"),
    ],
)
def test_broken_directory_is_a_config_error(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    made.write(tmp_path, made.byte_level())
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        Tokenizer.from_dir(tmp_path)


def test_fake_is_its_own_inverse_and_takes_any_text() -> None:
    tok = Tokenizer.fake(100)
    ids = [0, 7, 99]
    assert tok.decode(ids) == " t0 t7 t99"
    assert tok.encode(tok.decode(ids)) == ids
    words = tok.encode("Hello t100 tx t")
    assert len(words) == 4 and all(0 <= i < 100 for i in words)
    assert tok.encode_chat([{"role": "user", "content": "Hi"}])
    assert tok.decode([100]) == tok.token_text(100) == ""


def test_needs_neither_torch_nor_transformers() -> None:
    code = "import sys, pdserve.core.text_stream; print(*{'torch', 'transformers'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == ""


def test_equals_transformers_for_the_built_in_model() -> None:
    from transformers import AutoTokenizer

    from pdserve.engine.model_store import resolve_model

    directory = resolve_model("SmolLM2-135M-Instruct")
    ours = Tokenizer.from_dir(directory)
    _assert_equal(ours, AutoTokenizer.from_pretrained(directory))
