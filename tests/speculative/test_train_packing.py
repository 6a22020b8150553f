"""Sequences in rows: each once, chains where they may begin, an order that a seed fixes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from speculative.train.packing import Corpus
from speculative.train.shards import Entry

LENGTH = 32


def made(shapes: list[tuple[int, int]]):
    """Sequences of (prompt, length); ids tell which and where."""
    return [
        (Entry(i, prompt, length, "chat", 0.0, False, "", i),
         np.arange(length, dtype=np.uint16) + 100 * (i + 1))
        for i, (prompt, length) in enumerate(shapes)
    ]


@pytest.fixture
def corpus():
    draw = np.random.default_rng(0)
    shapes = [(int(draw.integers(1, 5)), int(draw.integers(8, 20))) for _ in range(40)]
    return Corpus(made(shapes), LENGTH, seed=1)


def test_every_sequence_is_in_one_row_of_an_epoch_and_rows_are_full(corpus):
    for epoch in (0, 1):
        rows = corpus.rows(epoch)
        assert sorted(i for row in rows for i in row) == list(range(40))
        lengths = [sum(corpus.sequences[i][0].length for i in row) for row in rows]
        assert max(lengths) <= LENGTH
        assert sum(lengths) / (len(rows) * LENGTH) > 0.85


def test_chains_begin_from_the_prompts_last_token_on_and_know_what_is_left(corpus):
    rows = corpus.rows(0)[:3]
    batch = corpus.batch(rows)
    for number, row in enumerate(rows):
        at, expected = 0, []
        for i in row:
            entry = corpus.sequences[i][0]
            expected += [
                (at + place, entry.length - place - 2)
                for place in range(entry.prompt - 1, entry.length - 2)
            ]
            at += entry.length
        there = batch.left[number] > 0
        starts = batch.starts[number][there].tolist()
        left = batch.left[number][there].tolist()
        assert list(zip(starts, left, strict=True)) == expected


def test_rows_say_which_token_is_whose(corpus):
    row = corpus.rows(0)[0]
    batch = corpus.batch([row])
    for document, i in enumerate(row):
        own = batch.documents[0] == document
        assert batch.tokens[0][own].tolist() == corpus.sequences[i][1].tolist()
        assert batch.positions[0][own].tolist() == list(range(corpus.sequences[i][0].length))
    used = sum(corpus.sequences[i][0].length for i in row)
    assert (batch.documents[0][used:] == -1).all()
    assert batch.real == used


def test_a_step_s_batch_follows_from_seed_and_number_alone(corpus):
    again = Corpus(corpus.sequences, LENGTH, seed=1)
    other = Corpus(corpus.sequences, LENGTH, seed=2)
    many = len(corpus.rows(0)) // 4 + 2  # into the second epoch
    first = [corpus.step(number, 4)[0].tokens for number in range(many)]
    assert all((again.step(n, 4)[0].tokens == first[n]).all() for n in reversed(range(many)))
    assert any(
        first[n].shape != (t := other.step(n, 4)[0].tokens).shape or (first[n] != t).any()
        for n in range(many)
    )
    assert (first[0] != first[many - 2]).any()


def test_the_chains_that_are_alive_at_a_step_are_known_without_counting(corpus):
    batch = corpus.batch(corpus.rows(0)[:3], multiple=8)
    assert batch.starts.shape[1] % 8 == 0
    left = batch.left.flatten()
    for step in range(int(left.max())):
        living = batch.living(step)
        assert sorted(living.tolist()) == (left > step).nonzero().flatten().tolist()
    assert len(batch.alive) == int(left.max())
    behind = batch.behind(3)
    assert ((behind == batch.starts + 3) | (behind == LENGTH - 1)).all()


def test_a_step_s_rows_are_the_same_however_many_are_computed_together(corpus):
    whole, pieces = corpus.step(1, 5)[0], corpus.step(1, 5, micro=2)
    assert [len(piece.tokens) for piece in pieces] == [2, 2, 1]
    assert torch.equal(torch.cat([piece.tokens for piece in pieces]), whole.tokens)
    assert sum(len(piece.chains) for piece in pieces) == len(whole.chains)


def test_rows_are_packed_once_an_epoch(corpus, monkeypatch):
    packed = []
    real = Corpus._packed
    monkeypatch.setattr(Corpus, "_packed", lambda self, o: packed.append(1) or real(self, o))
    many = len(corpus.rows(0)) // 4
    for number in (0, many, many + 1, 2 * many, 2 * many + 1):
        corpus.step(number, 4)
    assert len(packed) == 3


def test_what_does_not_fit_or_has_no_chain_is_left_out():
    corpus = Corpus(made([(2, LENGTH), (2, LENGTH + 1), (7, 8), (6, 8)]), LENGTH, seed=0)
    assert [entry.number for entry, _ in corpus.sequences] == [0, 3]
    assert corpus.tokens == LENGTH + 8


def test_more_rows_than_there_are_come_again():
    corpus = Corpus(made([(1, 30)]), LENGTH, seed=0)
    assert corpus.step(5, 3)[0].tokens.shape == (3, LENGTH)
