"""Ids to text and stop strings: the same result for every grouping.  No model, no HTTP."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gateway.text import BadTokenizer, Detokenizer, StopStrings, Vocabulary
from tests.scripted import byte_tokenizer_json

BYTES = byte_tokenizer_json()
VOCABULARY = Vocabulary(BYTES)
REFERENCE = Tokenizer.from_str(BYTES)


def sentence_piece_json(strip: bool = True) -> str:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    pieces += ["▁Hel", "lo", "▁", "wör", "ld"]
    added = [
        {
            "id": i,
            "content": pieces[i],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i in range(3)
    ]
    steps = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if strip:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": None, "pre_tokenizer": None, "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "fuse_unk": True,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "byte_fallback": True, "ignore_merges": False,
                  "vocab": {piece: id for id, piece in enumerate(pieces)}, "merges": []},
    })  # fmt: skip


def joined(vocabulary: Vocabulary, groups: list[list[int]]) -> str:
    detokenizer = Detokenizer(vocabulary)
    return "".join(map(detokenizer.push, groups)) + detokenizer.close()


def groups_of(items: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(items), *(cut % (len(items) + 1) for cut in cuts)})
    return [items[a:b] for a, b in itertools.pairwise(edges)]


@settings(max_examples=150)
@given(st.lists(st.integers(0, 258), max_size=30), st.lists(st.integers(0, 40), max_size=6))
def test_any_grouping_of_any_ids_decodes_as_the_tokenizer_decodes_them_at_once(ids, cuts):
    expected = REFERENCE.decode(ids, skip_special_tokens=True)
    assert joined(VOCABULARY, groups_of(ids, cuts)) == expected


@settings(max_examples=60)
@given(st.text(max_size=8), st.lists(st.integers(0, 40), max_size=6))
def test_sentence_piece_bytes_decode_as_the_tokenizer_decodes_them(text, cuts):
    spec = sentence_piece_json()
    ids = [259, 260, *(3 + b for b in text.encode()), 261, 262, 263, 2]
    expected = Tokenizer.from_str(spec).decode(ids, skip_special_tokens=True)
    assert joined(Vocabulary(spec), groups_of(ids, cuts)) == expected


def test_the_first_space_stays_when_the_tokenizer_does_not_strip_it():
    spec = sentence_piece_json(strip=False)
    assert joined(Vocabulary(spec), [[259], [260]]) == " Hello"


def test_half_a_code_point_waits_and_is_never_sent():
    detokenizer = Detokenizer(VOCABULARY)
    sent = [detokenizer.push([byte]) for byte in "é€😀".encode()]
    assert sent == ["", "é", "", "", "€", "", "", "", "😀"]


def test_an_invalid_byte_becomes_one_replacement_as_soon_as_it_is_certain():
    detokenizer = Detokenizer(VOCABULARY)
    assert detokenizer.push([0xE2, 0x82]) == ""
    assert detokenizer.push([ord("x")]) == "\ufffdx"
    assert detokenizer.push([0xF0]) == ""
    assert detokenizer.close() == "\ufffd"


def test_control_tokens_and_padding_rows_have_no_text_but_control_tokens_have_a_name():
    assert joined(VOCABULARY, [[104, 257, 105, 9999]]) == "hi"
    assert VOCABULARY.spelled(258) == b"<|im_end|>"
    assert VOCABULARY.spelled(104) == b"h"
    assert VOCABULARY.spelled(9999) == b""


def test_an_unreadable_tokenizer_is_refused_by_name():
    spec = json.loads(BYTES)
    spec["decoder"] = {"type": "WordPiece"}
    with pytest.raises(BadTokenizer, match="WordPiece"):
        Vocabulary(json.dumps(spec))


def stopped(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    filter = StopStrings(stops)
    out = ""
    for piece in pieces:
        text, hit = filter.push(piece)
        out += text
        if hit:
            return out, True
    return out + filter.flush(), False


@settings(max_examples=300)
@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    st.text("abc", max_size=20),
    st.lists(st.integers(0, 40), max_size=6),
)
def test_a_stop_string_cuts_the_same_text_for_every_grouping(stops, text, cuts):
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    one_by_one = stopped(stops, list(text))
    assert stopped(stops, pieces) == one_by_one
    out, hit = one_by_one
    assert hit == any(stop in text for stop in stops)
    assert text.startswith(out) and (hit or out == text)
    assert not any(stop in out for stop in stops)


def test_only_what_may_begin_a_stop_string_is_held_back():
    filter = StopStrings(["Observation:", "\n\n"])
    assert filter.push("See Ob") == ("See ", False)
    assert filter.push("x\n") == ("Obx", False)
    assert filter.push("y") == ("\ny", False)
    assert filter.push("Observation") == ("", False)
    assert filter.push(": z") == ("", True)


def test_the_stop_string_that_ends_first_wins_and_then_the_longest():
    assert stopped(["abcd", "bc"], ["xabcd"]) == ("xa", True)
    assert stopped(["bc", "abc"], ["xabc"]) == ("x", True)
