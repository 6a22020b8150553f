"""Votes of places, token by token, and the survival of what wins.  Finds no places."""

from __future__ import annotations

import pytest

from speculative.chains import NO_ID, Chains
from speculative.predicted import LOST, Place, Prediction
from speculative.voting import (
    FLOOR,
    LENGTHS,
    OWN,
    PREDICTED,
    PRIORS,
    REACH,
    RUNS,
    SAID,
    SHARES,
    lines_of,
    read,
    vote,
)

SURE = [0.9] * len(PRIORS)


def text(*tokens: int) -> Chains:
    made = Chains()
    made.extend(tokens)
    return made


def test_every_kind_of_guess_has_a_cell_of_its_own_with_a_prior():
    votes = {source + LENGTHS[length] + share for source in (OWN, SAID)
             for length in range(2, REACH + 1) for share in range(SHARES)}
    runs = {RUNS[run] for run in range(1, REACH + 1)} | {PREDICTED + n for n in range(LOST + 1)}
    assert not votes & runs
    assert votes | runs == set(range(len(PRIORS)))
    assert all(0 < prior < 1 for prior in PRIORS)


def test_the_most_weight_wins_and_the_losers_drop_out():
    spots = [(text(1, 2, 9, 9), 0, 2), (text(1, 3, 4, 5), 0, 2), (text(1, 3, 4, 6), 0, 2)]
    tokens, survival, cells = vote(lines_of(spots, 4, Chains(), ()), 4, SURE)
    assert tokens == [1, 3, 4, 5]
    assert survival == pytest.approx([0.9, 0.81, 0.729, 0.6561])
    shares = [cell % SHARES for cell in cells]
    assert shares[1] < shares[0]
    assert shares[2] > shares[1]  # those who are left agree
    assert shares[3] < shares[2]
    assert shares[3] / SHARES > 1 / 3  # one of two, no longer one of three


def test_a_longer_match_outweighs_a_shorter_one():
    spots = [(text(1, 2), 0, 9), (text(1, 3), 0, 2), (text(1, 3), 0, 2)]
    assert vote(lines_of(spots, 2, Chains(), ()), 2, SURE)[0] == [1, 2]


def test_a_chain_ends_where_its_survival_falls_below_the_floor():
    line = lines_of([(text(*range(50)), 0, 5)], 40, Chains(), ())
    survival = vote(line, 40, [0.5] * len(PRIORS))[1]
    assert survival[-1] >= FLOOR > survival[-1] / 2


def test_nobody_votes_for_what_is_no_token():
    assert vote(lines_of([(text(5, NO_ID, 6), 0, 3)], 4, Chains(), ()), 4, SURE)[0] == [5]
    assert vote(lines_of([(text(5, 6), 1, 3)], 4, Chains(), ()), 4, SURE)[0] == [6]
    assert vote([], 4, SURE) == ([], [], [])


def test_the_own_text_goes_on_with_what_is_drafted_and_with_itself():
    own = text(1, 2, 3)
    assert vote(lines_of([(own, 1, 2)], 7, own, [8, 9]), 7, SURE)[0] == [2, 3, 8, 9, 2, 3, 8]
    assert vote(lines_of([(own, 2, 2)], 3, own, ()), 3, SURE)[0] == [3, 3, 3]


def test_a_prediction_is_read_from_its_place_until_it_is_lost():
    prediction = Prediction([1, 2, 3, NO_ID, 5])
    assert read(prediction, Place(), 2, SURE)[0] == [1, 2]
    assert read(prediction, Place(1, 4), 9, SURE)[0] == [2, 3]
    assert read(prediction, Place(1, 0, LOST), 1, SURE)[0] == [2]
    assert read(prediction, Place(1, 0, LOST + 1), 1, SURE)[0] == []
    assert read(prediction, Place(5, 9), 3, SURE)[0] == []
    cells = read(prediction, Place(0, 0, 2), 3, SURE)[2]
    assert cells == [PREDICTED + 2, RUNS[1], RUNS[2]]
