"""Small real tokenizers, made in memory, with the decoders that models of this field use."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from pdserve.core.tokenizer import Tokenizer

TEXTS = [
    "Hello world, this is a small corpus about a stop string and the end of it.",
    "def f(x):\n    return x + 12  # code",
    "Größe, naïve café, 你好世界, привет, 👩‍👩‍👧‍👦 🎉",
]
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ bos_token + m['role'] + '\n' + m['content'] | tojson + eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}{{ bos_token + 'assistant\n' }}{% endif %}"
)


def byte_level() -> tokenizers.Tokenizer:
    """GPT-2 style: every token is bytes; characters may be split over tokens."""
    tok = tokenizers.Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    tok.train_from_iterator(TEXTS, trainer)
    tok.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tok.add_tokens([AddedToken("<think>", special=False)])
    return tok


def byte_fallback() -> tokenizers.Tokenizer:
    """Llama style: words begin with a mark for the space, unknown characters are byte tokens, text is stripped."""
    words = ["▁", "▁Hello", "▁wor", "ld", "▁stop", "ping", "▁a", "e", "o", "H", "l", "."]
    vocab = {w: i for i, w in enumerate(["<unk>", "<s>", "</s>", *[f"<0x{b:02X}>" for b in range(256)], *words])}
    tok = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tok.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tok.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tok


def write(directory: Path, inner: tokenizers.Tokenizer, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Writes a model directory as transformers would."""
    inner.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"__type": "AddedToken", "content": "<s>", "special": True},
        "eos_token": "</s>",
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def load(directory: Path, inner: tokenizers.Tokenizer) -> Tokenizer:
    """The same through our reader."""
    return Tokenizer.from_dir(write(directory, inner))
