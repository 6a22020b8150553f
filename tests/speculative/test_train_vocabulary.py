"""Which tokens a head can draw: the forced ones and the most frequent.  Trains nothing."""

from __future__ import annotations

import json

import numpy as np
import pytest

from speculative.head import kept_ids
from speculative.train import shards, vocabulary
from speculative.train.shards import Entry, Run
from speculative.train.vocabulary import Counted
from tests.prompting import small_bpe

VOCAB = 50


@pytest.fixture
def folder(tmp_path):
    shards.begin(tmp_path, Run("m", "00", VOCAB, 0, 4, 64))
    said = [
        (Entry(0, 2, 8, "chat", 0.0, False, "", 0), [9, 9, 1, 1, 1, 2, 2, 3]),
        (Entry(1, 1, 4, "tool", 0.0, False, "", 0), [9, 4, 2, 1]),
        (Entry(2, 1, 5, "tool", 0.0, True, "", 0), [9, 40, 1, 41, 41]),
    ]
    shards.write(tmp_path, 0, VOCAB, said)
    return tmp_path


def test_what_the_target_said_in_training_is_counted_and_nothing_else(folder):
    counted = vocabulary.count(folder)
    assert counted.training.tolist()[:5] == [0, 4, 3, 1, 1]
    assert counted.training.sum() == 9  # no prompt, nothing held out
    assert {d: c.sum() for d, c in counted.held_out.items()} == {"tool": 4}


def test_the_most_frequent_are_kept_beside_the_forced_ones(folder):
    kept = vocabulary.choose(vocabulary.count(folder), 4, [30, 3])
    assert kept.ids == [1, 2, 3, 30]
    assert kept.forced == 2
    assert kept.coverage == pytest.approx(8 / 9)
    assert kept.held_out == {"tool": pytest.approx(1 / 4)}


def test_equal_counts_are_broken_the_same_way_every_time():
    counted = Counted(np.zeros(VOCAB, np.int64), {})
    assert vocabulary.choose(counted, 3, [49]).ids == [0, 1, 49]


def test_tables_map_there_and_back(folder):
    kept = vocabulary.choose(vocabulary.count(folder), 6, [49, 0])
    d2t, t2d = vocabulary.tables(kept)
    assert (d2t.diff() >= 0).all()
    assert kept_ids(d2t).tolist() == kept.ids
    assert t2d.nonzero().view(-1).tolist() == kept.ids
    assert len(t2d) == VOCAB


def test_a_vocabulary_without_room_for_the_forced_ones_is_refused(folder):
    with pytest.raises(ValueError, match=r"3 tokens must be kept .* --vocab is 2"):
        vocabulary.choose(vocabulary.count(folder), 2, [1, 2, 3])


def test_a_vocabulary_larger_than_the_model_s_is_all_of_it(folder):
    assert vocabulary.choose(vocabulary.count(folder), 99, []).ids == list(range(VOCAB))


def test_structure_is_forced_whatever_was_said():
    tokenizer = small_bpe()
    size = 420
    forced = vocabulary.forced_ids(tokenizer, size, [2], ["tool_call"])
    pieces = json.loads(tokenizer)["model"]["vocab"]
    for text in ("{", "}", "[", "]", '"', ":", ",", "0", "9", "Ġ", "Ċ"):
        assert pieces[text] in forced, text
    assert {0, 1, 2} <= forced  # the added ones
    assert pieces["z"] not in forced
    assert all(id < size for id in forced)


def test_it_is_read_as_it_was_saved(folder, tmp_path):
    kept = vocabulary.choose(vocabulary.count(folder), 4, [30])
    vocabulary.save(kept, tmp_path / "v.json")
    assert vocabulary.read(tmp_path / "v.json") == kept
    with pytest.raises(ValueError, match="run the stage `vocabulary` first"):
        vocabulary.read(tmp_path / "w.json")
