"""Notes of complete starts: found by the same start only, and no error wherever they are lost."""

from __future__ import annotations

import json
import os

import pytest
import torch

if not torch.cuda.is_available():  # other tests of the same run interpret kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from engine.cuda import done as module
from engine.cuda.done import Done, sources

CARD = torch.device("cuda", 0)


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "stamp", lambda device: "a card, its libraries")
    monkeypatch.setattr(module, "store_path", lambda: tmp_path / "cache/picks.json")
    return tmp_path / "cache/compiled.json"


def test_a_start_is_known_once_it_was_noted_and_as_long_as_nothing_changes(store, monkeypatch):
    facts = ("Llama", 30, torch.bfloat16)
    assert not Done.of(CARD, *facts).noted()
    Done.of(CARD, *facts).note()
    Done.of(CARD, *facts).note()
    assert Done.of(CARD, *facts).noted() and len(json.loads(store.read_text())) == 1
    assert not Done.of(CARD, "Llama", 31, torch.bfloat16).noted()
    Done.of(CARD, "Llama", 31, torch.bfloat16).note()
    assert Done.of(CARD, *facts).noted()
    for change in ("stamp", "sources"):
        with monkeypatch.context() as patch:
            patch.setattr(module, change, lambda *given: "another")
            assert not Done.of(CARD, *facts).noted()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(store.parent))
    assert not Done.of(CARD, *facts).noted()


def test_few_are_kept_the_newest(store, monkeypatch):
    monkeypatch.setattr(module, "KEPT", 2)
    for number in range(3):
        Done.of(CARD, number).note()
    assert [Done.of(CARD, number).noted() for number in range(3)] == [False, True, True]


@pytest.mark.parametrize("text", ["", "[1, null]", "{}", "\u00e9", "7"])
def test_a_damaged_store_knows_nothing_and_is_written_anew(store, text):
    store.parent.mkdir()
    store.write_text(text)
    assert not Done.of(CARD, 1).noted()
    Done.of(CARD, 1).note()
    assert Done.of(CARD, 1).noted()


def test_where_nothing_can_be_kept_nothing_is_known(store, monkeypatch):
    store.parent.write_text("a file, where a folder should be")
    Done.of(CARD, 1).note()
    assert not Done.of(CARD, 1).noted()
    for lost in (lambda: None, lambda: 1 / 0):
        monkeypatch.setattr(module, "store_path", lost)
        Done.of(CARD, 1).note()
        assert not Done.of(CARD, 1).noted()
    Done.of(torch.device("cpu"), 1).note()
    assert not Done.of(torch.device("cpu"), 1).noted()


def test_the_sources_are_those_of_this_program():
    assert sources() == sources() and len(sources()) == 64
