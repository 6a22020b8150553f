"""Rebuild a `tokenizers` JSON out of a GGUF's vocabulary.  Tokenizes nothing itself.

GGUF keeps the vocabulary, the merges and the *name* of the pre-tokenizer; the rules behind the
names are here.  Only byte-level BPE (`gpt2`) is known: others are served from a safetensors folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from engine.gguf_file import GgufFile
from engine.model_config import BadCheckpoint

UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6  # of tokenizer.ggml.token_type

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(use_regex: bool) -> dict[str, object]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
            "use_regex": use_regex}


def _split(numbers: str) -> dict[str, object]:
    pattern = {"Regex": _WORDS % numbers}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(False)]}


_GPT2 = _byte_level(True)
_DIGITS = {"type": "Digits", "individual_digits": True}

# tokenizer.ggml.pre -> the `tokenizers` pre-tokenizer of the models that carry that name
PRE_TOKENIZERS: Mapping[str, dict[str, object]] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": {"type": "Sequence", "pretokenizers": [_DIGITS, _GPT2]},
    "llama-bpe": _split(r"\p{N}{1,3}"),
    "qwen2": _split(r"\p{N}"),
}
WHOLE_WORDS_FIRST = ("llama-bpe",)  # a word that is a token is not merged up from bytes
COMPOSED = ("qwen2",)  # text is put in Unicode form NFC first


def tokenizer_json(gguf: GgufFile) -> str:
    """The tokenizer as `tokenizers.Tokenizer.from_str` reads it.

    Control tokens become special added tokens, user-defined ones plain added tokens; ids are list
    positions.  Raises BadCheckpoint for another tokenizer model, an unknown pre-tokenizer, or lists
    that disagree.
    """
    model = gguf.values.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise BadCheckpoint(
            f"{gguf.path.name} has a {model!r:.40} tokenizer; only gpt2 (byte-level BPE) can be "
            "read from a GGUF. Use the model's safetensors folder.")
    pre = gguf.values.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise BadCheckpoint(
            f"{gguf.path.name} names the pre-tokenizer {pre!r:.40}; known are "
            f"{', '.join(PRE_TOKENIZERS)}. Use the model's safetensors folder.")
    vocab = _vocab(gguf)
    kinds = _kinds(gguf, len(vocab))
    has_bytes = BYTE in kinds
    letters = _byte_level(True)
    fallback: dict[str, object] = {"type": "ByteFallback"}
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [_added(id, text, kinds[id]) for text, id in vocab.items()
                         if kinds[id] in (UNKNOWN, CONTROL, USER_DEFINED)],
        "normalizer": {"type": "NFC"} if pre in COMPOSED else None,
        "pre_tokenizer": PRE_TOKENIZERS[pre],
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [fallback, letters]} if has_bytes else letters,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": has_bytes,
            "ignore_merges": pre in WHOLE_WORDS_FIRST, "vocab": vocab,
            "merges": _merges(gguf, vocab),
        },
    }, ensure_ascii=False)


def _added(id: int, text: str, kind: int) -> dict[str, object]:
    return {"id": id, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": kind != USER_DEFINED}


def _texts(gguf: GgufFile, key: str) -> list[str]:
    texts = gguf.values.get(key)
    if not isinstance(texts, list):
        raise BadCheckpoint(f"{gguf.path.name} has no list of strings in {key}; "
                            "it carries no tokenizer. Use the model's safetensors folder.")
    return texts


def _vocab(gguf: GgufFile) -> dict[str, int]:
    texts = _texts(gguf, "tokenizer.ggml.tokens")
    vocab = {text: id for id, text in enumerate(texts)}
    if len(vocab) != len(texts) or not texts or "" in vocab:
        raise BadCheckpoint(f"{gguf.path.name} lists {len(texts):,} tokens, {len(vocab):,} of them "
                            "different; all must differ and none be empty.")
    return vocab


def _kinds(gguf: GgufFile, count: int) -> list[int]:
    kinds = gguf.values.get("tokenizer.ggml.token_type")
    if kinds is None:
        return [1] * count
    if not isinstance(kinds, np.ndarray) or len(kinds) != count:
        raise BadCheckpoint(f"{gguf.path.name}'s tokenizer.ggml.token_type does not match its "
                            f"{count:,} tokens.")
    return [int(kind) for kind in kinds.tolist()]


def _merges(gguf: GgufFile, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Each merge as its two parts; a merge whose parts or whole are no tokens is refused here."""
    pairs: list[tuple[str, str]] = []
    for text in _texts(gguf, "tokenizer.ggml.merges"):
        left, _, right = text.partition(" ")  # byte-level letters hold no blank
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise BadCheckpoint(f"{gguf.path.name} has the merge {text!r:.80}, whose parts or "
                                "whole are not in its vocabulary.")
        pairs.append((left, right))
    return pairs
