"""The check of vocabularies says when a layout and a vocabulary do not fit.  Reads no folder."""

from __future__ import annotations

import pytest

from gateway.text import Vocabulary
from gateway.tools import load
from tests.bench.check_vocabularies import Words, grafted, row
from tests.calls import with_controls
from tests.scripted import byte_tokenizer_json


@pytest.mark.parametrize("name", ["hermes", "kimi", "pythonic", "harmony"])
@pytest.mark.parametrize("made", [str, grafted])
def test_bytes_and_bytes_with_markers_are_fine_for_a_layout(name, made) -> None:
    words = Words(made(byte_tokenizer_json()))
    cells, fine = row(words, name, 3)
    assert fine, cells
    count = len(load(name).markers)
    assert cells[0] == (f"{count}/0/0" if made is grafted else f"0/0/{count}")
    assert (cells[4] == "-") == (made is str)


def test_markers_that_are_taken_for_text_do_not_fit_a_grammar_that_does_not(monkeypatch) -> None:
    tokenizer_json, _ = with_controls(load("hermes").markers, special=False)
    assert row(Words(tokenizer_json), "hermes", 3)[1]
    special = lambda self: {self.added[id]: id for id in self.special}  # noqa: E731
    monkeypatch.setattr(Vocabulary, "specials", special)
    cells, fine = row(Words(tokenizer_json), "hermes", 3)
    assert not fine
    assert cells[0] == "0/2/0" and cells[3].startswith("FAILED: GrammarRefused"), cells
