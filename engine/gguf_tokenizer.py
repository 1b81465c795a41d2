"""The tokenizer of a GGUF file as `tokenizer.json` has it: byte-level BPE whose pre-tokenizer is known by name.

Source: the GGUF specification (keys, types of tokens); the patterns are those with which the models' vocabularies were
made, as published with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CONTROL, _USER_DEFINED = 3, 4
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_DIGITS = {"type": "Digits", "individual_digits": True}
_NAMES = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


class Refused(Exception):
    """The file holds what is not known here; the text says what."""


def _split(pattern: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, {**_BYTE_LEVEL, "use_regex": False}]


_PRE_TOKENIZERS: Mapping[str, list[dict[str, Any]]] = {
    "smollm": [_DIGITS, _BYTE_LEVEL],
    "llama-bpe": _split(_LLAMA3),
    "qwen2": _split(_QWEN2),
}
_ADDS_BOS = {"llama-bpe"}
"""Where llama.cpp adds it unless the file says otherwise; these also take a word that is a token as it is."""


def special_ids(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Ids for `generation_config.json`; an end of turn that is not the end of sequence ends an answer, too."""
    ids = {name: _id(meta, kind) for name, kind in _NAMES.items() if _id(meta, kind) is not None}
    turn = _id(meta, "eot")
    if turn is not None and turn != ids.get("eos_token_id"):
        ids["eos_token_id"] = [turn] if "eos_token_id" not in ids else [ids["eos_token_id"], turn]
    return ids


def _id(meta: Mapping[str, Any], kind: str) -> Any:
    return meta.get(f"tokenizer.ggml.{kind}_token_id")


def tokenizer(meta: Mapping[str, Any]) -> dict[str, Any]:
    """`tokenizer.json`.

    Raises:
        Refused: The tokenizer is of a kind, or splits text in a way, that is not known here.
    """
    pre = _pre_tokenizer_name(meta)
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added(i, token, kind)
            for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind in (_CONTROL, _USER_DEFINED)
        ],
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[pre]},
        "post_processor": _adds_bos(meta, pre, tokens),
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre in _ADDS_BOS,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in meta["tokenizer.ggml.merges"]],
        },
    }


def tokenizer_config(meta: Mapping[str, Any], max_model_len: int) -> dict[str, Any]:
    """`tokenizer_config.json`."""
    tokens = meta["tokenizer.ggml.tokens"]
    kinds = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: tokens[_id(meta, kind)] for name, kind in kinds.items() if _id(meta, kind) is not None},
        "model_max_length": max_model_len,
        "clean_up_tokenization_spaces": False,
    }


def _pre_tokenizer_name(meta: Mapping[str, Any]) -> str:
    if (model := meta.get("tokenizer.ggml.model")) != "gpt2":
        raise Refused(f"its tokenizer.ggml.model is {model!r}; byte-level BPE ('gpt2') is converted")
    pre = meta.get("tokenizer.ggml.pre")
    if pre not in _PRE_TOKENIZERS:
        raise Refused(f"its tokenizer.ggml.pre is {pre!r}; {', '.join(_PRE_TOKENIZERS)} are converted")
    if meta.get("tokenizer.ggml.add_eos_token"):
        raise Refused("its tokenizer.ggml.add_eos_token is true, which would end every prompt")
    return str(pre)


def _added(token_id: int, token: str, kind: int) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": token, **flags, "special": kind == _CONTROL}


def _adds_bos(meta: Mapping[str, Any], pre: str, tokens: list[str]) -> dict[str, Any] | None:
    if not meta.get("tokenizer.ggml.add_bos_token", pre in _ADDS_BOS):
        return None
    bos_id = meta["tokenizer.ggml.bos_token_id"]
    bos = {"SpecialToken": {"id": tokens[bos_id], "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": at}} for at, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, second],
        "special_tokens": {tokens[bos_id]: {"id": tokens[bos_id], "ids": [bos_id], "tokens": [tokens[bos_id]]}},
    }
